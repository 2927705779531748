#!/usr/bin/env python3
"""Compares two builds of the program in turns, repetition by repetition.

    bench/pair.py --other build/package/bin/hcache      a package's build against the native one
    bench/pair.py --other OLD/bin/hcache --restore 512,2048,4096 --reps 7
                                                        time to first token of restored conversations
    bench/pair.py --quick                               the program against itself: proves the script

Without --restore, prefill and decoding are compared in tokens per second, --program's build being the
base: printed are the medians of the paired ratios other / program and their lower bound (95 %,
one-sided). With --at-least R the exit code is 1 where a median is smaller.

With --restore, conversations of those lengths are restored by every method with and without the
paper's link, from the disk. --other's build is the base: printed are the medians of the paired ratios
program / other and their upper bound. The machine's costs are measured once, by the other program, so
that both plan alike. With --at-most R the exit code is 1 where a median is larger; it is also 1 where a
restored KV cache differs from the prefilled one by a bit.
"""

import argparse
import shutil
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
    parser.add_argument("--at-least", type=float, metavar="R", help="least median ratio of speeds")
    parser.add_argument("--restore", metavar="LENGTHS", help="compare restores of so many tokens")
    parser.add_argument("--methods", default="plan,hidden,kv", help="of the restores")
    parser.add_argument("--links", default="none,paper", help="of the restores")
    parser.add_argument("--at-most", type=float, metavar="R", help="largest median ratio of times")
    args = parser.parse_args()
    if args.quick:
        args.other = args.other or args.program
        args.prompt, args.gen, args.reps = "64", 8, 2
        args.restore = args.restore and "128"
    if args.other is None:
        parser.error("--other names the program to compare with")
    args.model = args.model or lib.default_model()
    return args


def take_turns(runs: list[lib.Paced], turns: int) -> list[dict]:
    for turn in range(turns):
        for run in runs if turn % 2 == 0 else reversed(runs):
            run.turn()
    return [run.results() for run in runs]


def pair_speeds(args: argparse.Namespace) -> tuple[dict, list[dict], bool]:
    runs = []
    for program in (args.program, args.other):
        args.program = program
        runs.append(lib.Paced(lib.Hcache(args), "throughput", "-m", args.model, "--prompt",
                              args.prompt, "--gen", args.gen, "--depth", 0, "--capture", "off",
                              "--reps", args.reps))
    first, other = take_turns(runs, args.reps + 1)  # the first one warms up
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
    return other["machine"], rows, not args.at_least or all(
        row["ratio"] >= args.at_least for row in rows)


def pair_restores(args: argparse.Namespace) -> tuple[dict, list[dict], bool]:
    work, rows, machine = args.work, [], {}
    programs = (args.program, args.other)
    folders = (work / "pair-program", work / "pair-other")
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    args.program, args.work = args.other, folders[1]
    lib.Hcache(args).measure_costs(args.model)
    shutil.copytree(folders[1], folders[0])
    for history in args.restore.split(","):
        runs = []
        for args.program, args.work in zip(programs, folders, strict=True):
            runs.append(lib.Paced(lib.Hcache(args), "restore", "-m", args.model, "--history", history,
                                  "--new", 50, "--greedy", 2, "--decoded", 2, "--methods",
                                  args.methods, "--link", args.links, "--reps", args.reps))
        first, other = take_turns(runs, args.reps + 1)
        machine = first["machine"]
        for ours, theirs in zip(first["rows"], other["rows"], strict=True):
            name = f"{ours['history']} {ours['method']} {ours['link']}"
            row = lib.compare(name, ours["ttft_samples_ms"], theirs["ttft_samples_ms"])
            inverse = lib.compare(name, theirs["ttft_samples_ms"], ours["ttft_samples_ms"])
            row["upper_bound"] = 1 / inverse["lower_bound"]
            rows.append({**row, "schedule": ours["schedule"], "schedule_other": theirs["schedule"],
                         "kv_identical": ours["fidelity"]["kv_identical"],
                         "samples_ms": ours["ttft_samples_ms"],
                         "samples_other_ms": theirs["ttft_samples_ms"]})
    args.work = work
    print(lib.table(["time to first token, ms", "program", "other", "ratio", "at most", "pairs", "KV"],
                    [[r["name"], f"{r['ours']:.1f}", f"{r['theirs']:.1f}", f"{r['ratio']:.3f}",
                      f"{r['upper_bound']:.3f}", r["pairs"],
                      "identical" if r["kv_identical"] else "DIFFERS"] for r in rows]))
    good = all(row["kv_identical"] for row in rows)
    return machine, rows, good and (
        not args.at_most or all(row["ratio"] <= args.at_most for row in rows))


def main() -> None:
    args = parse_args()
    machine, rows, good = (pair_restores if args.restore else pair_speeds)(args)
    lib.write_results(args.json_file, {"machine": machine, "rows": rows})
    if not good:
        sys.exit(1)


if __name__ == "__main__":
    main()
