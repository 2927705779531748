#!/usr/bin/env python3
"""Prefill, steps of few rows and decoding against llama-bench, per weight type and kernel.

    bench/products.py                       the default model, and three layers of Llama-2-7B's shape
                                            in Q4_0, Q4_K, Q6_K and Q8_0 (about an hour on two cores)
    bench/products.py --types q8_0          some of them
    bench/products.py --prompts 4,8,16 --reps 12
                                            steps of few rows alone: each is a few tens of
                                            milliseconds, of which three tell little
    bench/products.py --kernels amx,avx2    each of these of ours, instead of the fastest alone
    bench/products.py --limits build/release/bin/projection_bench
                                            beside each figure the most that this machine's memory
                                            and int8 products give, measured in turns with it (built
                                            with cmake -DHCACHE_BENCH=ON)
    bench/products.py --quick               tiny settings: proves the script, measures nothing

A prompt of 4, 8 or 16 tokens is a step of as many rows: what a batch of conversations costs. Both
programs take turns, repetition by repetition; ratios are medians of pairs with a bootstrap lower
bound (95 %, one-sided), against the better of llama-bench's -fa 0 and 1. With --limits "most" is the
speed at which the weights would be read as fast as memory reads in order, or multiplied with nothing
but int8 products of vectors in registers, whichever takes longer, and nothing else took any time: a
target beyond it can't be met there, and one near it hardly. Whether the results are
right is model_products_test's business.
"""

import argparse
import json
import math
import os
import subprocess
from pathlib import Path

import benchlib as lib
import peer
from bars import Bars

STEPS = {4: 2.0, 8: 2.5, 16: 2.0}
PROMPTS = (512, 2048)
TYPES = "default,q4_0,q4_K,q6_K,q8_0"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    lib.add_common_options(parser)
    parser.add_argument("--types", default=TYPES, help="weight types of the large layers; default: "
                        "the default model, which has its own")
    parser.add_argument("--kernels", default="", help="names for HCACHE_PRODUCTS; default: the fastest")
    parser.add_argument("--prompts", default=",".join(map(str, [*STEPS, *PROMPTS])),
                        help="rows of steps, tokens of prompts")
    parser.add_argument("--shape", default="llama2-7b")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--gen", type=int, default=32)
    parser.add_argument("--limits", type=Path, metavar="PROGRAM", help="projection_bench")
    parser.add_argument("--text", type=Path, default=lib.ROOT / "demo/lighthouse.txt")
    args = parser.parse_args()
    args.prompts = [int(n) for n in args.prompts.split(",")]
    if args.quick:
        args.reps, args.gen, args.prompts, args.types = 1, 4, [4, 64], "q8_0"
        args.shape, args.layers = lib.QUICK_SHAPE, lib.QUICK_LAYERS
    args.llama_bench = lib.peer_programs(args.device)["llama-bench"]
    return args


def start(args: argparse.Namespace, hcache: lib.Hcache, kernels: str) -> lib.Paced:
    """Our benchmark with these kernels, warmed up."""
    if kernels:
        os.environ["HCACHE_PRODUCTS"] = kernels
    run = lib.Paced(hcache, "throughput", "-m", args.model, "--text", args.text, "--prompt",
                    ",".join(map(str, args.prompts)), "--gen", args.gen, "--depth", 0, "--capture",
                    "off", "--reps", args.reps)
    os.environ.pop("HCACHE_PRODUCTS", None)
    run.turn()
    return run


class Limits:
    """The speed, in tokens/s, at which a model's products are as fast as memory and int8 let them."""

    def __init__(self, args: argparse.Namespace, hcache: lib.Hcache):
        self.command = [args.limits, "--limits", "--threads", str(args.threads), "--reps", "3"]
        tensors = json.loads(hcache.run("model", "info", args.model, "--json", "--tensors"))["tensors"]
        matrices = {t["name"]: t for t in tensors if len(t["shape"]) == 2}
        embeddings = matrices.pop("token_embd.weight")
        # Of a prompt the last row's logits alone are computed.
        self.once = [matrices.pop("output.weight", embeddings)]
        self.each = list(matrices.values())
        self.measured: list[dict] = []

    def turn(self) -> None:
        out = subprocess.run(self.command, check=True, stdout=subprocess.PIPE, text=True).stdout
        self.measured.append(json.loads(out))

    def most(self, n_rows: int) -> float:
        read = lib.median([m["read_bytes_per_s"] for m in self.measured])
        ops = lib.median([m["int8_ops_per_s"] for m in self.measured])

        def seconds(tensors: list[dict], rows: int) -> float:
            n_weights = sum(math.prod(t["shape"]) for t in tensors)
            return max(sum(t["bytes"] for t in tensors) / read, 2 * n_weights * rows / ops)

        return n_rows / (seconds(self.each, n_rows) + seconds(self.once, 1))


def measure(args: argparse.Namespace, bars: Bars, name: str) -> None:
    kernels = args.kernels.split(",")
    runs = {k: start(args, bars.hcache, k) for k in kernels}
    limits = Limits(args, bars.hcache) if args.limits else None
    theirs: dict = {"0": {}, "1": {}}
    options = ["-p", ",".join(map(str, args.prompts)), "-n", str(args.gen)]
    for rep in range(args.reps):
        lib.say(f"{name}: repetition {rep + 1} of {args.reps}")
        for flash, speeds in theirs.items():
            for key, value in peer.llama_bench(args, options, flash).items():
                speeds.setdefault(key[:2], []).append(value)
        for run in runs.values():
            run.turn()
        if limits:
            limits.turn()
    for kernel, run in runs.items():
        results = run.results()
        bars.machine = results["machine"]
        ours = {(row["prompt"], 0): row["prefill_samples"] for row in results["rows"]}
        ours[(0, args.gen)] = results["rows"][0]["decode_samples"]
        for key, samples in ours.items():
            best = max(theirs, key=lambda flash, k=key: lib.median(theirs[flash][k]))
            check(bars, name, kernel, key, lib.compare(name, samples, theirs[best][key]))
            if limits:
                bars.rows[-1]["most"] = limits.most(max(key[0], 1))
    if limits:
        bars.details[f"limits of {name}"] = limits.measured


def check(bars: Bars, name: str, kernel: str, key: tuple[int, int], row: dict) -> None:
    prompt, gen = key
    what = f"decode {gen}" if prompt == 0 else f"prefill {prompt}"
    if prompt in STEPS:
        what = f"a step of {prompt} rows"
    if prompt == 0:
        target = 1.0
    elif kernel.startswith("avx2"):
        target = 1.3
    else:
        target = STEPS.get(prompt, 1.6 if name == "default" else 2.0)
    label = f"{name}{', ' + kernel if kernel else ''}: {what} over llama-bench"
    bars.check(1, label, row["ratio"], ">=", target)
    bars.rows[-1].update(ours=row["ours"], theirs=row["theirs"], lower_bound=row["lower_bound"],
                         pairs=row["pairs"])


def main() -> None:
    args = parse_args()
    bars = Bars(args)
    default = args.model or lib.default_model()
    try:
        for name in args.types.split(","):
            args.model = default if name == "default" else str(
                bars.model(f"{args.shape}-{args.layers}-{name}"))
            measure(args, bars, name)
    except KeyboardInterrupt:  # what was measured until then counts
        lib.say("interrupted")
    print(lib.table(["what", "ours", "llama-bench", "ratio", "at least", "target", "most"],
                    [[r["what"], f"{r['ours']:.1f}", f"{r['theirs']:.1f}", f"{r['measured']:.2f}",
                      f"{r['lower_bound']:.2f}", r["target"],
                      f"{r['most'] / r['theirs']:.2f}" if "most" in r else "-"] for r in bars.rows]))
    lib.conclude(args, bars, "-products")


if __name__ == "__main__":
    main()
