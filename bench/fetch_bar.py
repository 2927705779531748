#!/usr/bin/env python3
"""Does it pay to read the state of waiting requests ahead? The real server on a slow disk.

    bench/fetch_bar.py                     (some minutes)
    bench/fetch_bar.py --policy car-timer  (CaR section III-B.2; the arena has room for two)
    bench/fetch_bar.py --quick             tiny settings: proves the script, measures nothing

Conversations of three blocks of 512 tokens are held, the server is killed, and all come back at once
with one more message: one is answered at a time, the others wait. `--link` makes loading one take as
long as answering one does without it, which is measured before each pair. Compared is the median
time to first token of the returning requests with --fetch-policy on-demand and scheduler-aware
(AttentionStore section 3.3.1). Every answer of both is compared before anything counts.
"""

import argparse
import dataclasses
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import benchlib as lib
import servers
import serve_bars

BLOCK = 512  # tokens, of a trace
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Shape:
    conversations: int = 24
    blocks: int = 3
    message: int = 64
    answer: int = 48
    within_s: float = 2  # all come back
    room: int = 1  # conversations that the arena holds; one is answered at a time


QUICK = Shape(conversations=4, blocks=1, answer=8)


def write_trace(path: Path, shape: Shape, returning: bool) -> None:
    lines = []
    for i in range(shape.conversations):
        ids = [1000 * i + block for block in range(shape.blocks + returning)]
        at_s = i * shape.within_s / shape.conversations if returning else 0
        lines.append(json.dumps({"timestamp": round(1000 * at_s),
                                 "input_length": shape.blocks * BLOCK + returning * shape.message,
                                 "output_length": shape.answer, "hash_ids": ids}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def load(args: argparse.Namespace, url: str, trace: Path, answers: Path) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "load.json"
        command = [str(args.program), "bench", "serve", "--url", url, "--trace", str(trace),
                   "--sessions", "0", "--exact-length", "--timeout", "15m", "--answers",
                   str(answers), "--json", str(out)]
        lib.say("+ " + " ".join(command))
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result = json.loads(out.read_text())
    if result["summary"]["errors"]:
        raise RuntimeError(f"not all were answered: {result['summary']['errors']}")
    return result


def serve(args: argparse.Namespace, shape: Shape, state: Path, *options: str):
    ctx = shape.room * ((shape.blocks + 1) * BLOCK + 512)
    return servers.hcache(args, state, ctx, 1, 256, *options)


def hold_all(args: argparse.Namespace, shape: Shape, folder: Path) -> Path:
    """All conversations once, and a crash: the state that is left."""
    state = folder / "state"
    state.mkdir()
    write_trace(folder / "first.jsonl", shape, False)
    with serve(args, shape, state) as server:
        load(args, server.url, folder / "first.jsonl", folder / "answers-first")
        time.sleep(3)  # thrice the interval at which state is flushed
        server.kill()
    return state


def run(args: argparse.Namespace, shape: Shape, held: Path, policy: str, link: float) -> dict:
    """All of them come back to a copy of that state."""
    with tempfile.TemporaryDirectory(dir=args.work, prefix="fetch-") as name:
        folder = Path(name)
        state = folder / "state"
        shutil.copytree(held, state)
        again = folder / "again.jsonl"
        write_trace(again, shape, True)
        options = ["--fetch-policy", policy]
        if link:
            options += ["--link", f"{round(link)}B/s"]
        for path in (state / "store").rglob("*"):
            if path.is_file():
                lib.drop_from_cache(path)
        with serve(args, shape, state, *options) as server:
            result = load(args, server.url, again, folder / "answers")
        found = [r["cached_tokens"] or 0 for r in result["requests"]]
        if min(found) < shape.blocks * BLOCK * 0.8:
            raise RuntimeError(f"a conversation came back to {min(found)} known tokens")
        ttft = sorted(r["ttft_ms"] for r in result["requests"])
        disk = [serve_bars.read_bytes(r, "disk") for r in result["requests"]]
        dram = [r.get("server", {}).get("hcache", {}).get("bytes", {}).get("dram", 0)
                for r in result["requests"]]
        return {"policy": policy, "link_bytes_per_s": link,
                **lib.percentiles(ttft, "ttft"), "ttft_ms": ttft,
                "duration_s": result["summary"]["duration_s"],
                "bytes": statistics.median(a + b for a, b in zip(disk, dram, strict=True)),
                "from_dram": sum(dram) / max(1, sum(dram) + sum(disk)),
                "answers": (folder / "answers").read_text(encoding="utf-8")}


def measure_pair(args: argparse.Namespace, shape: Shape, held: Path, turned: bool) -> dict:
    """Both policies over a link that is as fast as the machine answers now: it drifts."""
    free = run(args, shape, held, "on-demand", 0)
    answers = free.pop("answers")
    service_s = (free["duration_s"] - shape.within_s / 2) / shape.conversations
    link = free["bytes"] / service_s
    lib.say(f"answering takes {service_s:.2f} s, the link moves {link / 1e6:.1f} MB/s")
    runs = {}
    for policy in ((args.policy, "on-demand") if turned else ("on-demand", args.policy)):
        result = run(args, shape, held, policy, link)
        if result.pop("answers") != answers:
            raise RuntimeError("the answers differ")
        runs[policy] = result
        lib.say(f"{policy}: TTFT p50 {result['ttft_p50_ms']:.0f}, p90 {result['ttft_p90_ms']:.0f}, "
                f"p99 {result['ttft_p99_ms']:.0f} ms, "
                f"{100 * result['from_dram']:.0f} % from memory, {result['duration_s']:.1f} s; "
                f"the link alone {shape.conversations * result['bytes'] / link:.1f} s")
    ratios = {p: runs["on-demand"][f"ttft_p{p}_ms"] / runs[args.policy][f"ttft_p{p}_ms"]
              for p in lib.PERCENTILES}
    return {"service_s": service_s, "free": free, "runs": runs, "ratio": ratios[50],
            "ratio_p90": ratios[90], "ratio_p99": ratios[99]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    lib.add_common_options(parser)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--policy", default="scheduler-aware", help="compared with on-demand")
    args = parser.parse_args()
    args.model = args.model or lib.default_model()
    shape = QUICK if args.quick else Shape()
    if args.policy == "car-timer":
        shape = dataclasses.replace(shape, room=2)
    lib.Hcache(args).measure_costs(args.model)
    with tempfile.TemporaryDirectory(dir=args.work, prefix="fetch-held-") as folder:
        held = hold_all(args, shape, Path(folder))
        pairs = []
        ratios = []
        for rep in range(1 if args.quick else args.reps):
            pair = measure_pair(args, shape, held, rep % 2 == 1)
            ratios.append(pair["ratio"])
            pairs.append(pair)
    target = "; target >= 1.5" if args.policy == "scheduler-aware" else ""
    print(f"TTFT p50 on-demand / {args.policy}: {lib.median(ratios):.2f} "
          f"({min(ratios):.2f} - {max(ratios):.2f}){target}")
    for p in (90, 99):
        print(f"TTFT p{p} on-demand / {args.policy}: "
              f"{lib.median([pair[f'ratio_p{p}'] for pair in pairs]):.2f}")
    lib.write_results(args.json_file, {"machine": serve_bars.machine(args),
                                       "shape": dataclasses.asdict(shape), "pairs": pairs,
                                       "ratios": ratios})


if __name__ == "__main__":
    main()
