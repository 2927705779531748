#!/usr/bin/env python3
"""Decodes with the weights on disk, many requests at a time, against what the disk could bring.

    bench/weights.py [--limit 1.5GiB]       eight layers of Llama-2-7B's shape in F16 (3.5 GiB)

Each step reads every streamed layer once, so a step takes at least their bytes over the disk's rate,
which is measured on the same file with as many reads of 1 MiB under way. With --limit the server
runs in a control group (version 1) of so much memory, page cache counted: needs to be root.
"""

import argparse
import json
import re
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import benchlib as lib
import servers

PROMPT_TOKENS = 16


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    lib.add_common_options(parser)
    parser.add_argument("--limit", help="memory of the server's control group, in GiB: 1.5")
    parser.add_argument("--batches", default="1,4,16,64", help="requests at a time")
    parser.add_argument("--tokens", type=int, default=8, help="of each answer")
    parser.add_argument("--reps", type=int, default=3)
    args = parser.parse_args(argv)
    args.batches = [int(n) for n in args.batches.split(",")]
    if args.quick:
        args.batches, args.tokens, args.reps = [1, 2], 3, 1
    return args


def make_model(args, hcache: lib.Hcache, shape: str | None = None, layers: int | None = None,
               kind: str = "f16") -> Path:
    """-m, or random weights in a published shape (default: Llama-2-7B's, eight layers)."""
    if args.model:
        return Path(args.model)
    shape = shape or (lib.QUICK_SHAPE if args.quick else "llama2-7b")
    layers = (4 if args.quick else 8) if layers is None else layers
    path = args.work / f"{shape}-{layers}-{kind}.gguf"
    if not path.exists():
        hcache.run("model", "synth", "--shape", shape, "--layers", layers, "--type", kind,
                   "--vocab-from", lib.default_model(), "-o", path)
    return path


def metric(server: servers.Server, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", server.text("/metrics"), re.MULTILINE)
    return float(found.group(1))


def complete(url: str, prompt: list, tokens: int) -> int:
    body = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "temperature": 0,
            "cache_prompt": False}
    request = urllib.request.Request(url + "/completion", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=3600) as reply:
        return json.load(reply)["tokens_predicted"]


def one_round(server: servers.Server, batch: int, tokens: int, seed: int) -> dict:
    prompts = [[(seed + 131 * i + 17 * k) % 20000 + 10 for k in range(PROMPT_TOKENS)]
               for i in range(batch)]
    names = ("hcache_weights_streamed_bytes", "hcache_weights_wait_seconds",
             'hcache_steps{restoring="no"}', 'hcache_step_seconds{restoring="no"}')
    before = [metric(server, name) for name in names]
    start = time.monotonic()
    with ThreadPoolExecutor(batch) as pool:
        made = sum(pool.map(lambda prompt: complete(server.url, prompt, tokens), prompts))
    seconds = time.monotonic() - start
    read, waited, steps, step_s = (metric(server, name) - was
                                   for name, was in zip(names, before, strict=True))
    return {"tokens": made, "seconds": seconds, "steps": steps, "step_s": step_s,
            "bytes_read": read, "wait_s": waited}


def main() -> None:
    args = parse()
    hcache = lib.Hcache(args)
    args.model = make_model(args, hcache)
    results = {"quick": args.quick, "model": args.model.name,
               "model_bytes": args.model.stat().st_size, "limit_gib": args.limit, "rows": []}
    options = ["-m", args.model, "-c", 1024 if args.quick else 64 * 32, "--parallel", 64,
               "--no-store", "--weights", "disk", "--device", args.device,
               "-t", args.threads]
    with tempfile.TemporaryDirectory(dir=args.work) as folder, \
            lib.memory_group(args.limit, args.model) as prefix:
        server = servers.Server("hcache", [*prefix, args.program, "serve", *options, "--state-dir",
                                           folder], args.work / "hcache.log")
        with server:
            props = json.loads(server.text("/props"))
            lib.say(props["weights"])
            results["weights"] = props["weights"]
            rates = []
            for rep in range(args.reps):
                rates.append(lib.disk_rate(args.model))
                for batch in args.batches:
                    row = one_round(server, batch, args.tokens, 1000 * rep + batch)
                    results["rows"].append({"batch": batch, "rep": rep, "disk_rate": rates[-1], **row})
    rate = lib.median(rates)
    shown = []
    for batch in args.batches:
        rows = [r for r in results["rows"] if r["batch"] == batch]
        tps = lib.median([r["tokens"] / r["seconds"] for r in rows])
        # What a step reads is read once however many requests it has.
        share = lib.median([r["bytes_read"] / r["step_s"] / r["disk_rate"] for r in rows])
        shown.append([batch, f"{tps:.2f}", f"{lib.median([r['step_s'] / r['steps'] for r in rows]):.2f}",
                      f"{share:.2f}"])
    results["disk_bytes_per_s"] = rate
    print(f"{results['weights']}; the disk brings {rate / 1e9:.2f} GB/s")
    print(lib.table(["requests", "tokens/s", "s/step", "of the disk's rate"], shown))
    lib.write_results(args.json_file or (args.work / "weights.json"), results)


if __name__ == "__main__":
    main()
