#!/usr/bin/env python3
"""Compares two builds of the program in turns, repetition by repetition.

    bench/pair.py --other build/package/bin/hcache      a package's build against the native one
    bench/pair.py --other OLD/bin/hcache --restore 512,2048,4096 --reps 7
                                                        time to first token of restored conversations
    bench/pair.py --restore 1024,4096 --links none --encrypted
                                                        the same from an encrypted store, over a plain one
    bench/pair.py --quick                               the program against itself: proves the script

Without --restore, prefill and decoding are compared in tokens per second, --program's build being the
base: printed are the medians of the paired ratios other / program and their lower bound (95 %,
one-sided). With --at-least R the exit code is 1 where a median is smaller.

With --restore, conversations of those lengths are restored by every method with and without the
paper's link, from the disk. --other's build is the base: printed are the medians of the paired ratios
program / other and their upper bound. The machine's costs are measured once, by the other program, so
that both plan alike. With --at-most R the exit code is 1 where a median is larger; it is also 1 where a
restored KV cache differs from the prefilled one by a bit. With --encrypted --program's store has a key,
and --other is the same build unless it is named.

How a process' memory happens to lie makes it percents faster or slower for as long as it lives. So the
repetitions are spread over --processes processes of each build, started in one order and in the other.
"""

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import benchlib as lib


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    lib.add_common_options(parser)
    parser.add_argument("--other", type=Path, help="the program that is compared with --program")
    parser.add_argument("--prompt", default="512,2048", help="prompt lengths")
    parser.add_argument("--gen", type=int, default=64, help="tokens to decode")
    parser.add_argument("--reps", type=int, default=10, help="pairs, over all processes")
    parser.add_argument("--processes", type=int, default=2, metavar="N",
                        help="of each build, one after the other; even, so that each is first as often")
    parser.add_argument("--at-least", type=float, metavar="R", help="least median ratio of speeds")
    parser.add_argument("--restore", metavar="LENGTHS", help="compare restores of so many tokens")
    parser.add_argument("--methods", default="plan,hidden,kv", help="of the restores")
    parser.add_argument("--links", default="none,paper", help="of the restores")
    parser.add_argument("--encrypted", action="store_true", help="--program restores from an encrypted store")
    parser.add_argument("--at-most", type=float, metavar="R", help="largest median ratio of times")
    args = parser.parse_args()
    if args.quick:
        args.other = args.other or args.program
        args.prompt, args.gen, args.reps, args.processes = "64", 8, 2, 2
        args.restore = args.restore and "128"
    if args.encrypted:
        args.other = args.other or args.program
        if not args.restore:
            parser.error("--encrypted compares restores: give --restore")
    if args.other is None:
        parser.error("--other names the program to compare with")
    args.model = args.model or lib.default_model()
    return args


def take_turns(args: argparse.Namespace, start: Callable[[int, int], lib.Paced]) -> list[list[dict]]:
    """What start(0 or 1, repetitions) measures, by program, then by process."""
    out: list[list[dict]] = [[], []]
    for process in range(args.processes):
        reps = (args.reps + args.processes - 1) // args.processes
        order = (0, 1) if process % 2 == 0 else (1, 0)
        runs = {which: start(which, reps) for which in order}
        for turn in range(reps + 1):  # the first one warms up
            for which in order if turn % 2 == 0 else reversed(order):
                runs[which].turn()
        for which in (0, 1):
            out[which].append(runs[which].results())
    return out


def pair_speeds(args: argparse.Namespace) -> tuple[dict, list[dict], bool]:
    programs = (args.program, args.other)

    def start(which: int, reps: int) -> lib.Paced:
        args.program = programs[which]
        return lib.Paced(lib.Hcache(args), "throughput", "-m", args.model, "--prompt", args.prompt,
                         "--gen", args.gen, "--depth", 0, "--capture", "off", "--reps", reps)

    first, other = take_turns(args, start)

    def samples(results: list[dict], name: str, prompt: int | None) -> list[float]:
        return [x for result in results for row in result["rows"]
                if prompt in (None, row["prompt"]) for x in row[name]]

    rows = []
    for prompt in [row["prompt"] for row in first[0]["rows"]]:
        rows.append(lib.compare(f"prefill {prompt}", samples(other, "prefill_samples", prompt),
                                samples(first, "prefill_samples", prompt)))
    rows.append(lib.compare(f"decode {args.gen}", samples(other, "decode_samples", None),
                            samples(first, "decode_samples", None)))
    print(lib.table(["tokens/s", "program", "other", "ratio", "at least"],
                    [[r["name"], f"{r['theirs']:.1f}", f"{r['ours']:.1f}", f"{r['ratio']:.3f}",
                      f"{r['lower_bound']:.3f}"] for r in rows]))
    return other[0]["machine"], rows, not args.at_least or all(
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
    keys: tuple[list, list] = ([], [])
    if args.encrypted:
        lib.Hcache(args).run("store", "new-key", "-o", folders[0] / "key")
        keys[0].extend(["--encrypt-key-file", folders[0] / "key"])
    for history in args.restore.split(","):
        def start(which: int, reps: int, history: str = history) -> lib.Paced:
            args.program, args.work = programs[which], folders[which]
            return lib.Paced(lib.Hcache(args), "restore", "-m", args.model, "--history", history,
                             "--new", 50, "--greedy", 2, "--decoded", 2, "--methods", args.methods,
                             "--link", args.links, "--reps", reps, *keys[which])

        first, other = take_turns(args, start)
        machine = first[0]["machine"]
        for i, row in enumerate(first[0]["rows"]):
            ours = [result["rows"][i] for result in first]
            theirs = [result["rows"][i] for result in other]
            name = f"{row['history']} {row['method']} {row['link']}"
            ms, other_ms = ([x for one in each for x in one["ttft_samples_ms"]]
                            for each in (ours, theirs))
            compared = lib.compare(name, ms, other_ms)
            compared["upper_bound"] = 1 / lib.compare(name, other_ms, ms)["lower_bound"]
            rows.append({**compared, "schedule": row["schedule"],
                         "schedule_other": theirs[0]["schedule"],
                         "kv_identical": all(one["fidelity"]["kv_identical"] for one in ours),
                         "samples_ms": ms, "samples_other_ms": other_ms})
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
