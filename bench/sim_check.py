#!/usr/bin/env python3
"""Does the simulator know this machine? The same load on the real server and in `hcache sim`.

    bench/sim_check.py                    both scenarios (about 25 minutes)
    bench/sim_check.py --only memory      one of them
    bench/sim_check.py --quick            tiny settings: proves the script, measures nothing

The simulator is given what `hcache profile --json` measured here, the server's limits, and the load
with the seed that the server gets. Compared are the median time to first token of returning rounds
and the share of their prompts that was found, resident or saved; both should lie within 20 %.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import benchlib as lib
import serve_bars
import servers

MIB = 1 << 20
DRAM_GB_PER_S = 5.0  # pages are copied once, by one core
STEP_TOKENS = 256    # the server's default
RESTORE_SHARE = 0.25


@dataclasses.dataclass(frozen=True)
class Case:
    what: str
    load: serve_bars.Load
    dram_mib: int


# Conversations begin slowly enough that the machine works half of the time. One that is saturated
# turns an error of a few percent in a step's length into queues of twice the length.
LOAD = serve_bars.Load(sessions=12, rate=0.03, think_s=90, ctx=4096)
CASES = {
    "memory": Case("two and a half times the memory: most come back from the disk", LOAD, 57),
    "arena": Case("an arena for two: all come back from host memory",
                  dataclasses.replace(LOAD, slots=2), 1024),
}


def template_tokens(server: servers.Server) -> dict:
    """What the chat template adds, in the simulator's terms."""
    def count(*contents: str) -> int:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
        prompt = server.post("/apply-template", {"messages": messages})["prompt"]
        return len(server.post("/tokenize", {"content": prompt, "parse_special": True})["tokens"])

    word = count("hello hello") - count("hello")  # the same for all that follow
    first = count("hello") - word
    each = count("hello", "hello", "hello") - count("hello") - 2 * word
    return {"system_tokens": first - each, "message_tokens": each}


def ttft_percentiles(summary: dict) -> dict:
    """Of returning and of first rounds; both sides report them in the same form."""
    return {f"{name}ttft_p{p}_ms": summary["ttft_ms"][rounds][f"p{p}"]
            for name, rounds in (("", "returning"), ("first_", "first")) for p in lib.PERCENTILES}


def serve(args: argparse.Namespace, case: Case, seed: int) -> tuple[dict, dict]:
    with tempfile.TemporaryDirectory(dir=args.work, prefix="serve-") as folder:
        load = case.load
        with servers.hcache(args, Path(folder), load.ctx, load.slots, case.dram_mib) as server:
            template = template_tokens(server)
            result = serve_bars.hold(args.program, server.url, load, seed)
    for problem in serve_bars.wrong_answers(result, load):
        raise RuntimeError(problem)
    summary = result["summary"]
    return template, {**ttft_percentiles(summary), "tpot_mean_ms": summary["tpot_ms"]["mean"],
                      "found": summary["cached_share"]["returning"]}


def simulate(args: argparse.Namespace, case: Case, seed: int, profile: Path,
             template: dict) -> dict:
    load = case.load
    costs = json.loads(profile.read_text())["costs"]
    scenario = {
        "kind": "serving",
        "about": case.what,
        "hardware": {"profile": profile.name},
        "arena_tokens": load.ctx,
        "scheduler": {"step_tokens": STEP_TOKENS, "sequences": load.slots,
                      "restore_share": RESTORE_SHARE},
        "state": {"planned_history": 4096, "tiers": [
            {"name": "dram", "gib": case.dram_mib / 1024, "gb_per_s": DRAM_GB_PER_S},
            {"name": "disk", "gb_per_s": costs["link_bytes_per_s"] / 1e9}]},
        "workload": {"sessions": load.sessions, "rounds": load.rounds, "context": load.context,
                     "think_s": load.think_s, "seed": seed, **template},
        "methods": ["plan"],
        "rates": [load.rate],
    }
    file = profile.parent / "scenario.json"
    file.write_text(json.dumps(scenario))
    out = subprocess.run([args.program, "sim", "--scenario", file, "--json", "-"], check=True,
                         stdout=subprocess.PIPE, text=True).stdout
    row = json.loads(out)["rows"][0]
    return {**ttft_percentiles(row), "tpot_mean_ms": row["tpot_ms"]["mean"],
            "found": row["resident_share"] + row["restored_share"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    lib.add_common_options(parser)
    parser.add_argument("--only", default="", help="memory or arena")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.model = args.model or lib.default_model()
    hcache = lib.Hcache(args)
    hcache.measure_costs(args.model)
    results: dict = {"machine": serve_bars.machine(args), "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        command = hcache.command(["profile"], ["--json", "-m", str(args.model)])
        profile.write_text(hcache.run(*command[1:]))
        results["profile"] = json.loads(profile.read_text())
        for name, case in CASES.items():
            if args.only not in name:
                continue
            if args.quick:
                case = dataclasses.replace(case, load=serve_bars.QUICK)
            template, real = serve(args, case, args.seed)
            simulated = simulate(args, case, args.seed, profile, template)
            for what, value in real.items():
                results["rows"].append({"case": name, "about": case.what, "what": what,
                                        "server": value, "simulated": simulated[what],
                                        "ratio": simulated[what] / value})
    print(lib.table(["case", "what", "server", "simulated", "ratio"],
                    [[r["case"], r["what"], f"{r['server']:.4g}", f"{r['simulated']:.4g}",
                      f"{r['ratio']:.3f}"] for r in results["rows"]]))
    lib.write_results(args.json_file, results)
    off = [r for r in results["rows"]
           if r["what"] in ("ttft_p50_ms", "found") and abs(r["ratio"] - 1) > 0.2]
    if off and not args.quick:
        sys.exit(1)


if __name__ == "__main__":
    main()
