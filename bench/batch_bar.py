#!/usr/bin/env python3
"""A batch on a model larger than memory: hcache batch against llama-server in the same memory.

    bench/batch_bar.py --limit 1.25       eight layers of Llama-2-7B's shape in F16; as root
    bench/batch_bar.py --device cuda:0 --weights host --device-memory 24GiB --shape llama-30b \\
        --layers 0 --type q8_0            most weights of Llama-30B's shape in host memory

The same requests (prompts of token ids, greedy, answers of an exact length) run

- on hcache with memory enough, everything resident: what computing takes, and the answers;
- on hcache with its weights on disk or in host memory, with --limit in a control group of so much memory,
  page cache counted; on the CPU the answers must be the same;
- on llama-server, in such a group too, with several -np; on other devices each with K and V there and in
  host memory (-nkvo), and as many layers (-ngl) as --device-memory has room for beside them. It gets one
  wave of requests for each, twice, with few tokens and with some more: their difference is the time of a
  token of all, and the time of the whole batch follows. One that the group's limit ends is reported as that.

The disk's bound: an answer of n tokens takes n passes over the layers, all requests together, at the rate
of direct reads of the same file.
"""

import argparse
import json
import math
import random
import re
import subprocess
import tempfile
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import benchlib as lib
import servers
import weights


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    lib.add_common_options(parser)
    parser.add_argument("--limit", help="memory of the control groups, in GiB: 1.25")
    parser.add_argument("--weights", default="disk", choices=("disk", "host"), help="of hcache's layers")
    parser.add_argument("--shape", help="of the random-weight model (default: llama2-7b)")
    parser.add_argument("--layers", type=int, help="its layers; 0: as published (default: 8)")
    parser.add_argument("--type", default="f16", help="type of its weights")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--parallel", type=int, default=64, help="hcache's sequences at a time")
    parser.add_argument("--step-tokens", type=int, default=512, help="of a step of hcache's")
    parser.add_argument("--graph-tokens", type=int, default=128, help="of one of its graphs (-b)")
    parser.add_argument("--buffer", type=int, default=512, help="tokens of a buffer of hcache's")
    parser.add_argument("--device-memory", default="952MiB", help="of both programs, where it is no CPU")
    parser.add_argument("--cache-memory", default="32MiB")
    parser.add_argument("--peer-slots", default="1,4,8,16", help="llama-server's -np")
    parser.add_argument("--peer-tokens", default="2,8", help="of the two waves")
    parser.add_argument("--peer-options", default="",
                        help='more of llama-server\'s: "--load-mode none -ub 2048"')
    parser.add_argument("--llama-server", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.requests, args.prompt, args.tokens, args.parallel = 4, 80, 6, 2
        args.buffer, args.device_memory, args.peer_slots, args.peer_tokens = 512, "0", "1,2", "2,4"
        args.step_tokens = 128
    args.peer_slots = [int(n) for n in args.peer_slots.split(",")]
    args.peer_tokens = [int(n) for n in args.peer_tokens.split(",")]
    if args.llama_server is None:
        args.llama_server = lib.peer_programs(args.device)["llama-server"]
    return args


def prompts(args) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(10, 20000) for _ in range(args.prompt)] for _ in range(args.requests)]


def run_batch(args, prefix: list, name: str, options: list) -> dict:
    """hcache's summary, with the answers by id and the command's peak memory where it is in a group."""
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        source, out = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        with open(source, "w", encoding="utf-8") as file:
            for i, prompt in enumerate(prompts(args)):
                body = {"model": "m", "prompt": prompt, "max_tokens": args.tokens, "temperature": 0,
                        "ignore_eos": True}
                file.write(json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions",
                                       "body": body}) + "\n")
        command = [*map(str, prefix), str(args.program), "batch", str(source), "-o", str(out), "-m",
                   str(args.model), "--device", args.device, "-t", str(args.threads), "--state-dir",
                   str(args.work / "batch-state"), "--no-store", "--json", *map(str, options)]
        lib.say("+ " + " ".join(command))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        (args.work / f"batch-{name}.log").write_text(done.stderr, encoding="utf-8")
        if done.returncode != 0:
            raise RuntimeError(f"hcache batch ended with {done.returncode}: {done.stderr[-2000:]}")
        summary = json.loads(done.stdout)
        answers = {}
        for line in out.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            answers[row["custom_id"]] = row["response"]["body"]["choices"][0]["text"]
    for path in ("input", "output"):
        summary.pop(path, None)
    summary["answers"] = answers
    summary["tokens_per_s"] = (summary["prompt_tokens"] + summary["reply_tokens"]) / summary["seconds"]
    lib.say(f"hcache, {name}: {summary['tokens_per_s']:.2f} tokens/s")
    return summary


def run_resident(args) -> dict:
    """With everything on the device; {"failed": why} where it has no room for that."""
    try:
        return run_batch(args, [], "resident", [
            "--engine", "ordinary", "--weights", "resident", "--parallel", args.requests, "-c",
            args.requests * (args.prompt + args.tokens + 64)])
    except RuntimeError as error:
        if args.device == "cpu":
            raise
        return {"failed": str(error)}


def in_group(args) -> dict:
    options = ["--engine", "hybrid", "--weights", args.weights, "--parallel", args.parallel, "--step-tokens",
               args.step_tokens, "-b", args.graph_tokens, "--buffer", args.buffer,
               "--cache-memory", args.cache_memory, "--device-memory", args.device_memory]
    with lib.memory_group(args.limit, args.model) as prefix:
        result = run_batch(args, prefix, "group", options)
        if prefix:
            result["peak_bytes"] = int((prefix[-1] / "memory.max_usage_in_bytes").read_text())
    return result


def wave(server: servers.Server, batch: list, tokens: int) -> float:
    start = time.monotonic()
    with ThreadPoolExecutor(len(batch)) as pool:
        made = list(pool.map(lambda prompt: weights.complete(server.url, prompt, tokens), batch))
    if made != [tokens] * len(batch):
        raise RuntimeError(f"llama-server answered {made} tokens")
    return time.monotonic() - start


def bytes_of(text: str) -> int:
    """Of a size as the program takes it: 24GiB."""
    number, unit = re.fullmatch(r"([\d.]+)\s*([KMGT]?)(?:iB|B)?", text).groups()
    return int(float(number) * 1024 ** " KMGT".index(unit or " "))


def placements(args) -> list[list]:
    """llama-server's options of where K and V lie: off the CPU on the device, and in host memory."""
    return [[]] if args.device == "cpu" else [[], ["-nkvo"]]


def gpu_layers(args, info: dict, cells: int, placement: list) -> list:
    """-ngl for as many layers as the device's memory has room for beside K and V of so many cells."""
    if args.device == "cpu":
        return []
    room = bytes_of(args.device_memory)
    if room == 0:
        return ["-ngl", 99]
    n_layers = info["n_layer"]
    weights_bytes = args.model.stat().st_size / n_layers
    kv_bytes = 0 if placement else info["kv_f16_bytes_per_token"] * cells / n_layers
    return ["-ngl", int(0.9 * room / (weights_bytes + kv_bytes))]  # the rest: buffers


def peer(args, info: dict, slots: int, placement: list) -> dict:
    """Seconds of the whole batch with -np slots, from two waves of one request a slot."""
    few, more = args.peer_tokens
    context = slots * (args.prompt + args.tokens + 16)
    options = ["-np", slots, *placement, *gpu_layers(args, info, context, placement)]
    result = {"options": " ".join(map(str, options))}
    with lib.memory_group(args.limit, args.model) as prefix:
        server = servers.Server("llama-server", [
            *prefix, args.llama_server, "-m", args.model, "-t", args.threads, "-c", context, *options,
            "--cache-ram", 0, *args.peer_options.split()], args.work / "llama-server.log")
        try:
            with server:
                batch = prompts(args)[:slots]
                few_s, more_s = (wave(server, batch, tokens) for tokens in (few, more))
        except (OSError, RuntimeError, urllib.error.URLError) as error:
            return result | {"failed": str(error)}
    token_s = max(0.0, more_s - few_s) / (more - few)
    seconds = math.ceil(args.requests / slots) * (few_s + token_s * (args.tokens - few))
    lib.say(f"llama-server: waves of {few_s:.1f} and {more_s:.1f} s, all in {seconds:.1f} s")
    return result | {"few_s": few_s, "more_s": more_s, "token_s": token_s, "seconds": seconds,
                     "tokens_per_s": args.requests * (args.prompt + args.tokens) / seconds}


def bounds_of(args, resident: dict, ours: dict, rate: float | None) -> dict:
    """Tokens/s that computing, and the disk where weights come from there, allow."""
    bounds = {"compute": resident["tokens_per_s"]} if "tokens_per_s" in resident else {}
    if rate:
        pass_s = ours["engine"]["streamed_bytes"] / rate
        bounds["disk"] = args.requests * (args.prompt + args.tokens) / (args.tokens * pass_s)
    return bounds


def main() -> None:
    args = parse()
    hcache = lib.Hcache(args)
    args.model = weights.make_model(args, hcache, args.shape, args.layers, args.type)
    info = json.loads(hcache.run("model", "info", args.model, "--json"))
    rate = lib.disk_rate(args.model) if args.weights == "disk" else None
    resident = run_resident(args)
    ours = in_group(args)
    expected = resident.pop("answers", {})
    same = sum(text == expected.get(name) for name, text in ours.pop("answers").items())
    if same != args.requests and args.device == "cpu":
        raise RuntimeError(f"{args.requests - same} of {args.requests} answers are not the resident run's")
    results = {"quick": args.quick, "model": args.model.name, "model_bytes": args.model.stat().st_size,
               "device": args.device, "weights": args.weights, "limit_gib": args.limit,
               "device_memory": args.device_memory, "peer_options": args.peer_options,
               "disk_bytes_per_s": rate, "bounds": bounds_of(args, resident, ours, rate),
               "resident": resident, "hcache": ours, "same_answers": same if expected else None}
    compare(args, info, results)


def compare(args, info: dict, results: dict) -> None:
    """Runs llama-server each way; what is known is written after each, and told at the end."""
    ours, bounds = results["hcache"], results["bounds"]
    results["of_bound"] = ours["tokens_per_s"] / min(bounds.values()) if bounds else None
    results["peers"] = []
    for slots in args.peer_slots:
        for placement in placements(args):
            results["peers"].append(peer(args, info, slots, placement))
            best = max((p["tokens_per_s"] for p in results["peers"] if "seconds" in p), default=None)
            results["ratio"] = ours["tokens_per_s"] / best if best else None
            lib.write_results(args.json_file or (args.work / "batch_bar.json"), results)
    rate = results["disk_bytes_per_s"]
    print((f"the disk brings {rate / 1e9:.2f} GB/s; " if rate else "") + "bounds: "
          + ", ".join(f"{name} {bound:.1f} tokens/s" for name, bound in bounds.items())
          + f"; peak memory {ours.get('peak_bytes', 0) / 2**20:.0f} MiB")
    rows = [[f"llama-server {p['options']}",
             f"{p['tokens_per_s']:.2f}" if "seconds" in p else p["failed"]] for p in results["peers"]]
    print(lib.table(["", "tokens/s"], [["hcache batch", f"{ours['tokens_per_s']:.2f}"], *rows]))
    print(f"{results['ratio'] or 0:.2f} times llama-server, "
          f"{results['of_bound'] or 0:.2f} of the lower bound")


if __name__ == "__main__":
    main()
