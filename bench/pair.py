#!/usr/bin/env python3
"""Compares two builds of the program: prefill and decoding, in turns, repetition by repetition.

    bench/pair.py --other build/package/bin/hcache      a package's build against the native one
    bench/pair.py --quick                               the program against itself: proves the script

Printed are the medians of the paired ratios other / program and their lower bound (95 %, one-sided).
With --at-least R the exit code is 1 where a median is smaller.
"""

import argparse
import sys
from pathlib import Path

import benchlib as lib


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    lib.add_common_options(parser)
    parser.add_argument("--other", type=Path, help="the program that is compared with --program")
    parser.add_argument("--prompt", default="512,2048", help="prompt lengths")
    parser.add_argument("--gen", type=int, default=64, help="tokens to decode")
    parser.add_argument("--reps", type=int, default=9)
    parser.add_argument("--at-least", type=float, metavar="R", help="least median ratio")
    args = parser.parse_args()
    if args.quick:
        args.other = args.other or args.program
        args.prompt, args.gen, args.reps = "64", 8, 2
    if args.other is None:
        parser.error("--other names the program to compare with")
    args.model = args.model or lib.default_model()
    return args


def main() -> None:
    args = parse_args()
    runs = []
    for program in (args.program, args.other):
        args.program = program
        runs.append(lib.Paced(lib.Hcache(args), "throughput", "-m", args.model, "--prompt",
                              args.prompt, "--gen", args.gen, "--depth", 0, "--capture", "off",
                              "--reps", args.reps))
    for turn in range(args.reps + 1):  # the first one warms up
        for run in runs if turn % 2 == 0 else reversed(runs):
            run.turn()
    first, other = (run.results() for run in runs)
    rows = []
    for ours, theirs in zip(first["rows"], other["rows"], strict=True):
        rows.append(lib.compare(f"prefill {ours['prompt']}", theirs["prefill_samples"],
                                ours["prefill_samples"]))
    rows.append(lib.compare(f"decode {args.gen}",
                            [x for row in other["rows"] for x in row["decode_samples"]],
                            [x for row in first["rows"] for x in row["decode_samples"]]))
    print(lib.table(["tokens/s", "program", "other", "ratio", "at least"],
                    [[r["name"], f"{r['theirs']:.1f}", f"{r['ours']:.1f}", f"{r['ratio']:.3f}",
                      f"{r['lower_bound']:.3f}"] for r in rows]))
    lib.write_results(args.json_file, {"machine": other["machine"], "rows": rows})
    if args.at_least and min(r["ratio"] for r in rows) < args.at_least:
        sys.exit(1)


if __name__ == "__main__":
    main()
