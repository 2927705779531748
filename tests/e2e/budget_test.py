#!/usr/bin/env python3
"""Conversations with a KV budget, on the real default model.

    budget_test.py HCACHE [-v] [name]

Whether a restore takes the rows of the budget is the planner's choice, by the machine's speed; what
they are and what is computed behind them serving_kept_test tests.
"""

import json
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request

from serving import TEXT, Server, default_model, lend_profiles

PROGRAM = sys.argv.pop(1)
MODEL = default_model()


def start(folder: str, *options: str) -> Server:
    return Server(PROGRAM, "-m", MODEL, "--device", "cpu", "--state-dir", folder, "-t", "2", "-c",
                  "4096", *options)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def refused(*options: str) -> subprocess.CompletedProcess:
    return subprocess.run([PROGRAM, "serve", "-m", MODEL, "--device", "cpu", "--port", "0", *options],
                          text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, timeout=120)


class Budgets(unittest.TestCase):
    def test_nobody_asks_for_one_unless_the_server_says_so(self):
        with tempfile.TemporaryDirectory() as folder, start(folder) as server:
            status, answer, _ = server.call("POST", "/v1/chat/completions", {
                "messages": [user("Hi.")], "max_tokens": 2, "kv_budget": 0.5})
            self.assertEqual(status, 400)
            self.assertIn("--kv-budget 1", answer["error"]["message"])
            self.assertEqual(server.chat([user("Hi.")], max_tokens=2, kv_budget=1)["hcache"]
                             ["kept_rows"], 0)
            status, answer, _ = server.call("POST", "/v1/chat/completions", {
                "messages": [user("Hi.")], "max_tokens": 2, "kv_budget": 0})
            self.assertEqual(status, 400)
            self.assertIn("kv_budget", answer["error"]["message"])

    def test_a_conversation_is_apart_from_exact_ones_and_survives_a_kill(self):
        question = [user(TEXT[:1500] + "\nWhat is this about?")]
        with tempfile.TemporaryDirectory() as folder:
            with start(folder, "--kv-budget", "1") as server:
                exact = server.chat(question, max_tokens=20)
                kept = server.chat(question, max_tokens=20, kv_budget=0.5)
                self.assertEqual(kept["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
                # Nothing was left out yet.
                reply = exact["choices"][0]["message"]
                self.assertEqual(kept["choices"][0]["message"], reply)
                # Rows are chosen while nothing runs.
                end = time.monotonic() + 300
                while server.call("GET", "/v1/store")[1]["snapshots"]["count"] == 0:
                    self.assertLess(time.monotonic(), end)
                    time.sleep(0.1)
                server.kill()
            stat = json.loads(subprocess.run([PROGRAM, "store", "stat", "--state-dir", folder, "--json"],
                                             check=True, text=True, stdout=subprocess.PIPE).stdout)
            self.assertEqual(stat["snapshots"], 1)
            # Half of F16's K and V of 30 layers with three heads, and a score in F16 for each row and
            # head, but for the tokens behind the last whole chunk.
            tokens = kept["usage"]["total_tokens"] // 64 * 64
            self.assertAlmostEqual(stat["snapshot_bytes"] / (tokens * 30 * (768 / 2 + 3 * 2)), 1,
                                   delta=0.01)
            again = [*question, reply, user("Say it in one word.")]
            with start(folder, "--kv-budget", "0.5") as server:
                answer = server.chat(again, max_tokens=10)
                told = answer["hcache"]
                if told["kept_rows"] > 0:
                    self.assertAlmostEqual(told["kept_rows"], tokens // 2, delta=1)
                    self.assertIn(f"({told['kept_rows']} of {tokens} rows)", told["schedule"])
                    self.assertLess(told["bytes"]["disk"] + told["bytes"]["dram"],
                                    1.1 * stat["snapshot_bytes"])
                exact = server.chat(again, max_tokens=10, kv_budget=1)
                self.assertEqual(exact["hcache"]["kept_rows"], 0)
                self.assertEqual(server.stop(), 0)
            with tempfile.TemporaryDirectory() as other:
                lend_profiles(other)
                with start(other) as server:
                    self.assertEqual(server.chat(again, max_tokens=10)["choices"], exact["choices"])

    def test_session_files_know_their_budget(self):
        question = [user(TEXT[:1500] + "\nWhat is this about?")]
        with tempfile.TemporaryDirectory() as folder, start(folder, "--kv-budget", "0.5") as server:
            answer = server.chat(question, max_tokens=8, session_id="talk")
            with urllib.request.urlopen(server.url + "/v1/sessions/talk/export") as reply:
                file = reply.read()
            self.assertEqual(server.stop(), 0)
        again = [*question, answer["choices"][0]["message"], user("Go on.")]
        for budget, fits in (("0.5", True), ("0.25", False), ("1", False)):
            with tempfile.TemporaryDirectory() as folder, start(folder, "--kv-budget", budget) as server:
                upload = urllib.request.Request(server.url + "/v1/sessions/import", file, method="POST")
                if fits:
                    with urllib.request.urlopen(upload) as reply:
                        self.assertEqual(json.load(reply)["id"], "talk")
                    # Pages of all rows and of the kept ones.
                    stat = server.call("GET", "/v1/store")[1]
                    self.assertGreater(stat["page_bytes"], 0.9 * len(file))
                else:
                    with self.assertRaises(urllib.error.HTTPError) as refusal:
                        urllib.request.urlopen(upload)
                    self.assertEqual(refusal.exception.code, 409)
                    self.assertIn("--kv-budget", refusal.exception.read().decode())
                server.chat(again, max_tokens=2)
                self.assertEqual(server.stop(), 0)

    def test_what_it_can_not_be_had_with_is_named(self):
        done = refused("--kv-budget", "0")
        self.assertEqual(done.returncode, 2)
        self.assertIn("--kv-budget", done.stderr)
        with tempfile.TemporaryDirectory() as folder:
            lend_profiles(folder)
            for options, why in ((["--context-overflow", "truncate"], "--kv-budget"),
                                 (["--engine", "llama"], "--kv-budget"),
                                 (["--kv-type", "q8_0"], "--kv-type f16")):
                done = refused("--state-dir", folder, "--kv-budget", "0.5", *options)
                self.assertEqual(done.returncode, 8, done.stderr)
                self.assertIn(why, done.stderr)

    def test_a_session_of_the_command_line_has_one_budget(self):
        with tempfile.TemporaryDirectory() as folder:
            lend_profiles(folder)

            def run(*options: str, session: str = "talk") -> subprocess.CompletedProcess:
                return subprocess.run([PROGRAM, "run", "-m", MODEL, "--device", "cpu", "--state-dir",
                                       folder, "--session", session, "-n", "4", "--temp", "0", "-t", "2",
                                       *options], text=True, capture_output=True, timeout=300)

            self.assertEqual(run("-p", TEXT[:1500], "--kv-budget", "0.5").returncode, 0)
            more = run("-p", "Go on.", "--kv-budget", "0.5", "--json")
            self.assertEqual(more.returncode, 0, more.stderr)
            other = run("-p", "Go on.", "--kv-budget", "0.25")
            self.assertNotEqual(other.returncode, 0)
            self.assertIn("--kv-budget", other.stderr)
            # The same share, by what it costs; measured once.
            for _ in range(2):
                by_quality = run("-p", "Go on.", "--kv-quality", "10", session="short")
                self.assertEqual(by_quality.returncode, 0, by_quality.stderr)
            tenth = run("-p", "Go on.", "--kv-budget", "0.1", "--json", session="short")
            self.assertEqual(tenth.returncode, 0, tenth.stderr)
            self.assertGreater(json.loads(tenth.stdout)["history_tokens"], 0)
            both = run("-p", "Go on.", "--kv-quality", "0.1", "--kv-budget", "0.5")
            self.assertEqual(both.returncode, 2)
            snap = run("-p", TEXT[:1500], "--kv-budget", "0.3", "--kv-policy", "snap", session="snap")
            self.assertEqual(snap.returncode, 0, snap.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
