#!/usr/bin/env python3
"""Sweeps the link over two orders of magnitude and plots every way to restore.

Each point is a real restore whose reads are slowed to that link. Prints where `plan` is not the
lowest curve within 5 %, and how often the planner's prediction lies within 15 % of the measurement.
"""

import argparse
import importlib.util
import json
import math
import sys
from pathlib import Path

import benchlib as lib

FAST = 2.0  # times the paper's link
LINKED = ["plan", "hidden", "kv", "naive-hybrid"]
STYLE = {  # colour-blind safe, and told apart in grey by marker
    "plan": ("#000000", "o", 2.4),
    "hidden": ("#0072b2", "^", 1.4),
    "kv": ("#d55e00", "s", 1.4),
    "naive-hybrid": ("#009e73", "D", 1.4),
    "recompute": ("#cc79a7", None, 1.4),
    "resident": ("#999999", None, 1.4),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    lib.add_common_options(parser)
    parser.add_argument("--shape", default="llama2-7b", help="made up where no model is given")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--type", default="f16")
    parser.add_argument("--history", type=int, default=256)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--points", type=int, default=9)
    parser.add_argument("--slowest", type=float, default=0.25, help="times the paper's link")
    parser.add_argument("--decades", type=float, default=2.0)
    parser.add_argument("--png", type=Path, help="(default: docs/img/link-sweep.png)")
    parser.add_argument("--plot-only", type=Path, metavar="JSON", help="draw earlier results")
    args = parser.parse_args()
    folder = args.work if args.quick else lib.ROOT / "docs/img"
    args.png = args.png or folder / "link-sweep.png"
    if args.quick:
        args.shape, args.layers = lib.QUICK_SHAPE, lib.QUICK_LAYERS
        args.history, args.points, args.reps = 128, 3, 1
    return args


def synth(hcache: lib.Hcache, work: Path, shape: str, layers: int, kind: str) -> Path:
    path = work / f"{shape}-{layers}-{kind}.gguf"
    if not path.exists():
        hcache.run("model", "synth", "--shape", shape, "--layers", layers, "--type", kind, "-o",
                   path)
    return path


def measure(args: argparse.Namespace) -> dict:
    hcache = lib.Hcache(args)
    model = args.model or synth(hcache, args.work, args.shape, args.layers, args.type)
    common = ["-m", model, "--history", args.history, "--new", args.new, "--greedy", 4]
    hcache.measure_costs(model)
    # What no link slows; and the rate that --link paper stands for on this machine.
    fixed = hcache.bench("restore", *common, "--methods", "recompute,resident", "--reps",
                         args.reps)
    paper = fixed["gemm_flops_per_s"] / (312e12 / 32e9)
    links = [paper * args.slowest * 10 ** (args.decades * i / (args.points - 1))
             for i in range(args.points)]
    rows = fixed["rows"]
    # On a fast link a restore takes a fifth of the time, and noise is a larger part of it.
    for part, reps in (([x for x in links if x <= FAST * paper], args.reps),
                       ([x for x in links if x > FAST * paper], 5 * args.reps)):
        if part:
            rows += hcache.bench("restore", *common, "--methods", ",".join(LINKED), "--link",
                                 ",".join(f"{x:.0f}" for x in part), "--reps", reps)["rows"]
    return {"machine": fixed["machine"], "paper_link_bytes_per_s": paper,
            "history": args.history, "new": args.new, "rows": rows}


def judge(results: dict) -> dict:
    """How often `plan` is the lowest curve, and how good the predictions are."""
    fixed = {r["method"]: r["ttft_ms"]["median"] for r in results["rows"]
             if r["link_bytes_per_s"] is None}
    by_link: dict = {}
    for row in results["rows"]:
        if row["link_bytes_per_s"] is not None:
            by_link.setdefault(row["link_bytes_per_s"], {})[row["method"]] = row
    worst = 0.0
    for rows in by_link.values():
        best = min((r for m, r in rows.items() if m != "plan"),
                   key=lambda r: r["ttft_ms"]["median"])
        # Neighbours in time, repetition by repetition: both saw the same machine.
        ratio = lib.compare("", rows["plan"]["ttft_samples_ms"], best["ttft_samples_ms"])["ratio"]
        worst = max(worst, ratio, rows["plan"]["ttft_ms"]["median"] / fixed["recompute"])
    errors = [abs(r["predicted_ms"] / r["ttft_ms"]["median"] - 1) for r in results["rows"]
              if r["predicted_ms"]]
    plan_errors = [abs(r["plan"]["predicted_ms"] / r["plan"]["ttft_ms"]["median"] - 1)
                   for r in by_link.values()]
    share = lambda e: sum(x <= 0.15 for x in e) / len(e)  # noqa: E731
    return {"links": len(by_link), "worst_plan_over_best": worst,
            "share_within_15": share(errors), "plan_share_within_15": share(plan_errors),
            "median_error": lib.median(errors)}


def plot(results: dict, path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.6), dpi=130)
    first = results["rows"][0]
    for method, (colour, marker, width) in STYLE.items():
        rows = [r for r in results["rows"] if r["method"] == method]
        if not rows:
            continue
        if rows[0]["link_bytes_per_s"] is None:
            axes.axhline(rows[0]["ttft_ms"]["median"] / 1e3, color=colour, linewidth=width,
                         linestyle="--", label=method)
            continue
        rows.sort(key=lambda r: r["link_bytes_per_s"])
        x = [r["link_bytes_per_s"] / 1e6 for r in rows]
        y = [[r["ttft_ms"][k] / 1e3 for r in rows] for k in ("min", "median", "max")]
        axes.plot(x, y[1], color=colour, marker=marker, markersize=4.5, linewidth=width,
                  label=method, zorder=3 if method == "plan" else 2)
        axes.fill_between(x, y[0], y[2], color=colour, alpha=0.15, linewidth=0)
    axes.axvline(results["paper_link_bytes_per_s"] / 1e6, color="#bbbbbb", linewidth=1,
                 linestyle=":", label="the paper's balance")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("link, MB/s")
    axes.set_ylabel("time to first token, s")
    name = Path(first["model"]).stem
    axes.set_title(f"{name}, {first['history']} tokens of history, {first['new']} new", fontsize=10)
    axes.grid(True, which="both", color="#eeeeee", linewidth=0.6)
    axes.legend(fontsize=8, frameon=False, loc="lower left")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    lib.say(f"written: {path}")


def main() -> None:
    args = parse_args()
    # Asked before anything is measured, which takes minutes.
    plots = importlib.util.find_spec("matplotlib") is not None
    if not plots:
        why = "no plot: Python's matplotlib is not installed (pip install matplotlib)"
        if args.plot_only:
            sys.exit(why)
        lib.say(why)
    if args.plot_only:
        results = json.loads(args.plot_only.read_text())
    else:
        results = measure(args)
    results["summary"] = judge(results)
    rows = []
    for row in sorted(results["rows"], key=lambda r: (r["link_bytes_per_s"] or math.inf,
                                                      r["ttft_ms"]["median"])):
        link = row["link_bytes_per_s"]
        predicted = row["predicted_ms"]
        rows.append([row["method"], f"{link / 1e6:.2f}" if link else "-", row["schedule"],
                     f"{row['ttft_ms']['median']:.0f}", f"{predicted:.0f}" if predicted else "-",
                     f"{100 * (predicted / row['ttft_ms']['median'] - 1):+.0f} %"
                     if predicted else "-"])
    print(lib.table(["method", "MB/s", "schedule", "TTFT ms", "predicted", "off by"], rows))
    print(json.dumps(results["summary"], indent=1))
    lib.write_results(args.json_file, results)
    if plots:
        plot(results, args.png)


if __name__ == "__main__":
    main()
