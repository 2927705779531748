#!/usr/bin/env python3
"""Writes docs/cli.md from the program's own --help.

cli_reference.py PROGRAM [--check]: with --check nothing is written, and the exit code is 1 when the
page is not what the program says.
"""

import os
import pathlib
import re
import subprocess
import sys

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "cli.md"


def help_text(program, verbs):
    text = subprocess.run([program, *verbs, "--help"], check=True, capture_output=True, text=True,
                          env={**os.environ, "COLUMNS": "100"}).stdout
    # The footer repeats itself under every verb; it is printed once, at the top.
    return text if not verbs else text.split("\n`hcache VERB --help`")[0].rstrip() + "\n"


def subcommands(text):
    found = re.search(r"^Subcommands:\n((?:  .*\n)+)", text, re.M)
    return re.findall(r"^  (\S+)", found.group(1), re.M) if found else []


def sections(program, verbs, out):
    text = help_text(program, verbs)
    name = " ".join(["hcache", *verbs])
    out.append(f"## {name}\n\n```text\n{text.rstrip()}\n```\n")
    for verb in subcommands(text):
        sections(program, [*verbs, verb], out)


def main():
    program = sys.argv[1]
    out = ["# The command line\n\nMade from `--help` by `scripts/cli_reference.py`; `apps/cli/options.h` "
           "says how an option is declared.\n"]
    sections(program, [], out)
    page = "\n".join(out)
    if "--check" not in sys.argv:
        PAGE.write_text(page, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        sys.exit(f"docs/cli.md is out of date; run scripts/cli_reference.py {program}")


if __name__ == "__main__":
    main()
