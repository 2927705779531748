#!/usr/bin/env python3
"""A conversation that outgrows the context many times, on a server that is killed meanwhile.

    bench/overflow.py                     30,000 tokens over a context of 8,192, killed twice
    bench/overflow.py --quick             tiny settings: proves the script, measures nothing

No request may be refused, and of the tokens that were held when a turn ended at most 10 % may have to be
computed again for the next one, whether the server was killed in between or not. Then the time to the
first token of a turn that overflows the context is compared with what computing the tokens that are left
anew would take: prompts of as many tokens, without the cache, on the same server.
"""

import argparse
import tempfile
import time
from pathlib import Path

import benchlib as lib
import servers

LEAST_CACHED = 0.9
LEAST_FASTER = 10
SETTLE_S = 3  # thrice the interval at which state is flushed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    lib.add_common_options(parser)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=30000, help="of the whole conversation")
    parser.add_argument("--round", type=int, default=1000, help="tokens of a message, about")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--short-context", type=int, default=2688,
                        help="for the time to the first token; of 2,688 some 2,050 tokens are kept")
    parser.add_argument("--reps", type=int, default=5, help="overflows that are timed")
    args = parser.parse_args()
    if args.quick:
        args.context, args.tokens, args.round, args.kills = 512, 1500, 150, 1
        args.short_context, args.reps = 512, 1
    if args.model is None:
        args.model = lib.default_model()
    return args


class Talk:
    """A client that sends the whole conversation every time."""

    def __init__(self, server, salt: str):
        self.server, self.salt = server, salt
        self.messages = [{"role": "system", "content": "You are brief."}]
        self.held = self.dropped = self.said = 0  # when the last turn ended

    def say(self, text: str, reply: int) -> dict:
        self.messages.append({"role": "user", "content": text})
        answer = self.server.post("/v1/chat/completions", {
            "messages": self.messages, "max_tokens": reply, "temperature": 0, "cache_salt": self.salt})
        self.messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        usage, hcache = answer["usage"], answer["hcache"]
        # Beside the new message, and the last token of an answer, which is computed with the next turn.
        again = max(0, hcache["tokens"]["new"] - (usage["prompt_tokens"] - self.said) - 1)
        turn = {"tokens": usage["total_tokens"], "dropped": hcache["dropped_tokens"],
                "cached": usage["prompt_tokens_details"]["cached_tokens"],
                "new": hcache["tokens"]["new"], "restore_ms": hcache["restore_ms"],
                "first_token_ms": hcache["first_token_ms"],
                "of_held": 1 - again / self.held if self.held else None,
                "overflowed": hcache["dropped_tokens"] > self.dropped}
        self.dropped, self.said = turn["dropped"], turn["tokens"]
        self.held = turn["tokens"] - turn["dropped"] - 1  # the last token is computed with the next turn
        return turn


def start(args, folder: str, context: int) -> servers.Server:
    return servers.hcache(args, Path(folder), context, 4, 256, "--context-overflow", "truncate")


def long_conversation(args, text: lib.Text) -> list[dict]:
    turns = []
    with tempfile.TemporaryDirectory(dir=args.work, prefix="overflow-") as folder, \
            start(args, folder, args.context) as server:
        talk = Talk(server, "long")
        kills = [args.tokens * (i + 1) // (args.kills + 1) for i in range(args.kills)]
        while not turns or turns[-1]["tokens"] < args.tokens:
            killed = bool(kills) and bool(turns) and turns[-1]["tokens"] >= kills[0]
            if killed:
                kills.pop(0)
                time.sleep(SETTLE_S)
                server.kill()
                server.start()
            turns.append(talk.say(text.take(args.round), 32) | {"killed": killed})
            lib.say(f"{turns[-1]['tokens']} tokens, {turns[-1]['dropped']} dropped")
    return turns


def overflows(args, text: lib.Text) -> list[dict]:
    pairs = []
    with tempfile.TemporaryDirectory(dir=args.work, prefix="overflow-") as folder, \
            start(args, folder, args.short_context) as server:
        for rep in range(args.reps):
            talk = Talk(server, f"talk {rep}")
            turn = talk.say(text.take(args.short_context * 3 // 4), 4)
            while not turn["overflowed"]:
                turn = talk.say(text.take(24), 4)
            kept = turn["tokens"] - turn["dropped"]
            tokens = server.post("/tokenize", {"content": text.take(2 * kept)})["tokens"][:kept]
            anew = server.post("/completion", {"prompt": tokens, "n_predict": 4, "cache_prompt": False,
                                               "temperature": 0})
            pairs.append({"kept": kept, "new": turn["new"], "ms": turn["first_token_ms"],
                          "anew_ms": anew["hcache"]["first_token_ms"]})
            lib.say(f"{kept} tokens kept: {pairs[-1]['ms']:.0f} ms, anew {pairs[-1]['anew_ms']:.0f} ms")
    return pairs


def main() -> None:
    args = parse()
    lib.Hcache(args)  # makes the folder
    text = lib.Text()
    turns = long_conversation(args, text)
    pairs = overflows(args, text)
    later = [turn for turn in turns if turn["of_held"] is not None]
    least = min(turn["of_held"] for turn in later)
    faster = [pair["anew_ms"] / pair["ms"] for pair in pairs]
    rows = [["tokens of the conversation, and dropped of them", "-", turns[-1]["tokens"],
             f"{turns[-1]['dropped']}"],
            ["turns, and those after a kill", "-", len(turns), f"{sum(t['killed'] for t in turns)}"],
            ["least part of what was held that was there for the next turn", f">= {LEAST_CACHED}",
             f"{least:.4f}", "pass" if least >= LEAST_CACHED else "MISSED"],
            ["first token after an overflow: computing anew / ours", f">= {LEAST_FASTER}",
             f"{lib.median(faster):.1f}", f"{min(faster):.1f} to {max(faster):.1f}"]]
    print(lib.table(["", "target", "measured", ""], [[str(cell) for cell in row] for row in rows]))
    lib.write_results(args.json_file or (args.work / "overflow.json"), {
        "quick": args.quick, "context": args.context, "model": Path(args.model).name, "turns": turns,
        "least_of_held": least, "overflows": pairs, "anew_over_ours": faster})
    if least < LEAST_CACHED and not args.quick:
        raise SystemExit("a turn found too little of what was held")


if __name__ == "__main__":
    main()
