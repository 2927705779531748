#!/usr/bin/env python3
"""A server whose weights are on disk answers as one that holds them, and says what it does.

    weights_test.py HCACHE [-v] [name]
"""

import os
import re
import subprocess
import sys
import tempfile
import unittest

import serving
from serving import Conversation, Server

PROGRAM = sys.argv.pop(1)
MODEL = serving.default_model()


class Weights(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def options(self, name: str, *more: str) -> list:
        return ["-m", MODEL, "--state-dir", os.path.join(self.folder.name, name), "-t", "2",
                "--ctx", "1024", *more]

    def hold(self, server: Server) -> list:
        talks = [Conversation(1, rounds=2), Conversation(2, rounds=2)]
        for _ in range(2):
            for talk in talks:
                talk.step(server)
        return [talk.answers for talk in talks]

    def metric(self, server: Server, name: str) -> float:
        text = server.call("GET", "/metrics")[1]
        return float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE).group(1))

    def test_answers_are_those_of_resident_weights(self):
        with Server(PROGRAM, *self.options("resident", "--weights", "resident")) as server:
            expected = self.hold(server)
            self.assertEqual(self.metric(server, "hcache_weights_streamed_bytes"), 0)
            self.assertIn("all 30 layers on cpu", server.call("GET", "/props")[1]["weights"])
            self.assertEqual(server.stop(), 0)
        with Server(PROGRAM, *self.options("disk", "--weights", "disk")) as server:
            self.assertEqual(self.hold(server), expected)
            self.assertGreater(self.metric(server, "hcache_weights_streamed_bytes"), 1 << 30)
            self.assertEqual(self.metric(server, "hcache_weights_read_errors"), 0)
            self.assertIn("30 streamed from disk", server.call("GET", "/props")[1]["weights"])
            self.assertIn("hcache: weights: 0 of 30 layers on cpu", server.errors())
            self.assertEqual(server.stop(), 0)
        # A restart restores what was saved, through layers that are streamed again.
        with Server(PROGRAM, *self.options("disk", "--weights", "disk")) as server:
            self.assertEqual(self.hold(server), expected)
            self.assertEqual(server.stop(), 0)

    def test_memory_decides_how_many_layers_stay(self):
        with Server(PROGRAM, *self.options("some", "--device-memory", "170MiB")) as server:
            weights = server.call("GET", "/props")[1]["weights"]
            kept = int(re.match(r"(\d+) of 30 layers on cpu", weights).group(1))
            self.assertGreater(kept, 0)
            self.assertIn(f"{30 - kept} streamed from disk", weights)
            self.assertEqual(server.stop(), 0)

    def test_what_cant_be_is_said(self):
        for options, why in ((["--weights", "host"], "memory of its own"),
                             (["--device-memory", "8MiB"], "--device-memory"),
                             (["--weights", "resident", "--device-memory", "90MiB"],
                              "--weights auto")):
            done = subprocess.run([PROGRAM, "run", *self.options("none"), "--no-store", *options,
                                   "-p", "Hello"], capture_output=True, text=True, timeout=300)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(why, done.stderr)


if __name__ == "__main__":
    unittest.main()
