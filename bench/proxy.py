#!/usr/bin/env python3
"""What a turn costs on the server that holds the conversation's state, and on another one.

    bench/proxy.py                     histories of 512, 2,048 and 4,096 tokens, seven turns each
    bench/proxy.py --quick             tiny settings: proves the script, measures nothing

Two servers share a Redis on this machine, with HAProxy and packaging/haproxy/haproxy.cfg before them. A
conversation is begun on the first. Its next turn is asked there, where the state is resident; on the second
server, which has nothing of it and takes it from Redis; and on the second without the cache, which computes
everything. All must give the same answer. Times are to the first token, as the servers tell them. Then
turns with resident state go directly and through the proxy in turns, which shows what the proxy adds.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import benchlib as lib
import servers

CHAT = "/v1/chat/completions"
KEY = "X-HCache-Conversation"
SETTLE_S = 300
NEW = "\nSay in one sentence what this is about."


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    lib.add_common_options(parser)
    parser.add_argument("--history", default="512,2048,4096", help="tokens before the turn, about")
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--pairs", type=int, default=40, help="turns directly and through the proxy")
    args = parser.parse_args()
    args.history = [int(n) for n in args.history.split(",")]
    if args.quick:
        args.history, args.reps, args.pairs = [128], 1, 2
    if args.model is None:
        args.model = lib.default_model()
    return args


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(command: list, log: Path, ready, env: dict | None = None):
    """A process from when it is ready; killed at the end."""
    with open(log, "a", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **(env or {})})
    try:
        until(ready, f"{command[0]}, see {log}")
        yield
    finally:
        process.kill()
        process.wait()


def until(condition, what: str) -> None:
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if condition():
                return
        time.sleep(0.05)
    raise RuntimeError(f"waited in vain for {what}")


def asked(url: str, path: str, body: dict | None, headers: dict | None = None) -> tuple[dict, str]:
    """(answer, the server that the proxy names)"""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data,
                                     {"Content-Type": "application/json", **(headers or {})})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply), reply.headers.get("X-HCache-Server", "")


def settle(server: servers.Server) -> None:
    """Waits until all that was saved is in Redis."""
    seen = []

    def quiet() -> bool:
        seen.append(json.loads(server.text("/v1/store"))["tiers"]["remote"])
        return len(seen) > 8 and seen[-1] == seen[-8] and seen[-1]["backlog_requests"] == 0
    until(quiet, "what is written to Redis")


class Turns:
    """The same next turn of conversations, on servers in different states."""

    def __init__(self, args, first: servers.Server, second: servers.Server):
        self.first, self.second = first, second
        self.text = lib.Text()

    def turn(self, server, messages: list, **fields) -> dict:
        return server.post(CHAT, {"messages": messages, "max_tokens": 8, "temperature": 0, **fields}, 600)

    def measure(self, history: int) -> dict:
        messages = [{"role": "user", "content": self.text.take(history) + NEW}]
        begun = self.turn(self.first, messages)
        held = begun["usage"]["total_tokens"] - 1
        messages += [begun["choices"][0]["message"], {"role": "user", "content": "And in two words?"}]
        settle(self.first)
        # In this order: the turn itself makes a longer chunk of what Redis has of the conversation's end.
        found = {"elsewhere": self.turn(self.second, messages), "resident": self.turn(self.first, messages),
                 "computed": self.turn(self.second, messages, cache_prompt=False)}
        answers = {name: answer["choices"][0]["message"]["content"] for name, answer in found.items()}
        tokens = {name: answer["hcache"]["tokens"] for name, answer in found.items()}
        # The last token of the answer before is computed with the next turn wherever that is.
        restored = sum(tokens["elsewhere"][method] for method in ("hidden", "kv", "recomputed"))
        if min(tokens["resident"]["resident"], restored) < 0.95 * held:
            raise SystemExit(f"the state was not where it should be: {tokens}")
        # A server that did not write the reply tokenises its text, which may give other tokens.
        if restored < held:
            del answers["resident"]
        if len(set(answers.values())) != 1:
            raise SystemExit(f"answers differ: {answers}")
        return {"held": held, "tokens": tokens["elsewhere"],
                "remote_bytes": found["elsewhere"]["hcache"]["bytes"]["remote"],
                "schedule": found["elsewhere"]["hcache"]["schedule"],
                **{f"{name}_ms": answer["hcache"]["first_token_ms"] for name, answer in found.items()}}


def proxied(args, proxy: str, first: servers.Server) -> dict:
    """Milliseconds of the same resident turn, directly and through the proxy."""
    key = next(f"talk {n}" for n in range(1000)
               if asked(proxy, "/v1/models", None, {KEY: f"talk {n}"})[1] == "a")
    body = {"messages": [{"role": "user", "content": "What is a lighthouse?"}], "max_tokens": 1,
            "temperature": 0}
    asked(first.url, CHAT, body)
    times = {"direct": [], "proxied": []}
    for _ in range(args.pairs):
        for name, url in (("direct", first.url), ("proxied", proxy)):
            begin = time.perf_counter()
            answer, server = asked(url, CHAT, body, {KEY: key})
            times[name].append((time.perf_counter() - begin) * 1e3)
            if answer["hcache"]["tokens"]["resident"] == 0 or server not in ("", "a"):
                raise SystemExit(f"a turn was not resident, at server {server}")
    return times


def measure(args) -> tuple[list[dict], dict]:
    if not args.quick:
        lib.Hcache(args).measure_costs(args.model)
    redis, ports = free_port(), (free_port(), free_port())
    remote = ("--remote", f"redis://127.0.0.1:{redis}", "--remote-timeout", "5s", "--flush-interval", "100ms")
    with contextlib.ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.work, prefix="proxy-")))
                   for _ in range(3)]
        stack.enter_context(running(
            ["redis-server", "--bind", "127.0.0.1", "--port", str(redis), "--save", "", "--dir", folders[2]],
            args.work / "redis.log", lambda: socket.create_connection(("127.0.0.1", redis)).close() is None))
        first, second = (stack.enter_context(servers.hcache(args, folder, 32768, 4, 0, *remote))
                         for folder in folders[:2])
        listed = folders[2] / "servers.cfg"
        listed.write_text("backend hcache\n" + "".join(
            f"  server {name} {server.url.removeprefix('http://')}\n"
            for name, server in (("a", first), ("b", second))), encoding="utf-8")
        proxy = f"http://127.0.0.1:{ports[0]}"
        stack.enter_context(running(
            ["haproxy", "-db", "-f", lib.ROOT / "packaging/haproxy/haproxy.cfg", "-f", listed],
            args.work / "haproxy.log", lambda: asked(proxy, "/health", None)[1] != "",
            {"HCACHE_PROXY_BIND": f"127.0.0.1:{ports[0]}", "HCACHE_PROXY_METRICS": f"127.0.0.1:{ports[1]}"}))
        turns = Turns(args, first, second)
        rows = []
        for history in args.history:
            for _ in range(args.reps):
                rows.append({"history": history, **turns.measure(history)})
                lib.say(str(rows[-1]))
        return rows, proxied(args, proxy, first)


def main() -> None:
    args = parse()
    lib.Hcache(args)  # makes the folder
    rows, times = measure(args)
    table = []
    for history in args.history:
        of = [row for row in rows if row["history"] == history]
        cells = [f"{lib.median([row[name] for row in of]):.0f} ({max(row[name] for row in of):.0f})"
                 for name in ("resident_ms", "elsewhere_ms", "computed_ms")]
        table.append([str(history), str(int(lib.median([row["held"] for row in of]))), *cells,
                      f"{lib.median([row['remote_bytes'] for row in of]) / 2**20:.1f}"])
    print(lib.table(["history", "tokens held", "resident: ms (most)", "another server", "computed",
                     "MiB from Redis"], table))
    added = lib.median([b - a for a, b in zip(times["direct"], times["proxied"], strict=True)])
    print(f"a resident turn of one token: {lib.median(times['direct']):.1f} ms, through the proxy "
          f"{lib.median(times['proxied']):.1f} ms: {added:.1f} ms more, {args.pairs} pairs")
    lib.write_results(args.json_file or (args.work / "proxy.json"), {
        "quick": args.quick, "model": Path(args.model).name, "threads": args.threads, "rows": rows,
        "through_the_proxy_ms": times, "added_ms": added})


if __name__ == "__main__":
    main()
