#!/usr/bin/env python3
"""What restoring costs in quality: perplexity, KL divergence and questions on three long texts.

    bench/quality.py                     twenty windows of 512 tokens of each text
    bench/quality.py --methods kv --windows 100
    bench/quality.py --parts truncation --pieces 4

First `hcache eval ppl` is held against llama-perplexity (`make peer`), on the same windows: they may
differ by 0.1 %. Then each method's predictions, after save, restart and restore, are compared with those
that are computed on the spot, token by token, and those from K and V that were rounded when they were saved.
Numbers are looked up in texts of several lengths, which shows something only where the model without any loss
finds more than chance would. Last, each text outgrows contexts of several sizes: its perplexity behind tokens
that were dropped from the KV cache may be higher by 0.02 than with the tokens that are left computed anew
(AttentionStore's bound), of each, and of all in the mean. They are as many, or those of programs that drop
half and compute the rest again (--anew-share 0.5), which the paper compares with.
"""

import argparse
import json
import math
import re
import subprocess
from pathlib import Path

import benchlib as lib

PARTS = "restores,questions,truncation"
MOST_DIFFERENCE = 0.001  # of perplexities, ours over llama-perplexity's
QUICK_DIFFERENCE = 0.02  # of so few tokens that roundings show
ROUNDED = ("q8_0", "q4_0")  # --pack
MOST_TRUNCATED = 0.02    # more perplexity than computed anew


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    lib.add_common_options(parser)
    parser.add_argument("--parts", default=PARTS, help=f"of {PARTS}")
    parser.add_argument("--texts", default="essay,manual,code")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--methods", default="plan,kv,hidden")
    parser.add_argument("--lines", default="5,10,20,40", help="sentences of the texts that are searched")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--contexts", default="512,1024", help="that the texts outgrow")
    parser.add_argument("--overflows", default="1,1-4,1-16",
                        help="in a row; 1-4: what comes behind each of the first to the fourth")
    parser.add_argument("--anew-share", default="0",
                        help="computed anew is what is left where so much leaves at once, as with programs "
                             "that truncate prompts, 0.5; 0: as many tokens as the truncated text holds")
    parser.add_argument("--pieces", type=int, default=8, help="of each text, that outgrow them")
    parser.add_argument("--compare", default="anew,last,unrotated,whole",
                        help="what truncated text is held against; anew alone takes a third of the time")
    args = parser.parse_args()
    if args.quick:
        args.texts, args.window, args.windows = "essay", 64, 2
        args.methods, args.lines, args.questions = "kv", "5", 2
        args.contexts, args.overflows, args.pieces = "256", "1,1-2", 1
    if args.model is None:
        args.model = lib.default_model()
    return args


class Evals:
    def __init__(self, args: argparse.Namespace):
        self.args, self.hcache = args, lib.Hcache(args)

    def run(self, what: str, *options: object) -> dict:
        command = self.hcache.command(["eval", what], [*map(str, options), "-m", str(self.args.model),
                                                       "--json", "-"])
        lib.say("+ " + " ".join(command))
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def peer_perplexity(args, text: Path) -> float:
    """llama-perplexity's, of the same windows."""
    program = lib.peer_programs(args.device)["llama-perplexity"]
    command = [program, "-m", args.model, "-f", text, "-c", args.window, "-b", args.window, "--chunks",
               args.windows, "-t", args.threads]
    lib.say("+ " + " ".join(map(str, command)))
    done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    found = re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)
    if found is None:
        raise RuntimeError(f"llama-perplexity said no perplexity: {done.stderr[-2000:]}")
    return float(found.group(1))


def measure_text(args, evals: Evals, name: str, text: Path) -> dict:
    windows = ["--window", args.window, "--windows", args.windows]
    [ours] = evals.run("ppl", text, *windows)["rows"]
    theirs = peer_perplexity(args, text)
    most = QUICK_DIFFERENCE if args.quick else MOST_DIFFERENCE
    kl = evals.run("kl", text, *windows, "--methods", args.methods)
    for pack in ROUNDED:
        [row] = evals.run("kl", text, *windows, "--methods", "kv", "--pack", pack)["rows"]
        kl["rows"].append(row | {"method": f"kv, {pack}"})
    return {"text": name, "perplexity": ours["perplexity"], "scored": ours["scored"],
            "llama_perplexity": theirs, "over_llama": ours["perplexity"]["value"] / theirs,
            "agrees": abs(ours["perplexity"]["value"] / theirs - 1) <= most,
            "methods": kl["rows"]}


def measure_questions(args, evals: Evals, lines: int) -> dict:
    out = evals.run("tasks", "--lines", lines, "--questions", args.questions, "--methods", args.methods)
    base = out["rows"][0]
    return {"lines": lines, "longest": out["longest"], "chance": out["chance"],
            "is_evidence": base["accuracy"]["low"] > out["chance"], "rows": out["rows"]}


def measure_truncation(args, evals: Evals, name: str, text: Path, context: str) -> dict:
    out = evals.run("truncation", text, "--context", context, "--overflows", args.overflows, "--pieces",
                    args.pieces, "--compare", args.compare, "--anew-share", args.anew_share)
    return {"text": name, "context": int(context), "share": out["share"], "anew_share": out["anew_share"],
            "rows": out["rows"]}


def value_of(row: dict, key: str, digits: int = 3) -> str:
    return f"{row[key]['value']:.{digits}f}" if key in row else "–"


def truncation_table(truncated: list[dict]) -> str:
    rows = []
    for t in truncated:
        for row in t["rows"]:
            d = row["difference"]
            overflows = str(row["overflows"])
            if row["first_overflow"] < row["overflows"]:
                overflows = f"{row['first_overflow']}-{overflows}"
            rows.append([t["text"], str(t["context"]), overflows,
                         value_of(row, "perplexity"), value_of(row, "perplexity_anew"),
                         f"{d['value']:+.3f} ({d['low']:+.3f} to {d['high']:+.3f})",
                         value_of(row, "perplexity_last_rows"),
                         value_of(row, "perplexity_not_rotated", 1),
                         "yes" if d["value"] <= MOST_TRUNCATED else "NO"])
    return lib.table(["text", "context", "overflows", "truncated", "computed anew", "difference",
                      "last rows alone", "not rotated", "within 0.02"], rows)


def mean_difference(truncated: list[dict], key: str) -> float:
    """Of perplexities over those computed anew, all texts, contexts and overflows alike, less 1."""
    logs = [math.log(row[key]["value"] / row["perplexity_anew"]["value"])
            for t in truncated for row in t["rows"]]
    return math.exp(sum(logs) / len(logs)) - 1


def tables(texts: list[dict], questions: list[dict]) -> str:
    perplexity = [[t["text"], f"{t['scored']:.0f}", f"{t['perplexity']['value']:.4f}",
                   f"{t['llama_perplexity']:.4f}", f"{t['over_llama']:.5f}",
                   "yes" if t["agrees"] else "NO"] for t in texts]
    methods = [[t["text"], m["method"], f"{m['mean_kl']['value']:.2e}", f"{m['kl_quantiles']['max']:.1e}",
                f"{100 * m['same_top']['value']:.2f} %", f"{m['perplexity_ratio']['value']:.6f}"]
               for t in texts for m in t["methods"]]
    found = [[str(q["lines"]), str(q["longest"]), row["method"], f"{100 * row['accuracy']['value']:.0f} %",
              f"{100 * row['same_as_base']['value']:.0f} %", "yes" if q["is_evidence"] else "no"]
             for q in questions for row in q["rows"]]
    return "\n\n".join(lib.table(head, rows) for head, rows in (
        (["text", "tokens", "ours", "llama-perplexity", "quotient", "within 0.1 %"], perplexity),
        (["text", "method", "mean KL", "max", "same choice", "perplexity / computed"], methods),
        (["lines", "tokens", "method", "right", "as computed", "above chance"], found)) if rows)


def main() -> None:
    args = parse()
    evals = Evals(args)
    paths = {path.stem: path for path in map(Path, lib.third_party("texts"))}
    parts, names = args.parts.split(","), args.texts.split(",")
    results = {"quick": args.quick, "model": Path(args.model).name, "texts": [], "questions": []}
    if "restores" in parts:
        results["texts"] = [measure_text(args, evals, name, paths[name]) for name in names]
    if "questions" in parts:
        results["questions"] = [measure_questions(args, evals, int(n)) for n in args.lines.split(",")]
    texts = results["texts"]
    if texts or results["questions"]:
        print(tables(texts, results["questions"]), end="\n\n")
    if "truncation" in parts:
        truncated = [measure_truncation(args, evals, name, paths[name], context)
                     for name in names for context in args.contexts.split(",")]
        results |= {"truncation": truncated, "truncation_mean": mean_difference(truncated, "perplexity")}
        print(truncation_table(truncated))
        print(f"in the mean {results['truncation_mean']:+.2%} of what is computed anew")
        if "last" in args.compare.split(","):
            results["truncation_mean_last_rows"] = mean_difference(truncated, "perplexity_last_rows")
            print(f"with the last rows alone {results['truncation_mean_last_rows']:+.2%}")
    lib.write_results(args.json_file or (args.work / "quality.json"), results)
    if not all(text["agrees"] for text in texts):
        raise SystemExit("a perplexity is not llama-perplexity's")


if __name__ == "__main__":
    main()
