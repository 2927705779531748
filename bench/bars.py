#!/usr/bin/env python3
"""Measures every bar that the project holds itself to, and prints which ones are met.

    bench/bars.py                    all bars on this machine (about an hour on two cores)
    bench/bars.py --bars 1,7         some of them
    bench/bars.py --quick            tiny settings: proves the script, measures nothing
    bench/bars.py --device cuda:0    the bars that make sense on a GPU (vulkan:0 too); see bench/gpu.sh

Results go to bench/results/<machine>.json. docs/benchmarks.md says what each bar means.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import benchlib as lib

TEXT = lib.ROOT / "demo/lighthouse.txt"


class Bars:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.hcache = lib.Hcache(args)
        self.rows: list[dict] = []
        self.machine: dict = {}
        self.details: dict = {}

    # ---- Book-keeping --------------------------------------------------------------------------

    def check(self, bar: int, what: str, measured: float, op: str, target: float) -> None:
        ok = measured >= target if op == ">=" else measured <= target
        self.rows.append({"bar": bar, "what": what, "target": f"{op} {target:g}",
                          "measured": measured, "pass": bool(ok)})
        lib.say(f"bar {bar}: {what}: {measured:.4g} (target {op} {target:g}) "
                f"{'pass' if ok else 'MISSED'}")

    def note(self, bar: int, what: str, measured: float) -> None:
        self.rows.append({"bar": bar, "what": what, "target": "-", "measured": measured,
                          "pass": None})

    def restore(self, model: Path, *options: object) -> dict:
        results = self.hcache.bench("restore", "-m", model, "--text", TEXT, *options)
        self.machine = results["machine"]
        return results

    # ---- Models --------------------------------------------------------------------------------

    def model(self, name: str) -> Path:
        """smollm2, its multi-head twin, either in another weight type ("twin-f16"), or random
        weights in a published shape ("llama2-7b-8-f16": 8 layers)."""
        base = Path(self.args.model or lib.default_model())
        if name == "smollm2":
            return base
        path = self.args.work / f"{name}.gguf"
        if path.exists():
            return path
        lib.say(f"making {path.name}")
        if name == "twin":
            self.hcache.run("model", "expand-kv", base, path)
        elif name.count("-") == 1:
            source, kind = name.split("-", 1)
            self.hcache.run("model", "requantize", self.model(source), path, "--type", kind)
        else:
            shape, layers, kind = name.rsplit("-", 2)
            self.hcache.run("model", "synth", "--shape", shape, "--layers", layers, "--type",
                            kind, "-o", path)
        return path

    def big(self, kind: str) -> Path:
        return self.model(f"{self.args.shape}-{self.args.layers}-{kind}")

    # ---- Bars ----------------------------------------------------------------------------------

    def bar1(self) -> None:
        """Fidelity."""
        quick = self.args.quick
        if self.args.gpu:
            rows = self.restore(self.big("f16"), "--history", 128 if quick else 512, "--methods",
                                "plan,hidden,kv,recompute", "--greedy", 8 if quick else 32,
                                "--reps", 1)["rows"]
            for row in rows:
                kl = row["fidelity"]["mean_kl"]
                limit = 5e-3 if row["method"] == "recompute" else 1e-3
                self.check(1, f"{self.args.shape} f16, {row['method']}: mean KL", kl, "<=", limit)
            return
        histories = "128" if quick else "512,2048"
        for name in ("smollm2", "twin") if quick else ("smollm2", "twin", "smollm2-q8_0"):
            rows = self.restore(self.model(name), "--history", histories, "--methods",
                                "plan,hidden,kv,recompute", "--greedy", 16 if quick else 100,
                                "--conversations", 1 if quick else 3, "--reps", 1)["rows"]
            for method in ("plan", "hidden", "kv"):
                # RE:1 is a projection too, of the tokens' embeddings.
                chosen = [r for r in rows if r["method"] == method and
                          not re.search(r"RE:(?!1\b)", r["schedule"])]
                if not chosen:
                    continue
                same = sum(r["fidelity"]["kv_identical"] and
                           r["fidelity"]["greedy_agree"] == r["fidelity"]["greedy_total"]
                           for r in chosen)
                self.check(1, f"{name}, {method}: restores that are bit-identical",
                           same / len(chosen), ">=", 1.0)
            kl = [r["fidelity"]["mean_kl"] for r in rows if r["method"] == "recompute"]
            self.check(1, f"{name}, recompute: mean KL", sum(kl) / len(kl), "<=", 5e-3)
        for kind in ("f16",) if quick else ("f16", "bf16", "q4_k"):
            n = 2 if quick else 20
            rows = self.restore(self.model(f"smollm2-{kind}"), "--history",
                                128 if quick else 384, "--methods", "plan,hidden,kv", "--greedy",
                                16 if quick else 100, "--conversations", n, "--reps", 1)["rows"]
            for method in ("plan", "hidden", "kv"):
                f = [r["fidelity"] for r in rows if r["method"] == method]
                same = sum(x["greedy_agree"] == x["greedy_total"] for x in f)
                self.check(1, f"smollm2-{kind}, {method}: prompts of {n} with identical tokens",
                           same, ">=", round(0.95 * n))
                self.check(1, f"smollm2-{kind}, {method}: mean KL",
                           sum(x["mean_kl"] for x in f) / n, "<=", 1e-3)
                for x in f:
                    if x["margin"] > 0:
                        self.note(1, f"smollm2-{kind}, {method}: margin where a choice differs",
                                  x["margin"])
        rows = self.restore(self.model(f"{self.args.shape}-2-f16"), "--history",
                            128 if quick else 512, "--methods", "hidden,kv", "--greedy", 16,
                            "--reps", 1)["rows"]
        for row in rows:
            self.check(1, f"random weights, {row['method']}: mean KL",
                       row["fidelity"]["mean_kl"], "<=", 1e-3)

    def bar2(self) -> None:
        """Engine speed against llama-bench."""
        found = self.peer("engine", "--reps", self.args.reps)["engine"]
        # What takes a second from nothing: many pairs, or the machine's moods decide. A GPU has none.
        short = [] if self.args.gpu else self.peer("short", "--reps", 8 * self.args.reps)["short"]
        names = {r["name"] for r in short}
        for row in short + [r for r in found if r["name"] not in names]:
            name = row["name"]
            if row["peer"] == "defaults":
                self.check(2, f"{name} / llama-bench defaults", row["ratio"], ">=", 2.5)
                continue
            if row["prompt"] == self.args.new:
                continue
            self.check(2, f"{name} / better of -fa 0, 1: lower bound", row["lower_bound"], ">=",
                       0.98)
            target = 1.0
            if not self.args.gpu:  # there llama.cpp's kernels are ours
                if row["prompt"] == self.args.depth and row["depth"] == 0:
                    target = 1.25
                if row["gen"] > 0 and row["depth"] > 0:
                    target = 1.2
            self.check(2, f"{name} / better of -fa 0, 1: median", row["ratio"], ">=", target)

    def bar3(self) -> None:
        """What capturing and writing costs."""
        quick = self.args.quick
        model = self.big("f16") if self.args.gpu else self.model("smollm2")
        found = []
        # The difference is small and the runs are short: many pairs.
        for prompts, depth, turns in ((64, 0, 1),) if quick else (
                (512, 0, 8), (512, self.args.depth, 4), (2048, 0, 2), (2048, self.args.depth, 1)):
            results = self.hcache.bench(
                "throughput", "-m", model, "--text", TEXT, "--prompt", prompts, "--gen",
                16 if quick else 256, "--depth", depth, "--capture", "on,off", "--reps",
                turns * self.args.reps)
            self.machine = results["machine"]
            found += results["rows"]
        self.details["capture"] = found
        rows = {(r["depth"], r["prompt"], r["capture"]): r for r in found}
        decoded = set()
        for (depth, prompt, capture), on in rows.items():
            if capture == "off":
                continue
            off = rows[(depth, prompt, "off")]
            self.ratio_bar(3, f"prefill {prompt} at depth {depth}, capture on / off",
                           on["prefill_durable_samples"], off["prefill_samples"], 0.96)
            if depth not in decoded:
                decoded.add(depth)
                self.ratio_bar(3, f"decode {on['gen']} at depth {depth}, capture on / off",
                               on["decode_durable_samples"], off["decode_samples"], 0.96)

    def ratio_bar(self, bar: int, what: str, ours: list[float], theirs: list[float],
                  target: float) -> None:
        self.check(bar, what, lib.compare(what, ours, theirs)["ratio"], ">=", target)

    def bar4(self) -> None:
        """Restart from the local disk."""
        self.hcache.measure_costs(self.model("smollm2"))
        # A repetition takes seconds: more of them, since the ratio to `resident` is a small one.
        found = self.peer("restart", "--reps", 3 * self.args.reps)["restart"]
        for row in found:
            if row.get("peer") == "resident":
                self.check(4, "TTFT plan / resident", row["ratio"], "<=", 1.15)
            if row.get("peer") == "llama-server slot":
                self.check(4, "TTFT plan / llama-server's slot restore", row["ratio"], "<=", 0.5)

    def bar5(self) -> None:
        """The paper's balance."""
        quick = self.args.quick
        history = 256 if quick else self.args.history
        common = ["--history", history, "--new", 50, "--greedy", 4, "--reps", self.args.reps]
        link = ["--link", "none" if self.args.gpu else "paper"]
        for kind in ("f16",) if self.args.gpu else ("f16", "q8_0"):
            self.hcache.measure_costs(self.big(kind))
        f16 = self.restore(self.big("f16"), *common, *link, "--methods",
                           "plan,hidden,kv,naive-hybrid,recompute,resident")
        self.details["balance"] = f16["rows"]
        ttft = {r["method"]: r["ttft_samples_ms"] for r in f16["rows"]}
        for other, target in (("kv", 1.8), ("recompute", 4.0), ("naive-hybrid", 1.28)):
            self.ratio_bar(5, f"f16: TTFT {other} / plan", ttft[other], ttft["plan"], target)
        if not self.args.gpu:
            self.bar5_quantised(common, f16["rows"][0]["link_bytes_per_s"])

    def bar5_quantised(self, common: list, rate: float) -> None:
        """The plan for Q8_0 weights against loading the same model's KV in F16, at the same link."""
        for share, target in ((1.0, 2.4), (0.5, 3.3)):
            options = [*common, "--link", f"{rate * share:.0f}"]
            pair = [lib.Paced(self.hcache, "restore", "-m", self.big(kind), "--text", TEXT,
                              *options, "--methods", method)
                    for kind, method in (("f16", "kv"), ("q8_0", "plan"))]
            for _ in range(self.args.reps + 1):
                for run in pair:
                    run.turn()
            kv, plan = (run.results()["rows"][0]["ttft_samples_ms"] for run in pair)
            self.ratio_bar(5, f"TTFT f16 kv / q8_0 plan at {share:g} of the paper's link", kv,
                           plan, target)

    def bar6(self) -> None:
        """The sweep: `plan` is the lowest curve, and the planner knows it."""
        out = self.args.work / "sweep.json"
        self.script("sweep.py", "--reps", self.args.reps, "--json", out)
        self.details["sweep"] = json.loads(out.read_text())
        summary = self.details["sweep"]["summary"]
        self.check(5, "sweep: plan / lowest other curve, worst link",
                   summary["worst_plan_over_best"], "<=", 1.05)
        self.check(6, "sweep: share of predictions within 15 %", summary["share_within_15"], ">=",
                   0.9)
        self.note(6, "sweep: the same of the planner's own choice alone",
                  summary["plan_share_within_15"])

    def bar7(self) -> None:
        """Bytes per token on disk, catalog included."""
        for name, save, target in (("twin-f16", "hidden", 0.53), ("twin", "hidden", 0.30),
                                   ("smollm2", "plan", 1.0)):
            stored = self.restore(self.model(name), "--history", 512 if self.args.quick else 4096,
                                  "--decoded", 64, "--greedy", 1, "--reps", 1, "--methods",
                                  "resident", "--save", save)["store"]
            self.details.setdefault("bytes", {})[name] = stored
            what = f"{name}, --save {save} ({stored['schedule']})"
            self.check(7, f"{what}: share of F16 KV's bytes, catalog included",
                       stored["share_of_kv_f16"], "<=", target)

    # ---- Other scripts -------------------------------------------------------------------------

    def script(self, name: str, *options: object) -> None:
        command = [sys.executable, str(lib.ROOT / "bench" / name), "--program",
                   str(self.args.program), "--device", self.args.device, "--threads",
                   str(self.args.threads), "--work", str(self.args.work), *map(str, options)]
        if self.args.quick:
            command.append("--quick")
        lib.say("+ " + " ".join(command))
        subprocess.run(command, check=True)

    def peer(self, what: str, *options: object) -> dict:
        out = self.args.work / f"peer-{what}.json"
        model = self.big("f16") if self.args.gpu else self.model("smollm2")
        self.script("peer.py", "-m", model, "--what", what, "--depth", self.args.depth, "--new",
                    self.args.new, "--json", out, *options)
        results = json.loads(out.read_text())
        self.details[what] = results[what]
        self.machine = results["machine"]
        return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    lib.add_common_options(parser)
    parser.add_argument("--bars", help="which ones (default: all that the device allows)")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--gpu", action="store_true",
                        help="the GPU's set of bars, on any device (default: with cuda and vulkan)")
    parser.add_argument("--shape", help="shape of the random-weight models (default: llama2-7b)")
    parser.add_argument("--layers", type=int, help="its layers (default: 8, with --gpu 32)")
    parser.add_argument("--history", type=int, default=2048,
                        help="bar 5's tokens that return; shapes whose context is 2,048 have room for"
                             " 1,984 (default: 2,048)")
    args = parser.parse_args()
    args.gpu = args.gpu or args.device.startswith(("cuda", "vulkan"))
    args.shape = args.shape or (lib.QUICK_SHAPE if args.quick else "llama2-7b")
    args.layers = args.layers or (lib.QUICK_LAYERS if args.quick else 32 if args.gpu else 8)
    args.reps = 1 if args.quick else args.reps
    # What the shapes that a GPU computes have room for: Llama-2's context is 4,096.
    args.depth = 128 if args.quick else 1792 if args.gpu else 4096
    args.new = 50
    wanted = args.bars or ("1,2,3,5" if args.gpu else "1,2,3,4,5,6,7")

    bars = Bars(args)
    for number in wanted.split(","):
        try:
            getattr(bars, f"bar{int(number)}")()
        except subprocess.CalledProcessError as error:
            bars.rows.append({"bar": int(number), "what": f"failed: {error}", "target": "-",
                              "measured": None, "pass": False})
    print(lib.table(["bar", "what", "target", "measured", ""],
                    [[r["bar"], r["what"], r["target"],
                      "-" if r["measured"] is None else f"{r['measured']:.4g}",
                      {True: "pass", False: "MISSED", None: ""}[r["pass"]]] for r in bars.rows]))
    lib.conclude(args, bars)


if __name__ == "__main__":
    main()
