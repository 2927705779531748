#!/usr/bin/env python3
"""Does it pay to read the state of waiting requests ahead? The real server on a slow disk.

    bench/fetch_bar.py                     (some minutes)

Conversations of three blocks of 512 tokens are held, the server is killed, and all come back at once
with one more message: one is answered at a time, the others wait. `--link` makes loading one take as
long as answering one does without it, which is measured first. Compared is the median time to first
token of the returning requests with --fetch-policy on-demand and scheduler-aware (AttentionStore
section 3.3.1). Every answer of both is compared before anything is timed.
"""

import argparse
import dataclasses
import json
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


def run(args: argparse.Namespace, shape: Shape, policy: str, link: float) -> dict:
    """All conversations once, a crash, and all of them again."""
    with tempfile.TemporaryDirectory(dir=args.work, prefix="fetch-") as name:
        folder = Path(name)
        state = folder / "state"
        first, again = folder / "first.jsonl", folder / "again.jsonl"
        write_trace(first, shape, False)
        write_trace(again, shape, True)
        ctx = (shape.blocks + 1) * BLOCK + 512  # one at a time
        options = ["--fetch-policy", policy]
        if link:
            options += ["--link", f"{round(link)}B/s"]
        state.mkdir()
        server = servers.hcache(args, state, ctx, 1, 256, *options)
        with server:
            load(args, server.url, first, folder / "answers-first")
            time.sleep(3)  # thrice the interval at which state is flushed
            server.kill()
            for path in (state / "store").rglob("*"):
                if path.is_file():
                    lib.drop_from_cache(path)
            server.start()
            result = load(args, server.url, again, folder / "answers")
        found = [r["cached_tokens"] or 0 for r in result["requests"]]
        if min(found) < shape.blocks * BLOCK * 0.8:
            raise RuntimeError(f"a conversation came back to {min(found)} known tokens")
        disk = [serve_bars.disk_bytes(r) for r in result["requests"]]
        dram = [r.get("server", {}).get("hcache", {}).get("bytes", {}).get("dram", 0)
                for r in result["requests"]]
        return {"policy": policy, "link_bytes_per_s": link,
                "ttft_p50_ms": statistics.median(r["ttft_ms"] for r in result["requests"]),
                "duration_s": result["summary"]["duration_s"],
                "bytes": statistics.median(a + b for a, b in zip(disk, dram)),
                "from_dram": sum(dram) / max(1, sum(dram) + sum(disk)),
                "answers": (folder / "answers").read_text(encoding="utf-8")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    lib.add_common_options(parser)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    args.model = args.model or lib.default_model()
    shape = QUICK if args.quick else Shape()
    lib.Hcache(args).measure_costs(args.model)
    free = run(args, shape, "on-demand", 0)
    service_s = (free["duration_s"] - shape.within_s / 2) / shape.conversations
    link = free["bytes"] / service_s
    lib.say(f"answering takes {service_s:.2f} s, the link moves {link / 1e6:.1f} MB/s")
    runs = []
    ratios = []
    for rep in range(1 if args.quick else args.reps):
        pair = [run(args, shape, policy, link) for policy in ("on-demand", "scheduler-aware")]
        if pair[0].pop("answers") != pair[1].pop("answers"):
            raise RuntimeError("the answers differ")
        runs += pair
        ratios.append(pair[0]["ttft_p50_ms"] / pair[1]["ttft_p50_ms"])
        for r in pair:
            lib.say(f"{r['policy']}: TTFT p50 {r['ttft_p50_ms']:.0f} ms, "
                    f"{100 * r['from_dram']:.0f} % from memory, {r['duration_s']:.1f} s")
    print(f"TTFT p50 on-demand / scheduler-aware: {lib.median(ratios):.2f} "
          f"({min(ratios):.2f} - {max(ratios):.2f}); target >= 1.5")
    free.pop("answers")
    if args.json_file:
        args.json_file.write_text(json.dumps(
            {"machine": serve_bars.machine(args), "shape": dataclasses.asdict(shape),
             "service_s": service_s, "free": free, "runs": runs, "ratios": ratios}, indent=1) + "\n",
            encoding="utf-8")


if __name__ == "__main__":
    main()
