#!/usr/bin/env python3
"""Writes hcache.1 from the program's own --help, which comes from its table of options.

man_page.py PROGRAM FILE: a FILE that ends in .gz is compressed.
"""

import gzip
import re
import subprocess
import sys
from pathlib import Path

import cli_reference

COLUMN = 34  # of the descriptions in --help
FILES = [
    ("~/.local/state/hcache", "cost profiles, digests and the store, unless --state-dir or "
     "$XDG_STATE_HOME names another folder"),
    ("/etc/hcache/hcache.conf", "variables and options of the systemd service hcache.service"),
]
ENVIRONMENT = [
    ("HCACHE_MODEL", "the model where -m names none"),
    ("HCACHE_REMOTE", "the store of several machines where --remote names none"),
    ("LLAMA_ARG_*, LLAMA_API_KEY", "llama-server's variables, for hcache serve"),
    ("GOMP_SPINCOUNT, OMP_WAIT_POLICY", "how compute threads wait for each other; by default they "
     "give up a core within microseconds"),
]


def escape(text):
    """Text as roff prints it: no line is taken for a request, and a hyphen stays one."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    text = text.replace("…", "...").replace("–", "\\(en")
    return "\\&" + text if text.startswith(".") else text


def parse(text):
    """What a verb's help says: (description, usage, [(option's head, what it does)])."""
    lines = text.splitlines()
    usage = next(i for i, line in enumerate(lines) if line.startswith("Usage: "))
    options, inside = [], False
    for line in lines[usage + 1:]:
        if line and not line.startswith(" "):
            inside = line in ("Options:", "Positionals:")
        elif inside and re.match(r"  \S", line):
            # A head that reaches the column of the descriptions has its own on the next line.
            cut = COLUMN if line[COLUMN - 1:COLUMN] == " " else len(line)
            options.append([line[:cut].strip(), line[cut:].strip()])
        elif inside and line.strip():
            options[-1][1] = f"{options[-1][1]} {line.strip()}".strip()
    return " ".join(lines[:usage]).strip(), lines[usage][len("Usage: "):], options


def paragraph(head, what):
    return [".TP", f".B {escape(head)}", escape(what) or "\\&"]


def describe(program, verbs, out):
    text = cli_reference.help_text(program, verbs)
    about, usage, options = parse(text)
    if verbs:
        out += [f".SS {escape(' '.join(['hcache', *verbs]))}", escape(about), ".PP",
                f".B {escape(usage)}"]
        for head, what in options:
            if "--help" not in head:
                out += paragraph(head, what)
    for verb in cli_reference.subcommands(text):
        describe(program, [*verbs, verb], out)


def page(program):
    text = cli_reference.help_text(program, [])
    about, usage, options = parse(text)
    version = subprocess.run([program, "--version"], check=True, capture_output=True,
                             text=True).stdout.strip()
    statuses = re.search(r"Exit codes: (.*?)\.\s*$", text, re.S).group(1)
    out = [f'.TH HCACHE 1 "" "hcache {escape(version)}" "User Commands"', ".SH NAME",
           "hcache \\- language models whose conversations survive", ".SH SYNOPSIS",
           f".B {escape(usage)}", ".SH DESCRIPTION", escape(about), ".SH OPTIONS"]
    for head, what in options:
        out += paragraph(head, what)
    out.append(".SH COMMANDS")
    describe(program, [], out)
    out.append(".SH EXIT STATUS")
    for status in " ".join(statuses.split()).split(", "):
        code, _, meaning = status.partition(" ")
        out += paragraph(code, meaning)
    for title, rows in ((".SH ENVIRONMENT", ENVIRONMENT), (".SH FILES", FILES)):
        out.append(title)
        for head, what in rows:
            out += paragraph(head, what)
    return "\n".join(out) + "\n"


def main():
    program, file = sys.argv[1], Path(sys.argv[2])
    data = page(program).encode()
    # No name and no time: the same program makes the same file.
    file.write_bytes(gzip.compress(data, mtime=0) if file.suffix == ".gz" else data)


if __name__ == "__main__":
    main()
