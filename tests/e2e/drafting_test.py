#!/usr/bin/env python3
"""Replies whose next tokens a second model guesses, on the real default model.

    drafting_test.py HCACHE [-v] [name]
"""

import json
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

from serving import TEXT, Server, default_model

PROGRAM = sys.argv.pop(1)
MODEL = default_model()
QUESTION = [{"role": "user", "content": TEXT[:1500] + "\nWhat is this about?"}]
CHUNKS = 5  # of 64 tokens, that the question has at least
PATIENCE = 60  # seconds
NEXT = {"role": "user", "content": "And who lives there?"}


def start(folder: str, *options: str) -> Server:
    return Server(PROGRAM, "-m", MODEL, "--device", "cpu", "--state-dir", folder, "-t", "2", "-c", "2048",
                  *options)


# The model guesses for itself: always rightly, and never worth the time, so it is told to.
def drafting(folder: str) -> Server:
    return start(folder, "-md", MODEL, "--draft-max", "5", "--draft-min", "5",
                 "--draft-p-min", "0")


def chunks(folder: str) -> int:
    out = subprocess.run([PROGRAM, "store", "stat", "--store", str(Path(folder) / "store/draft"), "--json"],
                         check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(out.stdout)["chunks"]


class Drafting(unittest.TestCase):
    def ask(self, server: Server, messages: list, **fields) -> dict:
        return server.chat(messages, max_tokens=40, **fields)

    def test_replies_are_the_same(self):
        fields = {"temperature": 1.2, "seed": 7}
        with tempfile.TemporaryDirectory() as folder:
            with start(folder) as plain:
                expected = self.ask(plain, QUESTION, **fields)
            with drafting(folder) as server:
                answer = self.ask(server, QUESTION, **fields)
                self.assertEqual(answer["choices"], expected["choices"])
                self.assertGreater(answer["timings"]["draft_n"], answer["timings"]["draft_n_accepted"])
                none = self.ask(server, QUESTION, **{"speculative.n_max": 0}, **fields)
                self.assertEqual(none["choices"], expected["choices"])
                self.assertNotIn("draft_n", none["timings"])

    def test_a_conversation_comes_back_with_both_models_state(self):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
            with start(other) as plain:
                first = self.ask(plain, QUESTION)
                history = [*QUESTION, first["choices"][0]["message"], NEXT]
                second = self.ask(plain, history)
            with drafting(folder) as server:
                answer = self.ask(server, QUESTION, session_id="talk")
                self.assertEqual(answer["choices"], first["choices"])
                # It guesses greedily what is chosen greedily, from the very same weights.
                self.assertGreaterEqual(answer["timings"]["draft_n"], 25)
                self.assertEqual(answer["timings"]["draft_n_accepted"], answer["timings"]["draft_n"])
                # What is saved is written a little later.
                end = time.monotonic() + PATIENCE
                while chunks(folder) < CHUNKS and time.monotonic() < end:
                    time.sleep(0.2)
                server.kill()
            self.assertGreaterEqual(chunks(folder), CHUNKS)
            with drafting(folder) as server:
                answer = self.ask(server, history, session_id="talk")
                self.assertEqual(answer["choices"], second["choices"])
                # Until the drafting model's state is back, replies go on without it.
                end = time.monotonic() + PATIENCE
                while answer["timings"].get("draft_n_accepted", 0) < 10 and time.monotonic() < end:
                    answer = self.ask(server, history, session_id="talk")
                    self.assertEqual(answer["choices"], second["choices"])
                self.assertGreaterEqual(answer["timings"]["draft_n_accepted"], 10)
                # Deleted, it is deleted for both.
                self.assertEqual(server.call("DELETE", "/v1/sessions/talk")[0], 200)
                server.stop()
            self.assertEqual(chunks(folder), 0)

    def test_on_the_command_line(self):
        guesses = ("--model-draft", MODEL, "--draft-max", "5", "--draft-min", "5", "--draft-p-min", "0")

        def run(folder: str, text: str, *options: str) -> dict:
            out = subprocess.run(
                [PROGRAM, "run", "-m", MODEL, "--device", "cpu", "--state-dir", folder, "-t", "2", "-c",
                 "2048", "--session", "talk", "-p", text, "-n", "40", "--temp", "0", "--json", *options],
                check=True, stdout=subprocess.PIPE, text=True)
            return json.loads(out.stdout)

        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
            for text in (QUESTION[0]["content"], NEXT["content"]):  # the second is another process's
                expected = run(other, text)
                self.assertEqual(expected["drafted_tokens"], 0)
                answer = run(folder, text, *guesses)
                self.assertEqual(answer["reply_tokens"], expected["reply_tokens"])
                self.assertEqual(answer["history_tokens"], expected["history_tokens"])
                self.assertGreaterEqual(answer["drafted_tokens"], answer["accepted_tokens"])
                if answer["history_tokens"] == 0:  # else the reply may end before the state is back
                    self.assertGreaterEqual(answer["accepted_tokens"], 10)
            self.assertGreaterEqual(chunks(folder), CHUNKS)
            bad = subprocess.run([PROGRAM, "run", "-m", MODEL, "-p", "x", "--model-draft",
                                  str(Path(folder) / "none.gguf"), "--state-dir", folder],
                                 capture_output=True, text=True, timeout=120, check=False)
            self.assertNotEqual(bad.returncode, 0)
            self.assertIn("none.gguf", bad.stderr)

    def test_other_vocabularies_are_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "without.gguf")
            subprocess.run([PROGRAM, "model", "synth", "--shape", "smollm2-135m", "--layers", "1", "-o",
                            path], check=True, stderr=subprocess.DEVNULL)
            for model, what in [(path, "vocabulary"), (str(Path(folder) / "none.gguf"), "none.gguf")]:
                done = subprocess.run([PROGRAM, "serve", "-m", MODEL, "--model-draft", model, "--port", "0",
                                       "--state-dir", folder], capture_output=True, text=True, timeout=120,
                                      check=False)
                self.assertNotEqual(done.returncode, 0)
                self.assertIn(what, done.stderr)


if __name__ == "__main__":
    unittest.main()
