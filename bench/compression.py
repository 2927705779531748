#!/usr/bin/env python3
"""What is lost where the layers keep some rows of the KV cache only, by which rows and how many.

    bench/compression.py                    three texts and made-up questions, every policy and budget
    bench/compression.py --texts essay --policies recent,snap --png build/compression.png

Each text is cut into contexts; a policy scores a context's rows, the layers keep those with the highest
scores, and what follows is predicted with them alone, against the same model with all rows. Questions come
behind another question, which is what the rows were scored by. Budgets are shared out over the layers
evenly, and (CaR) in proportion to the attention weights that count in them. With --png quality over bytes
is drawn (needs matplotlib). The bar is a perplexity at most 1 % higher at half of the rows: where no policy
reaches it, the smallest budget that does is named.
"""

import argparse
import importlib.util
import json
import subprocess
from pathlib import Path

import benchlib as lib

MOST_WORSE = 0.01  # perplexity over all rows', less one


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    lib.add_common_options(parser)
    parser.add_argument("--texts", default="essay,manual,code")
    parser.add_argument("--policies", default="recent,random,car,snap,self")
    parser.add_argument("--budgets", default="0.9,0.75,0.5,0.25,0.1")
    parser.add_argument("--layers", default="uniform,profile")
    parser.add_argument("--context", type=int, default=1024, help="tokens whose rows are kept or not")
    parser.add_argument("--tokens", type=int, default=128, help="that are predicted behind them")
    parser.add_argument("--pieces", type=int, default=16, help="contexts of each text")
    parser.add_argument("--lines", type=int, default=20, help="sentences that questions are about")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--png", type=Path, help="draw quality over bytes")
    args = parser.parse_args()
    if args.quick:
        args.texts, args.layers, args.policies, args.budgets = "essay", "uniform", "recent,car", "0.5"
        args.context, args.tokens, args.pieces, args.lines, args.questions = 96, 8, 2, 8, 2
    if args.model is None:
        args.model = lib.default_model()
    return args


def evaluate(args, *options: object) -> dict:
    command = lib.Hcache(args).command(
        ["eval", "compression"],
        [*map(str, options), "-m", str(args.model), "--policies", args.policies, "--budgets", args.budgets,
         "--json", "-"])
    lib.say("+ " + " ".join(command))
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def pooled(runs: list[dict]) -> list[dict]:
    """The mean of the texts' figures, by layers, policy and budget."""
    groups: dict[tuple, list[dict]] = {}
    for run in runs:
        for row in run["rows"]:
            groups.setdefault((run["layers"], row["policy"], row["budget"]), []).append(row)
    means = []
    for (layers, policy, budget), rows in groups.items():
        mean = {key: sum(row[key]["value"] for row in rows) / len(rows)
                for key in ("mean_kl", "same_top", "perplexity_ratio")}
        means.append({"layers": layers, "policy": policy, "budget": budget,
                      "kept": sum(row["kept"] for row in rows) / len(rows), **mean,
                      "worst_perplexity_ratio": max(row["perplexity_ratio"]["value"] for row in rows)})
    return means


def smallest_budget(means: list[dict]) -> dict | None:
    """With the least rows, of those whose perplexity is within the bar on the mean of the texts."""
    good = [m for m in means if m["policy"] not in ("none", "random")
            and m["perplexity_ratio"] <= 1 + MOST_WORSE]
    return min(good, key=lambda m: (m["budget"], m["mean_kl"]), default=None)


def draw(path: Path, means: list[dict]) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharex=True)
    series: dict[tuple, list[dict]] = {}
    for mean in means:
        if mean["policy"] != "none":
            series.setdefault((mean["policy"], mean["layers"]), []).append(mean)
    colours = {policy: f"C{i}" for i, policy in enumerate(dict.fromkeys(p for p, _ in series))}
    for (policy, layers), points in series.items():
        points.sort(key=lambda m: m["kept"])
        style = {"color": colours[policy], "linestyle": "-" if layers == "uniform" else "--", "marker": "."}
        kept = [100 * m["kept"] for m in points]
        axes[0].plot(kept, [m["mean_kl"] for m in points], label=f"{policy}, {layers}", **style)
        axes[1].plot(kept, [100 * (m["perplexity_ratio"] - 1) for m in points], **style)
    axes[0].set_ylabel("mean KL divergence (nats)")
    axes[0].set_yscale("log")
    axes[1].set_ylabel("perplexity over all rows' (% more)")
    for ax in axes:
        ax.set_xlabel("rows of the KV cache kept (%)")
        ax.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    lib.say(f"written: {path}")


def tables(means: list[dict], questions: list[dict]) -> str:
    text = [[m["policy"], m["layers"], f"{m['budget']:g}", f"{100 * m['kept']:.1f} %", f"{m['mean_kl']:.4f}",
             f"{100 * m['same_top']:.1f} %", f"{100 * (m['perplexity_ratio'] - 1):+.2f} %"]
            for m in means if m["policy"] != "none"]
    asked = []
    for run in questions:
        for row in run["rows"]:
            right = row["accuracy"]
            asked.append([row["policy"], run["layers"], f"{row['budget']:g}",
                          f"{100 * right['value']:.0f} % ({100 * right['low']:.0f} to "
                          f"{100 * right['high']:.0f})"])
    return "\n\n".join([
        lib.table(["policy", "layers", "budget", "rows", "mean KL", "same first choice", "perplexity"], text),
        lib.table(["policy", "layers", "budget", "later questions right"], asked)])


def main() -> None:
    args = parse()
    if args.png and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("--png needs Python's matplotlib (pip install matplotlib)")
    folder = {Path(path).stem: path for path in lib.third_party("texts")}
    runs, questions = [], []
    for layers in args.layers.split(","):
        for name in args.texts.split(","):
            run = evaluate(args, folder[name], "--layers", layers, "--context", args.context, "--tokens",
                           args.tokens, "--pieces", args.pieces)
            run["text"]["file"] = Path(run["text"]["file"]).name
            runs.append(run)
        questions.append(evaluate(args, "--layers", layers, "--lines", args.lines, "--questions",
                                  args.questions))
    for run in runs + questions:
        run["model"] = Path(run["model"]).name
    means = pooled(runs)
    best = smallest_budget(means)
    base = questions[0]["rows"][0]["accuracy"]
    chance = questions[0]["questions"]["chance"]
    print(tables(means, questions))
    print(f"\nscoring every row took {max(run['scoring']['ratio']['median'] for run in runs):.3f} times the "
          "prefill without it (the largest median of the texts)" if runs[0]["scoring"] else "")
    print("perplexity at most 1 % higher: " + (
        f"down to {best['budget']:g} of the rows ({best['policy']}, {best['layers']})" if best
        else "at none of these budgets"))
    if base["low"] <= chance:
        print("questions: the model does not answer above chance with all rows, so they show nothing")
    lib.write_results(args.json_file or (args.work / "compression.json"),
                      {"quick": args.quick, "means": means, "smallest_budget": best, "texts": runs,
                       "questions": questions, "questions_show": base["low"] > chance})
    if args.png:
        draw(args.png, means)


if __name__ == "__main__":
    main()
