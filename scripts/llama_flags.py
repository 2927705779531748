#!/usr/bin/env python3
"""The flags and variables that llama-server takes, one per line, for the test of ours.

llama_flags.py            writes tests/unit/llama_server_flags.txt from the pinned llama.cpp
llama_flags.py --check    exit code 1 when that file is not what the pinned version takes

A line holds a flag's spellings with commas (a switch's negations with it), how many values it takes,
and its variable or "-". The first line names the version. Where the sources are not unpacked only
the version is checked.
"""

import re
import sys
from pathlib import Path

import third_party

LIST = Path(__file__).resolve().parent.parent / "tests" / "unit" / "llama_server_flags.txt"
NAME = re.compile(r'"(--?[A-Za-z][\w.-]*)"')


TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|//[^\n]*|.', re.S)
COMMENT = re.compile(r"^\s*//.*$", re.M)


def parser_source():
    folder = f"{third_party.LLAMA_PACKAGE}-{third_party.LLAMA_VERSION}"
    return third_party.cache_dir() / folder / "vendor" / "llama.cpp" / "common" / "arg.cpp"


def declaration(text, start):
    """What stands between the parenthesis at `start` and its partner; strings and comments count as one."""
    depth = 0
    for token in TOKEN.finditer(text, start):
        if token.group(0) in "({":
            depth += 1
        elif token.group(0) in ")}":
            depth -= 1
            if depth == 0:
                return COMMENT.sub("", text[start + 1:token.start()]), token.end()


def flags(text):
    """Of every `add_opt(common_arg(...).set_examples({...}).set_env("..."));` what the server takes."""
    for found in re.finditer(r"add_opt\(common_arg(?=\()", text):
        body, end = declaration(text, found.end())
        attributes = text[end:text.index(";", end)]
        examples = re.search(r"set_examples\(\{(.*?)\}\)", attributes, re.S)
        if examples and not re.search(r"LLAMA_EXAMPLE_(SERVER|COMMON)\b", examples.group(1)):
            continue
        excluded = re.search(r"set_excludes\(\{(.*?)\}\)", attributes, re.S)
        if (excluded and "LLAMA_EXAMPLE_SERVER" in excluded.group(1)) or "set_preset_only" in attributes:
            continue
        lists = re.match(r"\s*(\{[^}]*\})\s*,\s*(\{[^}]*\})?", body)
        names = NAME.findall(lists.group(0))
        # The hints of values stand between the names and the help; a switch has none.
        handler = re.search(r"\[\]\(([^)]*)\)", body).group(1)
        values = len(handler.split(",")) - 1 if "bool" not in handler else 0
        variable = re.search(r'set_env\("(\w+)"\)', attributes)
        yield f"{','.join(names)} {values} {variable.group(1) if variable else '-'}"


def main():
    first = f"{third_party.LLAMA_PACKAGE} {third_party.LLAMA_VERSION}"
    source = parser_source()
    if "--check" not in sys.argv:
        LIST.write_text("\n".join([first, *dict.fromkeys(flags(source.read_text(encoding="utf-8")))]) + "\n",
                        encoding="utf-8")
        return
    lines = LIST.read_text(encoding="utf-8").splitlines()
    if lines[0] != first:
        sys.exit(f"{LIST.name} lists the flags of {lines[0]}, built is {first}: run scripts/llama_flags.py")
    if source.exists() and lines[1:] != list(dict.fromkeys(flags(source.read_text(encoding="utf-8")))):
        sys.exit(f"{LIST.name} is not what llama-server takes: run scripts/llama_flags.py")


if __name__ == "__main__":
    main()
