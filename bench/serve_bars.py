#!/usr/bin/env python3
"""Measures what the server is held to under load, and prints which bars are met.

    bench/serve_bars.py                      all of it (hours on two cores)
    bench/serve_bars.py --bars 3 --scenarios a,c --reps 1
    bench/serve_bars.py --quick              tiny settings: proves the script, measures nothing

Bars 3 and 6 compare with llama-server (`make peer`), bars 4 and 5 look at ours alone. Every load comes
from `hcache bench serve`. Results go to bench/results/<machine>-serve.json; docs/benchmarks.md says
what each bar means and what the load is.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import benchlib as lib
import servers

sys.path.insert(0, str(lib.ROOT / "tests/e2e"))
# It lies with the tests, which share it.
import hostile  # noqa: E402

SCENARIOS = {"a": "four times the memory", "b": "all fits", "c": "restart half way"}
MIB = 1 << 20
SHORT = 128  # tokens; below it a server may prefer to compute a context again


@dataclasses.dataclass(frozen=True)
class Load:
    """The conversations, and the servers that hold them."""
    sessions: int = 24
    rounds: int = 4
    context: int = 1800  # tokens of a whole conversation: it must fit a llama-server slot
    rate: float = 0.25   # conversations that begin per second
    think_s: float = 150
    ctx: int = 8192
    slots: int = 4
    clients: int = 0     # that never pause, in place of rate and think time

    def options(self, seed: int) -> list[str]:
        pace = (["--concurrency", str(self.clients)] if self.clients else
                ["--rate", str(self.rate), "--think", f"{self.think_s}s"])
        return ["--sessions", str(self.sessions), "--rounds", str(self.rounds), "--context",
                str(self.context), *pace, "--exact-length", "--seed", str(seed)]


# Bar 4's: two and a half times the arena, and time enough between rounds that the machine is not
# saturated, where a queue turns every drift of its speed into more requests that decode together.
SPARSE = Load(sessions=12, think_s=60)
# Bar 6's: all conversations fit, half of them are answered at any time.
BUSY = Load(sessions=12, context=1536, ctx=12 * 1664, slots=12, clients=6)
QUICK = Load(sessions=8, rounds=2, context=160, rate=2, think_s=3, ctx=512, slots=2)


def hold(program: Path, url: str, load: Load, seed: int, half_way=None) -> dict:
    """Holds the conversations; `half_way` is called when all have had half of their rounds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "load.json"
        command = [str(program), "bench", "serve", "--url", url, *load.options(seed), "--timeout",
                   "15m", "--json", str(out)]
        if half_way:
            command += ["--pause-after", str(load.rounds // 2)]
        lib.say("+ " + " ".join(command))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   text=True)
        for line in process.stdout:
            if line.strip() == "ready":
                half_way()
                process.stdin.write("\n")
                process.stdin.flush()
        if process.wait() != 0:
            raise RuntimeError(f"the load ended with {process.returncode}; see above")
        return json.loads(out.read_text())


def wrong_answers(result: dict, load: Load) -> list[str]:
    """What makes a run worthless, whoever answered."""
    found = []
    summary = result["summary"]
    if summary["ok"] != load.sessions * load.rounds:
        found.append(f"{summary['ok']} of {load.sessions * load.rounds} requests were answered: "
                     f"{summary['errors']}")
    short = sum(r["completion_tokens"] != r["max_tokens"] for r in result["requests"])
    if short:
        found.append(f"{short} answers are not as long as was asked for")
    return found


def known_tokens(result: dict, request: dict) -> int:
    """How many tokens the round before has left in the server's hands."""
    return sum(r["prompt_tokens"] + r["completion_tokens"] for r in result["requests"]
               if r["session"] == request["session"] and r["round"] == request["round"] - 1)


def read_bytes(request: dict, tier: str) -> int:
    return request.get("server", {}).get("hcache", {}).get("bytes", {}).get(tier, 0)


def machine(args: argparse.Namespace) -> dict:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    cpu = found.group(1) if found else "unknown"
    return {"cpu": cpu, "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "device": cpu if args.device == "cpu" else args.device, "threads": args.threads,
            "model": Path(args.model).name}


class ServeBars:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.load = QUICK if args.quick else Load(think_s=args.think)
        self.sparse = QUICK if args.quick else SPARSE
        self.busy = dataclasses.replace(QUICK, ctx=8 * 256, slots=8, clients=2) if args.quick else BUSY
        self.rows: list[dict] = []
        self.details: dict = {}
        self.machine = machine(args)
        self.hcache = lib.Hcache(args)
        info = json.loads(self.hcache.run("model", "info", "--json", args.model))
        self.kv_bytes = info["kv_f16_bytes_per_token"]
        self.hcache.measure_costs(args.model)

    # ---- Book-keeping --------------------------------------------------------------------------

    def check(self, bar: int, what: str, samples: list[float], op: str, target: float) -> None:
        """Holds the median of the samples against the target."""
        measured = lib.median(samples)
        ok = measured >= target if op == ">=" else measured <= target
        self.rows.append({"bar": bar, "what": what, "target": f"{op} {target:g}",
                          "measured": measured, "spread": [min(samples), max(samples)],
                          "n": len(samples), "pass": bool(ok)})
        lib.say(f"bar {bar}: {what}: {measured:.4g} (target {op} {target:g}) "
                f"{'pass' if ok else 'MISSED'}")

    def note(self, bar: int, what: str, samples: list[float]) -> None:
        self.rows.append({"bar": bar, "what": what, "target": "-",
                          "measured": lib.median(samples),
                          "spread": [min(samples), max(samples)], "n": len(samples),
                          "pass": None})

    def fail(self, bar: int, what: str) -> None:
        self.rows.append({"bar": bar, "what": what, "target": "-", "measured": None,
                          "spread": None, "n": 0, "pass": False})
        lib.say(f"bar {bar}: {what}")

    def folder(self) -> tempfile.TemporaryDirectory:
        return tempfile.TemporaryDirectory(dir=self.args.work, prefix="serve-")

    # ---- Bar 3: the same load on both servers --------------------------------------------------

    def memory(self, scenario: str, load: Load) -> dict:
        """What both servers may hold. The working set is the F16 KV cache of every conversation at
        its end. Beside the arena of -c tokens both get extra_mib for saved state in host memory:
        --dram here, --cache-ram there."""
        working_set = load.sessions * load.context * self.kv_bytes
        arena = load.ctx * self.kv_bytes
        extra = working_set / 4 - arena if scenario == "a" else 1.5 * working_set
        extra_mib = max(1, round(extra / MIB))
        return {"kv_bytes_per_token": self.kv_bytes, "working_set_bytes": working_set,
                "arena_bytes": arena, "extra_mib": extra_mib,
                "working_set_over_memory": working_set / (arena + extra_mib * MIB)}

    def bar3(self) -> None:
        runs = []
        scenarios = self.args.scenarios.split(",")
        self.details["bar3"] = {"load": dataclasses.asdict(self.load),
                                "memory": {s: self.memory(s, self.load) for s in scenarios},
                                "runs": runs}
        for scenario in scenarios:
            for rep in range(self.args.reps):
                for name in ("hcache", "llama-server"):
                    lib.say(f"bar 3 ({scenario}): {name}, repetition {rep + 1}")
                    runs.append(self.run(self.load, scenario, name, rep))
        for scenario in scenarios:
            self.judge3(scenario, [run for run in runs if run["scenario"] == scenario])

    def run(self, load: Load, scenario: str, name: str, rep: int) -> dict:
        extra = self.memory(scenario, load)["extra_mib"]
        with self.folder() as state:
            if name == "hcache":
                server = servers.hcache(self.args, Path(state), load.ctx, load.slots, extra)
            else:
                server = servers.llama_server(self.args, load.ctx, load.slots, extra)

            def restart():
                time.sleep(3)  # thrice the interval at which state is flushed
                server.kill()
                for path in (Path(state) / "store").rglob("*"):
                    if path.is_file():
                        lib.drop_from_cache(path)
                server.start()

            with server:
                result = hold(self.args.program, server.url, load, rep + 1,
                              restart if scenario == "c" else None)
        return self.figures(load, scenario, name, rep, result)

    @staticmethod
    def figures(load: Load, scenario: str, name: str, rep: int, result: dict) -> dict:
        summary = result["summary"]
        # After a restart the round that follows it counts: later ones are in memory again.
        back = [r for r in result["requests"] if r["returning"] and
                (scenario != "c" or r["round"] == load.rounds // 2)]
        found = wrong_answers(result, load)
        # A short context may be computed again: that is as fast.
        long = [r for r in back if known_tokens(result, r) >= SHORT]
        known = sum(bool(r["cached_tokens"]) for r in long)
        if name == "hcache" and known < len(long):
            found.append(f"{len(long) - known} of {len(long)} came back to a forgotten context")
        if name == "llama-server" and scenario == "b" and known < 0.9 * len(long):
            found.append(f"it knew {known} of {len(long)} contexts although all fit")
        # What memory gives after a restart was fetched from the disk while its request waited.
        tiers = ("disk", "dram") if scenario == "c" else ("disk",)
        from_disk = sum(any(read_bytes(r, tier) for tier in tiers) for r in long)
        if name == "hcache" and from_disk < {"a": 1, "b": 0, "c": len(long)}[scenario]:
            found.append(f"{from_disk} of {len(long)} were read from the disk")
        ttft = sorted(r["ttft_ms"] for r in back if r["ttft_ms"] is not None)
        first = sorted(r["ttft_ms"] for r in result["requests"]
                       if r["round"] == 0 and r["ttft_ms"] is not None)
        return {"scenario": scenario, "server": name, "rep": rep, "seed": rep + 1,
                **(lib.percentiles(ttft, "ttft") if ttft else {}), "ttft_ms": ttft,
                **(lib.percentiles(first, "first_ttft") if first else {}),
                "tokens_per_s": summary["tokens_per_s"],
                "rounds_per_s": summary["requests_per_s"], "duration_s": summary["duration_s"],
                "cached_share": summary["cached_share"]["returning"], "known": known,
                "returning": len(back), "long": len(long), "from_disk": from_disk,
                **{f"tpot_p{p}_ms": summary["tpot_ms"].get(f"p{p}") for p in lib.PERCENTILES},
                "problems": found}

    def sound(self, bar: int, runs: list[dict], title: str) -> bool:
        """What is not right is not timed."""
        problems = [f"{title}{run['server']}: {text}" for run in runs for text in run["problems"]]
        for text in problems:
            self.fail(bar, text)
        return not problems

    @staticmethod
    def pairs(runs: list[dict], key: str) -> list[tuple[float, float]]:
        """Ours and theirs, repetition by repetition."""
        ours, theirs = ([run[key] for run in runs if run["server"] == name]
                        for name in ("hcache", "llama-server"))
        return list(zip(ours, theirs, strict=True))

    def judge3(self, scenario: str, runs: list[dict]) -> None:
        if not self.sound(3, runs, f"({scenario}) "):
            return

        def pairs(key):
            return self.pairs(runs, key)

        title = f"({scenario}) {SCENARIOS[scenario]}: "
        for name, column in (("hcache", 0), ("llama-server", 1)):
            for p in lib.PERCENTILES:
                self.note(3, title + f"TTFT p{p} of {name}, ms",
                          [pair[column] for pair in pairs(f"ttft_p{p}_ms")])
        self.check(3, title + "TTFT p50 theirs / ours",
                   [theirs / ours for ours, theirs in pairs("ttft_p50_ms")], ">=",
                   0.95 if scenario == "b" else 5)
        for key in ("tokens_per_s", "rounds_per_s"):
            self.check(3, title + f"{key} ours / theirs",
                       [ours / theirs for ours, theirs in pairs(key)], ">=", 1)

    # ---- Bar 6: clients that never pause -------------------------------------------------------

    def bar6(self) -> None:
        runs = []
        self.details["bar6"] = {"load": dataclasses.asdict(self.busy),
                                "memory": self.memory("b", self.busy), "runs": runs}
        for rep in range(self.args.reps):
            for name in ("hcache", "llama-server"):
                lib.say(f"bar 6: {name}, repetition {rep + 1}")
                runs.append(self.run(self.busy, "b", name, rep))
        if not self.sound(6, runs, ""):
            return
        title = f"{self.busy.clients} clients at once: "
        for name, column in (("hcache", 0), ("llama-server", 1)):
            for key in ("tokens_per_s", "first_ttft_p50_ms", "ttft_p50_ms"):
                self.note(6, title + f"{key} of {name}",
                          [pair[column] for pair in self.pairs(runs, key)])
        self.check(6, title + "tokens_per_s ours / theirs",
                   [ours / theirs for ours, theirs in self.pairs(runs, "tokens_per_s")], ">=", 2)
        for key in ("first_ttft_p50_ms", "ttft_p50_ms"):
            self.check(6, title + f"{key} theirs / ours",
                       [theirs / ours for ours, theirs in self.pairs(runs, key)], ">=", 1)

    # ---- Bar 4: what restores cost those that are being answered -------------------------------

    def bar4(self) -> None:
        load = self.sparse
        # With: what does not fit the arena comes back from the disk. Without: nothing ever leaves.
        sizes = {"with": load.ctx, "without": round(1.5 * load.sessions * load.context)}
        # In turn the one or the other first: the machine's drift is not all one side's.
        runs = [self.run4(kind, sizes[kind], rep) for rep in range(self.args.reps)
                for kind in sorted(sizes, reverse=rep % 2 == 0)]
        self.details["bar4"] = {"load": dataclasses.asdict(load), "ctx": sizes, "runs": runs}
        problems = [f"{run['kind']}: {text}" for run in runs for text in run["problems"]]
        for text in problems:
            self.fail(4, text)
        if problems:
            return
        with_, without = ([run for run in runs if run["kind"] == kind] for kind in sizes)
        self.note(4, "restores of a run", [run["restores"] for run in with_])
        self.note(4, "mean step of the loads without restores, ms",
                  [run["step_ms"] for run in without])
        self.note(4, "mean time between tokens, with restores / without, one load after the other",
                  [a["tbt_ms"] / b["tbt_ms"] for a, b in zip(with_, without, strict=True)])
        self.check(4, "mean step of a load / of its steps without a restore beside them",
                   [run["step_ms"] / run["plain_step_ms"] for run in with_], "<=", 1.04)
        self.note(4, "longest step of replies beside a restore / the same without it",
                  [max(run["stretch"] for run in with_)])
        self.check(4, "the same without time in which the machine ran something else",
                   [max(run["stretch_own"] for run in with_)], "<=", 1.3)

    def run4(self, kind: str, ctx: int, rep: int) -> dict:
        lib.say(f"bar 4: {kind} restores, repetition {rep + 1}")
        with self.folder() as state, \
                servers.hcache(self.args, Path(state), ctx, self.sparse.slots, 0) as server:
            result = hold(self.args.program, server.url, self.sparse, rep + 1)
            figures = hostile.metrics(server.url)
        found = wrong_answers(result, self.sparse)
        restores = sum(value for metric, value in figures.items()
                       if metric.startswith("hcache_restore_seconds_count"))
        if (restores > 0) != (kind == "with"):
            found.append(f"{restores:g} restores")
        stretch = figures["hcache_step_stretch_max"]
        steps = {key: {"n": figures[f'hcache_steps{{restoring="{key}"}}'],
                       "seconds": figures[f'hcache_step_seconds{{restoring="{key}"}}']}
                 for key in ("no", "yes")}
        n_steps = sum(each["n"] for each in steps.values())
        if kind == "with" and stretch == 0 and not self.args.quick:  # too short to be sure of it
            found.append("nothing was being answered beside a restore")
        return {"kind": kind, "rep": rep, "seed": rep + 1, "restores": restores,
                "tbt_ms": result["summary"]["tbt_ms"].get("mean"),
                "tbt_p99_ms": result["summary"]["tbt_ms"].get("p99"),
                "stretch": stretch,
                "stretch_own": figures["hcache_step_stretch_own_max"],
                "steps": steps,
                "step_ms": 1e3 * sum(each["seconds"] for each in steps.values()) / n_steps,
                "plain_step_ms": 1e3 * steps["no"]["seconds"] / steps["no"]["n"],
                "problems": found}

    # ---- Bar 5: a hostile crowd ----------------------------------------------------------------

    def bar5(self) -> None:
        requests, connections = (60, 16) if self.args.quick else (1000, 64)
        seed = self.args.seed
        lib.say(f"bar 5: seed {seed}")
        with self.folder() as state, servers.hcache(self.args, Path(state), self.load.ctx,
                                                    self.load.slots, 64) as server:
            # Until every buffer has been touched: what grows afterwards is a leak.
            warm = hostile.Crowd(server.url, seed + 1)
            warm.run(2 * requests, connections)
            before = self.quiet(server)
            crowd = hostile.Crowd(server.url, seed, warm.answers)
            crowd.run(requests, connections)
            after = self.quiet(server)
        self.details["bar5"] = {"seed": seed, "connections": connections, "requests": requests,
                                "by_kind": dict(crowd.done), "before": before, "after": after,
                                "failures": warm.failures + crowd.failures}
        for text in (warm.failures + crowd.failures)[:20]:
            self.fail(5, text)
        self.check(5, f"requests of {requests} that ended as they should",
                   [sum(crowd.done.values()) - len(crowd.failures)], ">=", requests)
        self.check(5, "resident memory after / before",
                   [after["resident_bytes"] / before["resident_bytes"]], "<=", 1.02)
        self.check(5, "requests in flight and active cells left", [sum(after["busy"].values())],
                   "<=", 0)

    @staticmethod
    def quiet(server: servers.Server) -> dict:
        """The server's state when it has had time to end everything."""
        end = time.monotonic() + 120
        while time.monotonic() < end and hostile.busy(hostile.metrics(server.url)):
            time.sleep(0.1)
        time.sleep(3)  # flushes and closed connections
        return {"busy": hostile.busy(hostile.metrics(server.url)),
                "resident_bytes": server.resident_bytes()}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    lib.add_common_options(parser)
    parser.add_argument("--bars", default="3,4,5,6")
    parser.add_argument("--scenarios", default="a,b,c", help="of bar 3: " + ", ".join(
        f"{key} ({text})" for key, text in SCENARIOS.items()))
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--think", type=float, default=Load.think_s,
                        help="of bar 3: seconds between rounds; slower machines need more (default: 150)")
    parser.add_argument("--seed", type=int, default=1, help="of bar 5's crowd")
    parser.add_argument("--llama-server", type=Path)
    args = parser.parse_args()
    args.model = args.model or lib.default_model()
    args.reps = 1 if args.quick else args.reps
    if {"3", "6"} & set(args.bars.split(",")) and not args.llama_server:
        args.llama_server = next(path for path in map(Path, lib.third_party("peer"))
                                 if path.name == "llama-server")
    return args


def main() -> None:
    args = parse_args()
    bars = ServeBars(args)
    for number in args.bars.split(","):
        try:
            getattr(bars, f"bar{int(number)}")()
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            bars.fail(int(number), f"failed: {error}")
    print(lib.table(["bar", "what", "target", "measured", "spread", ""], [
        [r["bar"], r["what"], r["target"],
         "-" if r["measured"] is None else f"{r['measured']:.4g}",
         "-" if r["spread"] is None else "{:.4g} - {:.4g}".format(*r["spread"]),
         {True: "pass", False: "MISSED", None: ""}[r["pass"]]] for r in bars.rows]))
    lib.conclude(args, bars, "-serve")


if __name__ == "__main__":
    main()
