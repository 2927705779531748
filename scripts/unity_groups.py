#!/usr/bin/env python3
"""Says which source files may be compiled together (cmake/Unity.cmake).

unity_groups.py SIZE FILE...: prints GROUP=FILE lines. A group has at most SIZE files, in the order
given, and no name means one thing in one of them and something else in another.
"""

import re
import sys
from pathlib import Path

UNNAMED = re.compile(r"^namespace \{\n(.*?)^\}  // namespace\n", re.S | re.M)
# A definition begins in the first column there (clang-format sees to that).
TYPE = re.compile(r"(?:struct|class|enum class|enum) (\w+)")
VALUE = re.compile(r"[\w:<>,&*\s\[\]().]*?[\s&*](\w+)\s*(?:[(={;\[]|$)")
# Other names for what is declared elsewhere, which may stand anywhere and be repeated.
ALIAS = re.compile(r"^(?:using|namespace) (\w+) = (.*)", re.M)
USING = re.compile(r"^using ((?:\w+::)+(\w+));", re.M)


def local_names(file):
    """The names that a file keeps to itself, and what each stands for."""
    text = Path(file).read_text(encoding="utf-8")
    names = dict(ALIAS.findall(text)) | {name: full for full, name in USING.findall(text)}
    for block in UNNAMED.findall(text):
        for line in block.splitlines():
            if not (line[:1].isalpha() or line[:1] == "_") or line.startswith(("using ", "namespace ")):
                continue
            found = TYPE.match(line) or VALUE.match(line)
            if found:
                names[found.group(1)] = file
    return names


def grouped(files, size):
    groups = []  # (files, their names)
    for file in files:
        names = local_names(file)
        for members, taken in groups:
            if len(members) < size and all(taken.get(name, what) == what for name, what in names.items()):
                members.append(file)
                taken |= names
                break
        else:
            groups.append(([file], dict(names)))
    return [members for members, _ in groups]


def main():
    for number, members in enumerate(grouped(sys.argv[2:], int(sys.argv[1]))):
        for file in members:
            print(f"{number}={file}")


if __name__ == "__main__":
    main()
