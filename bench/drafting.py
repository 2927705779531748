#!/usr/bin/env python3
"""Replies with tokens guessed from their conversation (--draft-max) against the same replies without.

    bench/drafting.py                     12 pairs of each kind of text
    bench/drafting.py -m LARGE --model-draft SMALL --draft-max 16
                                          with a second model that guesses, too
    bench/drafting.py --quick             tiny settings: proves the script, measures nothing

Two servers that differ in --draft-max alone get the same requests in turns. "editing": a passage and the
beginning of a copy of it, which the model goes on with: most of a reply stands in its prompt. "new": prose
is continued with sampling at a temperature, from seeds, so that little repeats itself. The tokens must be
the same on both; compared are tokens per second behind the first, pair by pair.
"""

import argparse
import tempfile
from pathlib import Path

import benchlib as lib
import servers

KINDS = {"editing": 2.0, "new": 0.97}  # and the least median of drafted / plain


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    lib.add_common_options(parser)
    parser.add_argument("--pairs", type=int, default=12, help="of each kind of text")
    parser.add_argument("--passage", type=int, default=300, help="tokens of a passage")
    parser.add_argument("--reply", type=int, default=200, help="tokens of a reply")
    parser.add_argument("--draft-max", type=int, default=64)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of text")
    parser.add_argument("--temperature", type=float, default=0.9,
                        help="of new text; 0 for weights that ggml multiplies (F32, F16), where a row's "
                        "last bits depend on how many there are")
    parser.add_argument("--model-draft", help="a small model with the same vocabulary that guesses")
    args = parser.parse_args()
    if args.quick:
        args.pairs, args.passage, args.reply = 1, 60, 24
    if args.model is None:
        args.model = lib.default_model()
    return args


def requests(args, server, kind: str) -> list[dict]:
    """Prompts of tokens, from passages of a text that no two pairs share."""
    text = Path(lib.third_party("texts")[0]).read_text(encoding="utf-8")
    size = 5 * args.passage  # bytes, more than as many tokens take
    bodies = []
    for i in range(args.pairs):
        at = (i + 1) * 3 * size
        passage = server.post("/tokenize", {"content": text[at:at + size]})["tokens"][:args.passage]
        body = {"n_predict": args.reply, "ignore_eos": True, "return_tokens": True, "cache_prompt": False}
        if kind == "editing":
            begun = passage[:args.passage // 4]
            body |= {"prompt": passage + begun, "temperature": 0}
        else:
            body |= {"prompt": passage[:args.passage // 2], "temperature": args.temperature, "seed": i}
        bodies.append(body)
    return bodies


def measure(args, plain, drafting) -> list[dict]:
    pairs = []
    for kind in args.kinds:
        for i, body in enumerate(requests(args, plain, kind)):
            order = [plain, drafting] if i % 2 == 0 else [drafting, plain]
            answers = {server.name: server.post("/completion", body) for server in order}
            ours, theirs = answers["drafting"], answers["plain"]
            if ours["tokens"] != theirs["tokens"]:
                raise RuntimeError(f"{kind} {i}: the replies differ")
            timings = ours["timings"]
            pairs.append({"kind": kind, "tokens": len(ours["tokens"]),
                          "drafted": timings.get("draft_n", 0),
                          "accepted": timings.get("draft_n_accepted", 0),
                          "tokens_per_s": timings["predicted_per_second"],
                          "plain_tokens_per_s": theirs["timings"]["predicted_per_second"]})
            lib.say(f"{kind}: {pairs[-1]['tokens_per_s']:.1f} tokens/s, without "
                    f"{pairs[-1]['plain_tokens_per_s']:.1f}; {pairs[-1]['accepted']} of "
                    f"{pairs[-1]['drafted']} guesses came true")
    return pairs


def main() -> None:
    args = parse()
    lib.Hcache(args)  # makes the folder
    with tempfile.TemporaryDirectory(dir=args.work, prefix="draft-") as one, \
            tempfile.TemporaryDirectory(dir=args.work, prefix="draft-") as other:
        plain = servers.hcache(args, Path(one), 4096, 1, 0, "--no-store", "--draft-max", 0)
        model = ["--model-draft", args.model_draft] if args.model_draft else []
        drafting = servers.hcache(args, Path(other), 4096, 1, 0, "--no-store", "--draft-max",
                                  args.draft_max, *model)
        plain.name, drafting.name = "plain", "drafting"
        with plain, drafting:
            pairs = measure(args, plain, drafting)
    rows = []
    results = {"pairs": pairs, "bars": []}
    for kind in args.kinds:
        least = KINDS[kind]
        of_kind = [pair for pair in pairs if pair["kind"] == kind]
        ratios = [pair["tokens_per_s"] / pair["plain_tokens_per_s"] for pair in of_kind]
        accepted = sum(pair["accepted"] for pair in of_kind)
        drafted = sum(pair["drafted"] for pair in of_kind)
        met = lib.median(ratios) >= least
        results["bars"].append({"kind": kind, "median": lib.median(ratios),
                                "lower_bound": lib.lower_bound(ratios), "least": least, "pass": met})
        rows.append([kind, f"{lib.median([p['tokens_per_s'] for p in of_kind]):.1f}",
                     f"{lib.median([p['plain_tokens_per_s'] for p in of_kind]):.1f}",
                     f"{lib.median(ratios):.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}",
                     f"{accepted} of {drafted}", f">= {least}", "pass" if met else "MISSED"])
    print(lib.table(["text", "tokens/s", "without", "ratio", "all pairs", "came true", "bar", ""], rows))
    lib.write_results(args.json_file, results)
    if not args.quick and not all(bar["pass"] for bar in results["bars"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
