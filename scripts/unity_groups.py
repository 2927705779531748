#!/usr/bin/env python3
"""Says which source files may be compiled together (cmake/Unity.cmake).

unity_groups.py SIZE FILE...: prints GROUP=FILE lines. A group has at most SIZE files, in the order
given, and no two of them define the same name in an unnamed namespace.
"""

import re
import sys
from pathlib import Path

UNNAMED = re.compile(r"^namespace \{\n(.*?)^\}  // namespace\n", re.S | re.M)
# A definition begins in the first column there (clang-format sees to that).
TYPE = re.compile(r"(?:struct|class|enum class|enum) (\w+)|(?:using|namespace) (\w+) =")
VALUE = re.compile(r"[\w:<>,&*\s\[\]().]*?[\s&*](\w+)\s*(?:[(={;\[]|$)")


def local_names(file):
    """The names that a file keeps to itself."""
    names = set()
    for block in UNNAMED.findall(Path(file).read_text(encoding="utf-8")):
        for line in block.splitlines():
            if not line or not (line[0].isalpha() or line[0] == "_"):
                continue
            found = TYPE.match(line) or VALUE.match(line)
            if found:
                names |= {name for name in found.groups() if name}
    return names


def grouped(files, size):
    groups = []  # (files, their names)
    for file in files:
        names = local_names(file)
        for members, taken in groups:
            if len(members) < size and not names & taken:
                members.append(file)
                taken |= names
                break
        else:
            groups.append(([file], set(names)))
    return [members for members, _ in groups]


def main():
    for number, members in enumerate(grouped(sys.argv[2:], int(sys.argv[1]))):
        for file in members:
            print(f"{number}={file}")


if __name__ == "__main__":
    main()
