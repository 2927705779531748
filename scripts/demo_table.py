#!/usr/bin/env python3
"""Prints what `make demo` measured.

demo_table.py FIRST UNINTERRUPTED METHOD...: the turns of process one and of the uninterrupted run
(JSON lines of `hcache chat --json`), and for each method the path, without .json, of what
`hcache run --json` printed.
"""

import json
import os
import sys
import textwrap


def read_turns(path):
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f if line.strip()]


def compare(tokens, expected):
    """'identical', or the first position at which two answers part."""
    for i, (a, b) in enumerate(zip(tokens, expected)):
        if a != b:
            return f"parts at token {i + 1} of {len(expected)}"
    if len(tokens) != len(expected):
        return f"parts at token {min(len(tokens), len(expected)) + 1} of {len(expected)}"
    return "identical"


def size(n):
    return f"{n / 2**20:.1f} MiB" if n >= 2**20 else f"{n / 2**10:.1f} KiB"


def print_columns(rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def main():
    first_path, uninterrupted_path, *method_paths = sys.argv[1:]
    first = read_turns(first_path)
    expected = read_turns(uninterrupted_path)[-1]
    print(f"process 1 began by computing {first[0]['prompt_tokens']} tokens: first token after "
          f"{first[0]['ttft_ms'] / 1000:.2f} s. The conversation grew to "
          f"{expected['history_tokens']} tokens.\n")

    rows = [["method", "first token", "bytes read", "I/O busy", "compute busy", "schedule",
             "answer against the uninterrupted run"]]
    parted = []
    for path in method_paths:
        with open(path + ".json", encoding="utf-8") as f:
            turn = json.load(f)
        restore = turn["restore"]
        verdict = compare(turn["reply_tokens"], expected["reply_tokens"])
        rows.append([
            os.path.basename(path),
            f"{turn['ttft_ms']:.0f} ms",
            size(restore["bytes_read"]),
            f"{restore['io_busy_ms']:.0f} ms",
            f"{restore['compute_busy_ms']:.0f} ms",
            restore["schedule"] or "-",
            verdict,
        ])
        if verdict != "identical":
            parted.append((os.path.basename(path), turn["reply"]))
    rows.append(["(resident)", f"{expected['ttft_ms']:.0f} ms", "-", "-", "-", "-",
                 "the uninterrupted run itself"])
    print_columns(rows)

    def show(title, text):
        print(f"\n{title}:")
        print(textwrap.fill(text.strip(), width=96, initial_indent="  ", subsequent_indent="  "))

    show("the answer", expected["reply"])
    for name, reply in parted:
        show(f"the answer after {name}", reply)


if __name__ == "__main__":
    main()
