#!/usr/bin/env python3
"""Conversations that outgrow the context, on the real default model.

    truncation_test.py HCACHE [-v] [name]
"""

import json
import subprocess
import sys
import tempfile
import time
import unittest

from serving import STATE_COMES_BACK, TEXT, Server, default_model

PROGRAM = sys.argv.pop(1)
MODEL = default_model()
AUTO = {"truncation": "auto"}
DROPPED = "X-HCache-Dropped-Tokens"


def start(folder: str, *options: str, context: int = 512) -> Server:
    return Server(PROGRAM, "-m", MODEL, "--device", "cpu", "--state-dir", folder, "-t", "2", "-c",
                  str(context), *options)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


class Truncation(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.server = start(cls.folder.name)

    @classmethod
    def tearDownClass(cls):
        with cls.server:
            cls.server.stop()
        cls.folder.cleanup()

    def test_is_not_done_unasked(self):
        status, answer, _ = self.server.call("POST", "/v1/chat/completions", {
            "messages": [user(TEXT[:6000])]})
        self.assertEqual(status, 400)
        self.assertEqual(answer["error"]["code"], "context_length_exceeded")
        self.assertIn('"truncation": "auto"', answer["error"]["message"])
        _, answer, headers = self.server.call("POST", "/v1/chat/completions", {
            "messages": [user(TEXT[:1200])], "max_tokens": 1000, "ignore_eos": True})
        self.assertEqual(answer["choices"][0]["finish_reason"], "length")
        self.assertEqual(answer["usage"]["total_tokens"], 513)  # the last one takes no room
        self.assertNotIn(DROPPED, headers)

    def test_a_conversation_goes_on(self):
        messages = [{"role": "system", "content": "You are brief."}]
        for turn in range(8):
            messages.append(user(TEXT[500 * turn:500 * turn + 500] + "\nWhat is this about?"))
            status, answer, headers = self.server.call("POST", "/v1/chat/completions", {
                "messages": messages, "max_tokens": 30, "temperature": 0, **AUTO})
            self.assertEqual(status, 200, answer)
            messages.append({"role": "assistant",
                             "content": answer["choices"][0]["message"]["content"]})
            tokens = answer["hcache"]["tokens"]
            prompt = answer["usage"]["prompt_tokens"]
            self.assertEqual(sum(tokens.values()), prompt)
            self.assertEqual(int(headers.get(DROPPED, 0)), answer["hcache"]["dropped_tokens"])
            if turn > 0:  # the last turn alone is computed
                self.assertLess(tokens["new"], 220)
        self.assertGreater(prompt, 1024)
        self.assertGreater(answer["hcache"]["dropped_tokens"], 512)

    def test_other_protocols_say_what_has_left(self):
        response = self.server.post("/v1/responses", {"input": TEXT[:5000], "max_output_tokens": 5, **AUTO})
        self.assertGreater(response["hcache"]["dropped_tokens"], 0)
        answer = self.server.post("/completion", {"prompt": TEXT[:5000], "n_predict": 5, **AUTO})
        self.assertIs(answer["truncated"], True)
        answer = self.server.post("/v1/messages", {"messages": [user(TEXT[:5000])], "max_tokens": 5, **AUTO})
        self.assertGreater(answer["hcache"]["dropped_tokens"], 0)
        answer = self.server.post("/v1/messages", {
            "messages": [user(TEXT[:5000])], "max_tokens": 5,
            "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}})
        self.assertGreater(answer["hcache"]["dropped_tokens"], 0)
        self.assertEqual(answer["context_management"], {"applied_edits": []})
        status, answer, _ = self.server.call("POST", "/v1/chat/completions", {
            "messages": [user("Hello")], "truncation": "always"})
        self.assertEqual(status, 400)
        self.assertIn("auto", answer["error"]["message"])

    def test_an_answer_goes_on_for_as_long_as_asked(self):
        answer = self.server.post("/v1/completions", {
            "prompt": TEXT[:600], "max_tokens": 900, "ignore_eos": True, "temperature": 0, **AUTO})
        self.assertEqual(answer["usage"]["completion_tokens"], 900)
        self.assertGreater(answer["hcache"]["dropped_tokens"], 200)


class Restarts(unittest.TestCase):
    """A conversation of many contexts whose server is killed twice: it is never refused, and what is held
    of it comes back."""

    def test_what_is_held_comes_back(self):
        messages, held, said = [{"role": "system", "content": "You are brief."}], 0, 0
        with tempfile.TemporaryDirectory() as folder:
            server = start(folder, "--context-overflow", "truncate", *STATE_COMES_BACK)
            try:
                for turn in range(12):
                    if turn in (5, 9):
                        time.sleep(2)  # twice the interval at which state is flushed
                        server.kill()
                        server = start(folder, "--context-overflow", "truncate", *STATE_COMES_BACK)
                    messages.append(user(TEXT[500 * turn:500 * turn + 500] + "\nWhat is this about?"))
                    answer = server.chat(messages, max_tokens=30)
                    messages.append({"role": "assistant",
                                     "content": answer["choices"][0]["message"]["content"]})
                    tokens = answer["hcache"]["tokens"]
                    usage = answer["usage"]
                    if turn > 0:
                        # What is computed beside the new message had been held: a restore of what
                        # came before the first cut alone would have more tokens, and other ones.
                        again = tokens["new"] - (usage["prompt_tokens"] - said)
                        self.assertLessEqual(again, 0.1 * held + 2, f"turn {turn}: {tokens}")
                        self.assertEqual(tokens["kv"] > 0, turn in (5, 9))
                    said = usage["total_tokens"]
                    held = usage["total_tokens"] - answer["hcache"]["dropped_tokens"]
                self.assertGreater(answer["hcache"]["dropped_tokens"], 1024)
            finally:
                server.kill()


class Options(unittest.TestCase):
    def test_the_server_may_be_started_so(self):
        for options in (["--context-overflow", "truncate"], ["--context-shift"]):
            with tempfile.TemporaryDirectory() as folder, start(folder, *options) as server:
                answer = server.chat([user(TEXT[:6000])], max_tokens=3)
                self.assertGreater(answer["hcache"]["dropped_tokens"], 0)
                status, _, _ = server.call("POST", "/v1/chat/completions", {
                    "messages": [user(TEXT[:6000])], "truncation": "disabled"})
                self.assertEqual(status, 400)

    def test_a_context_that_is_too_short_is_refused_at_the_start(self):
        with tempfile.TemporaryDirectory() as folder, self.assertRaises(RuntimeError) as refused:
            start(folder, "--context-overflow", "truncate", context=128)
        self.assertIn("a context of 128 tokens is too short", str(refused.exception))

    def test_chat_goes_on_and_says_so(self):
        with tempfile.TemporaryDirectory() as folder:
            command = [PROGRAM, "chat", "-m", MODEL, "--device", "cpu", "--state-dir", folder, "-t", "2",
                       "-c", "256", "-n", "20", "--temp", "0", "--json"]
            lines = "".join(TEXT[600 * i:600 * i + 600].replace("\n", " ") + "\n" for i in range(4))
            done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
            turns = [json.loads(line) for line in done.stdout.splitlines()]
            self.assertEqual(len(turns), 4)
            self.assertGreater(turns[-1]["dropped_tokens"], turns[0]["dropped_tokens"])
            done = subprocess.run([*command, "--context-overflow", "refuse"], input=lines,
                                  capture_output=True, text=True)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("available context size", done.stderr)


if __name__ == "__main__":
    unittest.main()
