#!/usr/bin/env python3
"""Compares hcache with llama.cpp on the same model, prompt and threads.

Engine: llama-bench against `hcache bench throughput`, prompt and decode at several depths.
Brief: of that the longest prompt from nothing, and new tokens and decoding at the depth, for large models.
Short: the shortest prompt and decoding, from nothing: seconds that want many pairs.
Stream: one client's streamed answer from each server, tokens/s from its first token to its last.
Restart: llama-server saves a slot, erases it, restores it from disk and answers, against
`hcache bench restore`. Both take turns, repetition by repetition; what is printed are the medians
of the paired ratios and a bootstrap lower bound (95 %, one-sided).

llama.cpp's programs come from `make peer` (same source tree and compiler flags as ours).
"""

import argparse
import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import benchlib as lib
import servers


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    lib.add_common_options(parser)
    parser.add_argument("--what", default="engine,short,stream,restart",
                        help="engine, brief, short, stream, restart, or several of them")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--prompt", default="512,2048", help="prompt lengths")
    parser.add_argument("--gen", type=int, default=64, help="tokens to decode")
    parser.add_argument("--stream", type=int, default=160, help="stream: tokens of an answer")
    parser.add_argument("--depth", type=int, default=4096, help="the depth beside 0")
    parser.add_argument("--history", type=int, default=4096, help="restart: saved tokens")
    parser.add_argument("--new", type=int, default=50, help="restart: new tokens behind them")
    parser.add_argument("--text", type=Path, default=lib.ROOT / "demo/lighthouse.txt")
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--llama-server", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.reps, args.prompt, args.gen, args.depth, args.history = 1, "64", 8, 128, 256
        args.stream = 16
    args.model = args.model or lib.default_model()
    if not (args.llama_bench and args.llama_server):
        found = lib.peer_programs(args.device)
        args.llama_bench = args.llama_bench or found["llama-bench"]
        args.llama_server = args.llama_server or found["llama-server"]
    return args


# ---- Engine ------------------------------------------------------------------------------------

FLASH = {"0": "off", "1": "on", "auto": "auto"}


def llama_bench(args: argparse.Namespace, options: list[str], flash: str) -> dict:
    """{(prompt, gen, depth): tokens/s} of one repetition."""
    command = [str(args.llama_bench), "-m", args.model, "-t", str(args.threads), "-r", "1",
               "-fa", FLASH[flash], "-o", "json", *options]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return {(r["n_prompt"], r["n_gen"], r["n_depth"]): r["avg_ts"] for r in json.loads(out.stdout)}


def engine_plan(args: argparse.Namespace) -> list[tuple]:
    prompts = [int(p) for p in args.prompt.split(",")]
    return [(sorted({*prompts, args.depth}), 0), (sorted({*prompts, args.new}), args.depth)]


# What takes a second: many repetitions of it cost little, and few say little.
def short_plan(args: argparse.Namespace) -> list[tuple]:
    return [([min(int(p) for p in args.prompt.split(","))], 0)]


# Of the engine's, what models too large for all of it can do in minutes.
def brief_plan(args: argparse.Namespace) -> list[tuple]:
    return [([max(int(p) for p in args.prompt.split(","))], 0), ([args.new], args.depth)]


def engine(args: argparse.Namespace, plan: list[tuple]) -> list[dict]:
    """`plan`: (prompt lengths, depth); decoding goes with each."""
    hcache = lib.Hcache(args)
    runs = [lib.Paced(hcache, "throughput", "-m", args.model, "--text", args.text, "--prompt",
                      ",".join(map(str, lengths)), "--gen", args.gen, "--depth", depth,
                      "--capture", "off", "--reps", args.reps) for lengths, depth in plan]
    for run in runs:
        run.turn()  # warms up
    theirs: dict = {flash: {} for flash in FLASH}
    for rep in range(args.reps):
        lib.say(f"engine: repetition {rep + 1} of {args.reps}")
        for run, (lengths, depth) in zip(runs, plan, strict=True):
            flashes = list(FLASH) if depth > 0 else ["0", "1"]
            for flash in flashes:
                speeds = llama_bench(args, ["-p", ",".join(map(str, lengths)), "-n",
                                            str(args.gen), "-d", str(depth)], flash)
                for key, value in speeds.items():
                    theirs[flash].setdefault(key, []).append(value)
            run.turn()

    ours: dict = {}
    for run in runs:
        for row in run.results()["rows"]:
            ours[(row["prompt"], 0, row["depth"])] = row["prefill_samples"]
            ours[(0, args.gen, row["depth"])] = row["decode_samples"]
    rows = []
    for key in sorted(ours, key=lambda k: (k[2], k[0] == 0, k[0])):
        prompt, gen, depth = key
        name = f"{'prefill ' + str(prompt) if prompt else 'decode ' + str(gen)} at depth {depth}"
        best = max(("0", "1"), key=lambda flash: lib.median(theirs[flash][key]))
        row = lib.compare(name, ours[key], theirs[best][key])
        row.update(prompt=prompt, gen=gen, depth=depth, peer=f"-fa {best}")
        rows.append(row)
        if prompt == args.new and depth > 0:
            row = lib.compare(name, ours[key], theirs["auto"][key])
            row.update(prompt=prompt, gen=gen, depth=depth, peer="defaults")
            rows.append(row)
    return rows


# ---- Stream ------------------------------------------------------------------------------------


def streamed_speed(url: str, prompt: str, n: int) -> float:
    """Tokens/s between the first and the last token of an answer of n."""
    body = {"prompt": prompt, "n_predict": n, "ignore_eos": True, "seed": 1, "stream": True}
    request = urllib.request.Request(url + "/completion", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    times, predicted = [], 0
    with urllib.request.urlopen(request, timeout=600) as reply:
        for line in reply:
            if not line.startswith(b"data: "):
                continue
            times.append(time.perf_counter())
            predicted = json.loads(line[6:]).get("timings", {}).get("predicted_n", predicted)
    if predicted != n:
        raise RuntimeError(f"{url} answered {predicted} tokens, not {n}")
    # The last event says that it is the end; a token whose bytes are no text yet comes with the next.
    return (n - 1) / (times[-1] - times[0])


def stream(args: argparse.Namespace) -> list[dict]:
    lib.Hcache(args).measure_costs(args.model)
    context = args.stream + 256
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=args.work) as folder, \
            servers.llama_server(args, context, 1, 0) as theirs, \
            servers.hcache(args, Path(folder), context, 1, 0) as ours:
        for rep in range(args.reps + 1):
            lib.say(f"stream: repetition {rep} of {args.reps}")
            for server in (ours, theirs) if rep % 2 == 0 else (theirs, ours):
                speed = streamed_speed(server.url, f"{rep}. The lighthouse keeper counted the lamps and",
                                       args.stream)
                if rep > 0:  # the first one warms up
                    samples.setdefault(server.name, []).append(speed)
    row = lib.compare(f"stream {args.stream} tokens", samples["hcache"], samples["llama-server"])
    row.update(peer="llama-server", samples=samples)
    return [row]


# ---- Restart -----------------------------------------------------------------------------------


class Server:
    """llama-server with one slot that can be saved to a folder."""

    def __init__(self, args: argparse.Namespace, slots: Path):
        slots.mkdir(parents=True, exist_ok=True)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.slots = slots
        context = args.history + args.new + 256
        self.log = open(args.work / "llama-server.log", "w", encoding="utf-8")
        self.process = subprocess.Popen(
            [str(args.llama_server), "-m", args.model, "-t", str(args.threads), "-c", str(context),
             "-np", "1", "--host", "127.0.0.1", "--port", str(port), "--slot-save-path",
             str(slots) + "/"], stdout=self.log, stderr=subprocess.STDOUT)
        for _ in range(600):
            if self.process.poll() is not None:
                raise RuntimeError(f"llama-server ended; see {self.log.name}")
            try:
                self.call("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        raise RuntimeError("llama-server does not answer")

    def call(self, path: str, body: dict | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data,
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)

    def complete(self, tokens: list[int]) -> dict:
        return self.call("/completion", {"prompt": tokens, "n_predict": 1, "id_slot": 0,
                                         "cache_prompt": True, "temperature": 0})

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.log.close()


def restart(args: argparse.Namespace) -> list[dict]:
    server = Server(args, args.work / "slots")
    try:
        text = args.text.read_text(encoding="utf-8")
        tokens: list[int] = []
        while len(tokens) < args.history + args.new:
            tokens += server.call("/tokenize", {"content": text})["tokens"]
        tokens = tokens[:args.history + args.new]
        server.complete(tokens[:args.history])
        saved = server.call("/slots/0?action=save", {"filename": "slot.bin"})
        lib.say(f"llama-server saved {saved['n_saved']} tokens, {saved['n_written']} bytes")

        ours = lib.Paced(lib.Hcache(args), "restore", "-m", args.model, "--text", args.text,
                         "--history", args.history, "--new", args.new, "--save", "plan",
                         "--methods", "plan,resident", "--reps", args.reps)
        ours.turn()  # verifies
        slot_s = []
        for rep in range(args.reps + 1):
            server.call("/slots/0?action=erase", {})
            lib.drop_from_cache(server.slots / "slot.bin")
            begin = time.perf_counter()
            server.call("/slots/0?action=restore", {"filename": "slot.bin"})
            reply = server.complete(tokens)
            seconds = time.perf_counter() - begin
            if reply["timings"]["prompt_n"] > args.new + 64:
                raise RuntimeError("llama-server did not use the restored slot")
            if rep > 0:  # the first one warms up
                slot_s.append(seconds)
                lib.say(f"restart: repetition {rep} of {args.reps}")
                ours.turn()
        server.call("/slots/0?action=erase", {})
        begin = time.perf_counter()
        server.complete(tokens)
        recompute_s = time.perf_counter() - begin
    finally:
        server.close()

    results = ours.results()
    samples = {row["method"]: [ms / 1e3 for ms in row["ttft_samples_ms"]]
               for row in results["rows"]}
    rows = []
    for peer, theirs in (("llama-server slot", slot_s), ("resident", samples["resident"])):
        row = lib.compare(f"TTFT plan / {peer}", samples["plan"], theirs)
        # Smaller is better here: the bound that matters is the upper one.
        row["upper_bound"] = 1 / lib.lower_bound(
            [b / a for a, b in zip(samples["plan"], theirs, strict=True)])
        row.update(peer=peer, history=args.history, new=args.new,
                   schedule=results["store"]["schedule"])
        rows.append(row)
    rows.append({"name": "TTFT llama-server recompute", "theirs": recompute_s,
                 "ours": None, "ratio": None})
    return rows


def main() -> None:
    args = parse_args()
    hcache = lib.Hcache(args)
    machine = hcache.bench("throughput", "-m", args.model, "--prompt", 16, "--gen", 1, "--depth",
                           0, "--reps", 1)["machine"]
    results = {"machine": machine, "model": Path(args.model).name}
    measures = {"engine": lambda: engine(args, engine_plan(args)),
                "brief": lambda: engine(args, brief_plan(args)),
                "short": lambda: engine(args, short_plan(args)), "stream": lambda: stream(args)}
    for what, measure in measures.items():
        if what not in args.what.split(","):
            continue
        results[what] = measure()
        print(lib.table(["tokens/s", "peer", "hcache", "llama.cpp", "ratio", "at least"],
                        [[r["name"], r["peer"], f"{r['ours']:.1f}", f"{r['theirs']:.1f}",
                          f"{r['ratio']:.3f}", f"{r['lower_bound']:.3f}"]
                         for r in results[what]]), flush=True)
    if "restart" in args.what.split(","):
        results["restart"] = restart(args)
        print(lib.table(["seconds", "hcache", "other", "ratio", "at most"],
                        [[r["name"], f"{r['ours']:.3f}", f"{r['theirs']:.3f}",
                          f"{r['ratio']:.3f}", f"{r['upper_bound']:.3f}"]
                         if r["ratio"] else [r["name"], "-", f"{r['theirs']:.3f}", "-", "-"]
                         for r in results["restart"]]), flush=True)
    lib.write_results(args.json_file, results)


if __name__ == "__main__":
    main()
