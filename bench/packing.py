#!/usr/bin/env python3
"""Packed against plain K and V over links of two orders of magnitude.

    bench/packing.py --json packing.json       the default model, 2,048 tokens of history
    bench/packing.py --rounded                 and rounded to eight and four bits

At each link three processes save the same conversation and restore it, by turns, with `--pack off`, `on`
and `auto`; answers and K and V must be those of the uninterrupted run to the bit. Prints the times to first
token, what `auto` chose, how much longer it took than the better of both, and the bytes. With --rounded two
more have `--pack q8_0` and `q4_0`, whose K and V differ; `hcache eval kl` says by how much that matters.
"""

import argparse
import json

import benchlib as lib

MODES = ("off", "on", "auto")
ROUNDED = ("q8_0", "q4_0")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    lib.add_common_options(parser)
    parser.add_argument("--history", type=int, default=2048)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--reps", type=int, default=3, help="restores of a process")
    parser.add_argument("--turns", type=int, default=3, help="processes of each kind at each link")
    parser.add_argument("--slowest", type=float, default=30e6, help="link, bytes/s")
    parser.add_argument("--points", type=int, default=5)
    parser.add_argument("--decades", type=float, default=2.0)
    parser.add_argument("--rounded", action="store_true",
                        help="K and V rounded to eight and four bits as well")
    args = parser.parse_args()
    if args.quick:
        args.history, args.reps, args.turns, args.points = 128, 1, 1, 2
    return args


def restore(args, hcache: lib.Hcache, model, link: float, pack: str) -> dict:
    results = hcache.bench("restore", "-m", model, "--history", args.history, "--new", args.new, "--greedy",
                           8, "--save", "kv", "--methods", "plan", "--pack", pack, "--link",
                           f"{link:.0f}", "--reps", args.reps)
    row = results["rows"][0]
    fidelity = row["fidelity"]
    same = fidelity["kv_identical"] and fidelity["greedy_agree"] == fidelity["greedy_total"]
    if pack in ROUNDED:
        if fidelity["kv_identical"]:
            raise RuntimeError(f"--pack {pack}: nothing was rounded")
    elif not same:
        raise RuntimeError(f"--pack {pack}: the restored conversation is another one")
    return {"samples_ms": row["ttft_samples_ms"], "predicted_ms": row["predicted_ms"],
            "packed": results["store"]["packed"], "machine": results["machine"],
            "page_bytes": results["store"]["page_bytes"],
            "kv_bytes": results["store"]["tokens"] * results["store"]["kv_f16_bytes_per_token"]}


def at_link(args, hcache: lib.Hcache, model, link: float) -> dict:
    modes = MODES + (ROUNDED if args.rounded else ())
    found: dict = {mode: [] for mode in modes}
    for turn in range(args.turns):
        for i in range(len(modes)):
            mode = modes[(i + turn) % len(modes)]
            found[mode].append(restore(args, hcache, model, link, mode))
    row = {"link_bytes_per_s": link, "machine": found["on"][0]["machine"]}
    for mode, runs in found.items():
        samples = [x for run in runs for x in run["samples_ms"]]
        row[mode] = {"ttft_ms": lib.median(samples), "ttft_samples_ms": samples,
                     "predicted_ms": lib.median([run["predicted_ms"] for run in runs]),
                     "packed": [run["packed"] for run in runs],
                     "share_of_kv": runs[0]["page_bytes"] / runs[0]["kv_bytes"]}
    best = min(row["off"]["ttft_ms"], row["on"]["ttft_ms"])
    row["auto_over_best"] = row["auto"]["ttft_ms"] / best
    for mode in ("on", *ROUNDED):
        if mode in row:
            row[f"{mode}_over_off"] = row[mode]["ttft_ms"] / row["off"]["ttft_ms"]
    return row


def main() -> None:
    args = parse_args()
    hcache = lib.Hcache(args)
    model = args.model or lib.default_model()
    hcache.measure_costs(model)
    links = [args.slowest * 10 ** (args.decades * i / max(1, args.points - 1)) for i in range(args.points)]
    rows = []
    for link in links:
        rows.append(at_link(args, hcache, model, link))
        lib.say(f"{link / 1e6:.0f} MB/s: packed over plain {rows[-1]['on_over_off']:.3f}")
    machine = [row.pop("machine") for row in rows][0]
    results = {"machine": machine, "quick": args.quick, "history": args.history, "new": args.new,
               "rows": rows,
               "worst_auto_over_best": max(row["auto_over_best"] for row in rows)}
    table = [[f"{r['link_bytes_per_s'] / 1e6:.0f}", *(f"{r[mode]['ttft_ms']:.0f}" for mode in MODES),
              f"{sum(r['auto']['packed'])} of {len(r['auto']['packed'])}", f"{r['on_over_off']:.3f}",
              f"{r['auto_over_best']:.3f}"] for r in rows]
    print(lib.table(["MB/s", "plain ms", "packed ms", "auto ms", "auto packed", "packed / plain",
                     "auto / best"], table))
    if args.rounded:
        header = [f"{mode} ms" for mode in ROUNDED] + [f"{mode} / plain" for mode in ROUNDED]
        table = [[f"{r['link_bytes_per_s'] / 1e6:.0f}", *(f"{r[mode]['ttft_ms']:.0f}" for mode in ROUNDED),
                  *(f"{r[f'{mode}_over_off']:.3f}" for mode in ROUNDED)] for r in rows]
        print(lib.table(["MB/s", *header], table))
    print(json.dumps({"share_of_kv": rows[0]["on"]["share_of_kv"],
                      "worst_auto_over_best": results["worst_auto_over_best"]}, indent=1))
    lib.write_results(args.json_file or (args.work / "packing.json"), results)


if __name__ == "__main__":
    main()
