#!/usr/bin/env python3
"""`hcache bench serve` against a server made of scraps: odd pieces, errors, silence, hang-ups.

bench_serve_test.py PROGRAM. Plain unittest; nothing here depends on the machine's speed: where time
matters, the server waits, and the test asserts that the wait is seen.
"""

import http.server
import itertools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

PROGRAM = sys.argv[1]
PATIENCE = 120  # seconds until something hangs rather than works


class FakeServer(http.server.ThreadingHTTPServer):
    """Answers every chat request with `behave(handler, body, n)`, n counting from 0."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave = lambda handler, body, n: handler.stream(reply_to(body), body)
        self.seen = []  # (headers, body)
        self.lock = threading.Condition()
        self.over = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def wait_for(self, requests):
        with self.lock:
            return self.lock.wait_for(lambda: len(self.seen) >= requests, PATIENCE)

    def handle_error(self, request, client_address):
        pass  # clients that are stopped leave broken pipes behind

    def close(self):
        self.over.set()
        self.shutdown()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        models = {"/v1/models": {"object": "list", "data": [{"id": "fake-7b"}, {"id": "other"}]}}
        self.answer_json(200 if self.path in models else 404, models.get(self.path, {}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions", self.path
        with self.server.lock:
            number = len(self.server.seen)
            self.server.seen.append((dict(self.headers), body))
            self.server.lock.notify_all()
        self.server.behave(self, body, number)

    def answer_json(self, status, value, headers=()):
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers:
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def begin(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def piece(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def event(self, value):
        self.piece(b"data: %s\n\n" % json.dumps(value).encode())

    def content(self, text):
        self.event({"choices": [{"index": 0, "delta": {"content": text}}]})

    def stream(self, text, body, cuts=(10_000,), eol="\n"):
        """The whole answer, three characters to an event, cut into pieces of `cuts` bytes."""
        events = [{"choices": [{"delta": {"role": "assistant", "content": None},
                                "finish_reason": None}]}]
        events += [{"choices": [{"delta": {"content": text[i:i + 3]}, "finish_reason": None}]}
                   for i in range(0, len(text), 3)]
        events += [{"choices": [{"delta": {}, "finish_reason": "stop"}]},
                   {"choices": [], "usage": usage_of(text, body)}]
        data = "".join(f": ping{eol}data: {json.dumps(e, ensure_ascii=False)}{eol}{eol}"
                       for e in events)
        data = (data + f"data: [DONE]{eol}{eol}").encode()
        self.begin()
        for size in itertools.cycle(cuts):
            if not data:
                break
            self.piece(data[:size])
            data = data[size:]
        self.piece(b"")


def reply_to(body):
    """Depends on all that was said, and holds what could get lost on the way."""
    said = sum(len(m["content"]) for m in body["messages"])
    return f'Reply {said}: "äöü" – €, 𝄞\\ \t\n\n{body["messages"][-1]["content"][:15]}… '


def usage_of(text, body):
    words = [len(m["content"].split()) for m in body["messages"]]
    return {"prompt_tokens": sum(words), "completion_tokens": len(text) // 3,
            "prompt_tokens_details": {"cached_tokens": sum(words[:-1])}}


class BenchServe(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="hcache-load-")
        self.addCleanup(self.folder.cleanup)
        self.server = FakeServer()
        self.addCleanup(self.server.close)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def command(self, *args, url=None):
        return [PROGRAM, "bench", "serve", "--url", url or self.server.url,
                "--json", self.path("out.json"), *args]

    def run_load(self, *args, code=0, url=None):
        """Exit code as expected; the JSON, or what was said where there is none."""
        done = subprocess.run(self.command(*args, url=url), capture_output=True, text=True,
                              timeout=PATIENCE)
        self.assertEqual(done.returncode, code, f"{args}\n{done.stdout}\n{done.stderr}")
        if not os.path.exists(self.path("out.json")):
            return done.stderr
        self.printed = done.stdout
        return json.loads(pathlib.Path(self.path("out.json")).read_text(encoding="utf-8"))

    FAST = ["--rate", "1e6", "--think", "0", "--context", "300"]

    def fast(self, *args, sessions=4, rounds=3, **kwargs):
        """A load without waiting."""
        return self.run_load(*self.FAST, "--sessions", str(sessions), "--rounds", str(rounds),
                             *args, **kwargs)

    def plan(self, *args):
        """The rounds of every session, as they are going to be."""
        out = self.run_load("--dry-run", *args)
        return [session["rounds"] for session in out["sessions"]]

    def conversations(self):
        """What the server was told, by session: requests in their order."""
        found = {}
        for _, body in self.server.seen:
            found.setdefault(body["messages"][0]["content"], []).append(body)
        return found

    # ---- conversations ----

    def test_conversations_grow_by_the_very_replies(self):
        out = self.fast("--extra", '{"cache_salt": "x", "temperature": 0.5}')
        self.assertIn("TTFT, returning", self.printed)
        self.assertIn("12 answered", self.printed)
        plan = self.plan(*self.FAST, "--sessions", "4", "--rounds", "3")
        sessions = self.conversations()
        self.assertEqual([len(s) for s in sessions.values()], [3] * 4)
        for requests in sessions.values():
            expected = []
            for body in requests:
                self.assertEqual(body["messages"][:-1], expected)
                self.assertEqual(body["messages"][-1]["role"], "user")
                self.assertEqual(body["model"], "fake-7b")
                self.assertEqual(body["cache_salt"], "x")
                self.assertEqual(body["temperature"], 0.5)
                self.assertEqual(body["stream"], True)
                self.assertEqual(body["stream_options"], {"include_usage": True})
                self.assertNotIn("ignore_eos", body)
                expected = body["messages"] + [{"role": "assistant", "content": reply_to(body)}]
        summary = out["summary"]
        self.assertEqual((summary["requests"], summary["ok"], summary["failed"]), (12, 12, 0))
        self.assertEqual(summary["errors"], {})
        self.assertEqual(summary["ttft_ms"]["first"]["n"], 4)
        self.assertEqual(summary["ttft_ms"]["returning"]["n"], 8)
        self.assertEqual(summary["cached_share"]["first"], 0)
        self.assertGreater(summary["cached_share"]["returning"], 0.1)
        self.assertEqual({(r["session"], r["round"]) for r in out["requests"]},
                         {(s, r) for s in range(4) for r in range(3)})
        for row in out["requests"]:
            body = sessions[plan[row["session"]][0]["text"]][row["round"]]
            self.assertEqual(row["max_tokens"], body["max_tokens"])
            usage = usage_of(reply_to(body), body)
            self.assertEqual(row["completion_tokens"], usage["completion_tokens"])
            self.assertEqual(row["prompt_tokens"], usage["prompt_tokens"])
            self.assertEqual(row["cached_tokens"],
                             usage["prompt_tokens_details"]["cached_tokens"])
            self.assertEqual(row["finish_reason"], "stop")
            self.assertEqual(row["returning"], row["round"] > 0)
            self.assertIsNone(row["error"])
        self.assertEqual(out["settings"]["seed"], 1)

    def test_pieces_of_any_size(self):
        expected = {}
        for n, (cuts, eol) in enumerate([((10_000,), "\n"), ((1,), "\r\n"), ((1, 2, 3, 5), "\n"),
                                         ((7, 40, 1), "\r"), ((64, 3), "\r\n")]):
            self.server.behave = lambda h, body, _, c=cuts, e=eol: h.stream(reply_to(body), body,
                                                                            cuts=c, eol=e)
            answers = self.path(f"answers{n}")
            out = self.fast("--answers", answers, sessions=2)
            self.assertEqual(out["summary"]["ok"], 6, (cuts, eol))
            text = pathlib.Path(answers).read_text(encoding="utf-8")
            expected = expected or text
            self.assertEqual(text, expected, (cuts, eol))
        lines = [json.loads(line) for line in expected.splitlines()]
        self.assertEqual([(a["session"], a["round"]) for a in lines],
                         [(s, r) for s in range(2) for r in range(3)])
        sent = {reply_to(body) for _, body in self.server.seen}
        self.assertEqual({a["text"] for a in lines}, sent)

    def test_exact_length_and_key(self):
        out = self.fast("--exact-length", "--api-key", "sesame", "--model", "mine",
                        url=self.server.url + "/v1/")
        for headers, body in self.server.seen:
            self.assertEqual(headers["Authorization"], "Bearer sesame")
            self.assertIs(body["ignore_eos"], True)
            self.assertEqual(body["model"], "mine")
            self.assertEqual(body["temperature"], 0)
        self.assertNotIn("sesame", json.dumps(out))

    def test_a_fixed_number_of_clients(self):
        """Three at a time: the first three wait for each other, and never are there four."""
        together = threading.Barrier(3)
        active = 0
        most = 0

        def behave(handler, body, n):
            nonlocal active, most
            with self.server.lock:
                active += 1
                most = max(most, active)
            if n < 3:
                together.wait(PATIENCE)
            text = reply_to(body)
            with self.server.lock:
                active -= 1
            handler.stream(text, body)

        self.server.behave = behave
        out = self.run_load("--sessions", "7", "--rounds", "2", "--rate", "1e-6", "--think", "1h",
                            "--concurrency", "3", "--context", "300")
        self.assertEqual(out["summary"]["ok"], 14)
        self.assertEqual(most, 3)

    def test_a_pause_between_rounds(self):
        """All conversations come to rest after the same round, and go on when they are told to."""
        for clients in (["--think", "50ms"], ["--concurrency", "3"]):
            before = len(self.server.seen)
            load = subprocess.Popen(self.command("--sessions", "5", "--rounds", "3", "--rate", "1e6",
                                                 "--pause-after", "2", *clients),
                                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.addCleanup(load.kill)
            self.assertEqual(load.stdout.readline(), "ready\n")
            asked = [len(body["messages"]) for _, body in self.server.seen[before:]]
            self.assertEqual(sorted(asked), [1] * 5 + [3] * 5)
            load.communicate("\n", timeout=PATIENCE)
            self.assertEqual(load.returncode, 0)
            out = json.loads(pathlib.Path(self.path("out.json")).read_text(encoding="utf-8"))
            self.assertEqual(out["summary"]["ok"], 15, clients)
            self.assertEqual(out["settings"]["pause_after"], 2)
            asked = [len(body["messages"]) for _, body in self.server.seen[before:]]
            self.assertEqual(asked[10:], [5] * 5)

    def test_warm_up_is_not_counted(self):
        out = self.fast("--warmup", "2", sessions=3, rounds=2)
        self.assertEqual(len(self.server.seen), 10)
        self.assertEqual(out["summary"]["requests"], 6)
        self.assertEqual(sum(r["warmup"] for r in out["requests"]), 4)

    # ---- time ----

    def test_delays_are_seen(self):
        """The server's pauses are a lower bound of what the client measures."""
        def behave(handler, body, n):
            time.sleep(0.2)
            handler.begin()
            for _ in range(5):
                handler.content("word ")
                time.sleep(0.05)
            handler.event({"choices": [{"delta": {}, "finish_reason": "length"}]})
            handler.piece(b"data: [DONE]\n\n")  # and nothing behind it: no end of the transfer
            self.server.over.wait(PATIENCE)

        self.server.behave = behave
        out = self.fast(sessions=2, rounds=2)
        self.assertEqual(out["summary"]["ok"], 4)
        for row in out["requests"]:
            self.assertGreaterEqual(row["ttft_ms"], 200)
            self.assertGreaterEqual(row["total_ms"], 450)
            # The gaps add up to what lies between the first token and the last.
            self.assertEqual(row["tbt_ms"]["n"], 4)
            self.assertGreaterEqual(row["ttft_ms"] + 4 * row["tpot_ms"], 400)
            self.assertAlmostEqual(row["tbt_ms"]["mean"], row["tpot_ms"], places=3)
            self.assertEqual(row["completion_tokens"], 5)  # counted: there is no usage
            self.assertIsNone(row["prompt_tokens"])
            self.assertEqual(row["finish_reason"], "length")
        self.assertGreaterEqual(out["summary"]["ttft_ms"]["all"]["p50"], 200)
        # A second round starts when the first has been answered.
        self.assertGreaterEqual(out["summary"]["duration_s"], 0.9)

    def test_thinking_takes_its_time(self):
        out = self.run_load("--sessions", "2", "--rounds", "2", "--rate", "1e6", "--think", "300ms")
        ends = {r["session"]: r["start_s"] + r["total_ms"] / 1e3
                for r in out["requests"] if r["round"] == 0}
        for row in out["requests"]:
            if row["round"] == 1:
                self.assertGreaterEqual(row["start_s"], ends[row["session"]] + 0.3)

    def test_a_timeout(self):
        self.server.behave = lambda h, body, n: self.server.over.wait(PATIENCE)
        out = self.fast("--timeout", "200ms", code=7, sessions=2)
        self.assertEqual(out["summary"]["errors"], {"timeout": 2})
        self.assertEqual(out["summary"]["not_sent"], 4)
        for row in out["requests"]:
            self.assertGreaterEqual(row["total_ms"], 190)

    def test_an_interrupt_reports_what_there_is(self):
        def behave(handler, body, n):
            if len(body["messages"]) == 1:
                return handler.stream(reply_to(body), body)
            handler.begin()
            handler.content("and then")
            self.server.over.wait(PATIENCE)

        self.server.behave = behave
        load = subprocess.Popen(self.command("--sessions", "3", "--rounds", "2", "--rate", "1e6",
                                             "--think", "0", "--answers", self.path("answers")),
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(load.stdout.close)
        self.addCleanup(load.stderr.close)
        self.addCleanup(load.kill)
        self.assertTrue(self.server.wait_for(6))
        load.send_signal(signal.SIGINT)
        self.assertEqual(load.wait(timeout=PATIENCE), 130)
        out = json.loads(pathlib.Path(self.path("out.json")).read_text(encoding="utf-8"))
        self.assertEqual(out["summary"]["ok"], 3)
        self.assertEqual(out["summary"]["interrupted"], 3)
        self.assertEqual(out["summary"]["failed"], 0)
        self.assertEqual([r["error"] for r in out["requests"]], [None] * 3 + ["interrupted"] * 3)
        answers = pathlib.Path(self.path("answers")).read_text(encoding="utf-8")
        self.assertEqual(len(answers.splitlines()), 3)

    # ---- what goes wrong ----

    def test_errors_by_kind(self):
        def broken(handler, *pieces):
            handler.begin()
            for data in pieces:
                handler.piece(data)

        word = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
        cases = {
            "http-500": lambda h: h.answer_json(500, {"error": {"message": "the disk is on fire"}}),
            "http-400": lambda h: h.answer_json(400, {"error": "context too long"}),
            "disconnect": lambda h: broken(h, word),
            "truncated": lambda h: broken(h, word, b""),
            "server": lambda h: broken(h, word, b'data: {"error":{"message":"no room"}}\n\n'),
            "malformed": lambda h: h.wfile.write(b"SMTP ready\r\n\r\n"),
        }
        messages = {"http-500": "the disk is on fire", "http-400": "context too long",
                    "server": "no room"}
        for kind, act in cases.items():
            def behave(handler, body, n, act=act):
                act(handler)
                handler.close_connection = True

            self.server.behave = behave
            out = self.fast(code=7, sessions=2)
            self.assertEqual(out["summary"]["errors"], {kind: 2})
            self.assertEqual(out["summary"]["ok"], 0)
            self.assertEqual(out["summary"]["not_sent"], 4)
            for row in out["requests"]:
                self.assertEqual(row["error"], kind)
                self.assertIn(messages.get(kind, ""), row["message"])
                self.assertGreater(len(row["message"]), 5)

    def test_one_failure_ends_one_conversation(self):
        def behave(handler, body, n):
            if n == 0:
                handler.answer_json(503, {})
            else:
                handler.stream(reply_to(body), body)

        self.server.behave = behave
        out = self.fast()
        self.assertEqual(out["summary"]["errors"], {"http-503": 1})
        self.assertEqual(out["summary"]["ok"], 9)
        self.assertEqual(out["summary"]["not_sent"], 2)

    def test_too_many_requests(self):
        """Every request is refused twice, then answered."""
        tries = {}

        def behave(handler, body, n):
            key = json.dumps(body["messages"])
            with self.server.lock:
                tries[key] = tries.get(key, 0) + 1
                refuse = tries[key] <= 2
            if refuse:
                return handler.answer_json(429, {"error": {"message": "busy"}},
                                           [("Retry-After", "0")])
            handler.stream(reply_to(body), body)

        self.server.behave = behave
        out = self.fast(code=7)
        self.assertEqual(out["summary"]["errors"], {"http-429": 4})
        tries.clear()
        out = self.fast("--retry", "1", code=7)
        self.assertEqual(out["summary"]["retries"], 4)
        tries.clear()
        out = self.fast("--retry", "2")
        self.assertEqual(out["summary"]["ok"], 12)
        self.assertEqual(out["summary"]["retries"], 24)
        self.assertEqual({r["retries"] for r in out["requests"]}, {2})

    def test_retry_after_is_honoured(self):
        def behave(handler, body, n):
            if n == 0:
                return handler.answer_json(429, {}, [("Retry-After", "1")])
            handler.stream(reply_to(body), body)

        self.server.behave = behave
        out = self.fast("--retry", "1", sessions=1, rounds=1)
        self.assertGreaterEqual(out["requests"][0]["ttft_ms"], 1000)

    def test_no_server(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"
            self.assertIn("connect", self.fast(code=7, url=nobody))
            out = self.fast("--model", "x", code=7, url=nobody)
        self.assertEqual(out["summary"]["errors"], {"connect": 4})

    def test_bad_input(self):
        self.assertIn("plain http", self.run_load(code=8, url="https://127.0.0.1:1"))
        for url in ("127.0.0.1:80", "http://", "http://x:y", "http://u@x:80", "http://x:99999"):
            self.assertIn("http://HOST:PORT", self.run_load(code=2, url=url))
        self.assertIn("--extra", self.run_load("--extra", "[]", code=2))
        self.assertIn("--sessions", self.run_load("--sessions", "0", code=2))
        self.run_load("--trace", self.path("none"), code=3)
        self.run_load("--rate", "0", code=2)
        done = subprocess.run([PROGRAM, "bench", "serve"], capture_output=True, text=True,
                              timeout=PATIENCE)
        self.assertEqual(done.returncode, 2)
        self.assertIn("--url", done.stderr)
        self.assertEqual(self.server.seen, [])

    # ---- the schedule ----

    def test_the_same_seed_gives_the_same_load(self):
        one = self.plan("--seed", "5", "--sessions", "6")
        self.assertEqual(self.plan("--seed", "5", "--sessions", "6"), one)
        self.assertNotEqual(self.plan("--seed", "6", "--sessions", "6"), one)
        # More of it begins like less of it.
        self.assertEqual(self.plan("--seed", "5", "--sessions", "9")[:6], one)
        self.assertEqual(self.server.seen, [])

    def test_what_is_sent_is_the_schedule(self):
        plan = self.plan(*self.FAST, "--sessions", "4", "--rounds", "3")
        self.fast()
        sent = self.conversations()
        for rounds in plan:
            requests = sent[rounds[0]["text"]]
            said = [m["content"] for m in requests[-1]["messages"] if m["role"] == "user"]
            self.assertEqual(said, [r["text"] for r in rounds])
            self.assertEqual([b["max_tokens"] for b in requests],
                             [r["output_tokens"] for r in rounds])

    def test_a_trace_is_replayed(self):
        trace = self.path("trace.jsonl")
        rows = [{"timestamp": 0, "input_length": 1100, "output_length": 7, "hash_ids": [1, 2, 3]},
                {"timestamp": 9, "input_length": 1400, "output_length": 8, "hash_ids": [1, 2, 4]},
                {"timestamp": 9, "input_length": 90000, "output_length": 8,
                 "hash_ids": list(range(10, 186))},
                {"timestamp": 20, "input_length": 30, "output_length": 9, "hash_ids": [500]}]
        pathlib.Path(trace).write_text("".join(json.dumps(r) + "\n" for r in rows),
                                       encoding="utf-8")
        out = self.run_load("--trace", trace, "--context", "8000", "--text", __file__)
        self.assertEqual(out["summary"]["ok"], 3)
        self.assertEqual(out["settings"]["left_out"], 1)
        self.assertEqual([r["returning"] for r in sorted(out["requests"],
                                                         key=lambda r: r["session"])],
                         [False, True, False])
        by_limit = {b["max_tokens"]: b["messages"][0]["content"] for _, b in self.server.seen}
        shared = len(os.path.commonprefix([by_limit[7], by_limit[8]]))
        # Two blocks of 512 tokens of 4.3 bytes, but for a word at their ends.
        self.assertGreater(shared, 2 * 512 * 4)
        self.assertLess(shared, len(by_limit[7]))
        self.assertLess(len(os.path.commonprefix([by_limit[7], by_limit[9]])), 100)

        table = self.path("trace.csv")
        pathlib.Path(table).write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n"
                                       "2023-11-16 18:15:46.6805900,374,44\n"
                                       "2023-11-16 18:15:46.9951690,39,10\n", encoding="utf-8")
        out = self.run_load("--trace", table, "--time-scale", "0.01", "--sessions", "1")
        self.assertEqual([r["max_tokens"] for r in out["requests"]], [44])

        pathlib.Path(table).write_text("TIMESTAMP,x\n1,2,3\n", encoding="utf-8")
        os.remove(self.path("out.json"))
        self.assertIn("line 2", self.run_load("--trace", table, code=2))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
