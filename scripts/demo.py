#!/usr/bin/env python3
"""The main job on a real model, as `make demo` shows it.

    scripts/demo.py [-m MODEL] [--program PROGRAM] [--turns N]

One process reads demo/lighthouse.txt, talks about it and exits; others, with nothing but the state
folder, answer the next question by each method. The methods take turns, before each one the saved
state is dropped from the page cache, and the table shows medians.
"""

import argparse
import collections
import json
import statistics
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
# What the benchmark scripts share.
import benchlib as lib  # noqa: E402

ESSAY = ROOT / "demo/lighthouse.txt"
FIRST = "Say in one sentence what this essay is about."
SECOND = "What happened to Henry Winstanley?"
NEXT = "Who built the third tower on the Eddystone, and what was new about its stones?"
RESTORES = ("plan", "hidden", "kv")  # in every turn; recomputing takes much longer, and no disk
HEADER = ["method", "first token", "bytes read", "I/O busy", "compute busy", "schedule",
          "answer against the uninterrupted run"]


class Demo:
    def __init__(self, args: argparse.Namespace, state: Path):
        self.args = args
        self.state = state
        # Greedy, so that answers can be compared token by token.
        self.talk = ["-m", args.model, "--temperature", "0", "--max-tokens", "64", "--json",
                     "--state-dir", str(state)]
        self.first = state / "first.txt"
        self.first.write_text(f"{ESSAY.read_text(encoding='utf-8')}\n{FIRST}\n", encoding="utf-8")

    def hcache(self, verb: str, *options: str, say: str = "") -> str:
        """What a verb prints that has these lines on stdin."""
        return subprocess.run([str(self.args.program), verb, *self.talk, *options], input=say,
                              check=True, stdout=subprocess.PIPE, text=True).stdout

    def talked(self, *options: str, say: str) -> list[dict]:
        """The turns of a conversation that begins with the essay and goes on with these lines."""
        out = self.hcache("chat", "-f", str(self.first), *options, say=say)
        return [json.loads(line) for line in out.splitlines() if line.strip()]

    def restored(self, method: str) -> dict:
        """The next question, by a new process that finds nothing of the store in memory."""
        for path in (self.state / "store").rglob("*"):
            if path.is_file():
                lib.drop_from_cache(path)
        return json.loads(self.hcache("run", "--session", "demo", "--no-save", "--restore-method",
                                      method, "-p", NEXT))


def compare(tokens: list[int], expected: list[int]) -> str:
    """'identical', or the first position at which two answers part."""
    if tokens == expected:
        return "identical"
    same = 0
    while same < min(len(tokens), len(expected)) and tokens[same] == expected[same]:
        same += 1
    return f"parts at token {same + 1} of {len(expected)}"


def size(n: int) -> str:
    return f"{n / 2**20:.1f} MiB" if n >= 2**20 else f"{n / 2**10:.1f} KiB"


def merge(runs: dict[str, list[dict]]) -> dict[str, list[dict]]:
    """Where the plan came to what another method is, both did the same work: one row for both."""
    schedules = {method: {turn["restore"]["schedule"] for turn in turns}
                 for method, turns in runs.items()}
    merged = dict(runs)
    for method in RESTORES[1:]:
        if len(schedules["plan"]) == 1 and schedules[method] == schedules["plan"]:
            turns = merged.pop("plan") + merged.pop(method)
            return {f"plan (it is {method})": turns, **merged}
    return merged


def row(name: str, turns: list[dict], expected: dict) -> list[str]:
    """The median turn's figures, and what came of all answers."""
    restores = [turn["restore"] for turn in turns]

    def median_ms(values) -> str:
        return f"{statistics.median(values):.0f} ms"

    schedules = collections.Counter(restore["schedule"] or "-" for restore in restores)
    verdicts = sorted({compare(turn["reply_tokens"], expected["reply_tokens"]) for turn in turns})
    return [name, median_ms(turn["ttft_ms"] for turn in turns),
            size(statistics.median_low(restore["bytes_read"] for restore in restores)),
            median_ms(restore["io_busy_ms"] for restore in restores),
            median_ms(restore["compute_busy_ms"] for restore in restores),
            schedules.most_common(1)[0][0], ", ".join(verdicts)]


def show(first: list[dict], runs: dict[str, list[dict]], expected: dict) -> None:
    print(f"\nprocess 1 began by computing {first[0]['prompt_tokens']} tokens: first token after "
          f"{first[0]['ttft_ms'] / 1000:.2f} s. The conversation grew to "
          f"{expected['history_tokens']} tokens.\n")
    rows = [row(name, turns, expected) for name, turns in merge(runs).items()]
    rows.append(["(resident)", f"{expected['ttft_ms']:.0f} ms", "-", "-", "-", "-",
                 "the uninterrupted run itself"])
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    for cells in [HEADER, *rows]:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        print("  ".join(padded).rstrip())

    replies = {"the answer": expected["reply"]}
    for method, turns in runs.items():
        for turn in turns:
            if turn["reply_tokens"] != expected["reply_tokens"]:
                replies[f"the answer after {method}"] = turn["reply"]
    for title, text in replies.items():
        print(f"\n{title}:")
        print(textwrap.fill(text.strip(), width=96, initial_indent="  ", subsequent_indent="  "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="GGUF model (default: the one that `make` fetches)")
    parser.add_argument("--program", type=Path, default=ROOT / "build/release/bin/hcache")
    parser.add_argument("--turns", type=int, default=6,
                        help="how often each method restores; recomputing is done once")
    args = parser.parse_args()
    args.model = args.model or lib.default_model()

    with tempfile.TemporaryDirectory(prefix="hcache-demo.") as folder:
        demo = Demo(args, Path(folder))
        words = len(ESSAY.read_text(encoding="utf-8").split())
        lib.say(f"process 1: reads {words} words, answers two questions, exits")
        # Each method must find what it wants to read, so everything is saved here; by default only
        # what the plan will want is.
        first = demo.talked("--save", "all", "--session", "demo", say=SECOND + "\n")
        lib.say("for comparison: the same conversation and the next question, never interrupted")
        expected = demo.talked("--no-store", say=f"{SECOND}\n{NEXT}\n")[-1]
        runs: dict[str, list[dict]] = {method: [] for method in (*RESTORES, "recompute")}
        for turn in range(args.turns):
            lib.say(f"new processes, turn {turn + 1} of {args.turns}: the next question, restored by "
                    "each method")
            shift = turn % len(RESTORES)
            for method in RESTORES[shift:] + RESTORES[:shift]:
                runs[method].append(demo.restored(method))
            if turn == args.turns // 2:
                runs["recompute"].append(demo.restored("recompute"))
        show(first, runs, expected)


if __name__ == "__main__":
    main()
