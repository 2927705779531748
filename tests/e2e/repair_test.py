#!/usr/bin/env python3
"""A store with flipped bits under a real server: it starts, answers as before, and finds again what
is intact. And `hcache store repair`.

    repair_test.py HCACHE [-v] [name]
"""

import json
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import serving
from serving import STATE_COMES_BACK, Conversation, Server

PROGRAM = sys.argv.pop(1)
MODEL = serving.default_model()


def start(folder: str) -> Server:
    return Server(PROGRAM, "-m", MODEL, "--state-dir", folder, "-t", "2", "--ctx", "2048",
                  *STATE_COMES_BACK)


def flip(path: Path, at: int, bits: int = 1) -> None:
    data = bytearray(path.read_bytes())
    for i in range(bits):
        data[(at + 97 * i) % len(data)] ^= 1 << (i % 8)
    path.write_bytes(data)


class Repair(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.state = os.path.join(self.folder.name, "state")

    def hcache(self, *args: str, code: int = 0) -> str:
        done = subprocess.run([PROGRAM, "store", *args, "--state-dir", self.state],
                              capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, code, f"{args}\n{done.stdout}\n{done.stderr}")
        return done.stdout if code == 0 else done.stderr

    def file(self, pattern: str) -> Path:
        found = sorted(Path(self.state).rglob(pattern))
        self.assertTrue(found, pattern)
        return found[0]

    def test_a_server_starts_whatever_is_flipped(self):
        saved = Conversation(1)
        with start(self.state) as server:
            saved.step(server, session_id="talk")
            saved.step(server, session_id="talk")
            self.assertEqual(server.stop(), 0)
        whole = os.path.join(self.folder.name, "whole")
        shutil.copytree(self.state, whole)
        expected = None
        source = random.Random(5)
        for pattern, flips in (("none", 0), ("catalog.db", 40), ("catalog.db", 3),
                               ("hcache-disk", 1), ("records-*.hcr", 20), ("segment-*.hcs", 3)):
            with self.subTest(pattern=pattern, flips=flips):
                shutil.rmtree(self.state)
                shutil.copytree(whole, self.state)
                if flips:
                    path = self.file(pattern)
                    flip(path, source.randrange(path.stat().st_size), flips)
                talk = Conversation(1)
                talk.messages, talk.answers = list(saved.messages), list(saved.answers)
                talk.completed = saved.completed
                with start(self.state) as server:
                    talk.step(server, session_id="talk")
                    names = [s["id"] for s in server.call("GET", "/v1/sessions")[1]["data"]]
                    self.assertEqual(server.stop(), 0)
                expected = expected or talk.answers[-1]
                self.assertEqual(talk.answers[-1], expected)
                self.assertEqual(names, ["talk"])
                if pattern != "segment-*.hcs":
                    self.assertGreater(talk.cached, 100)
                if pattern == "catalog.db" and flips > 3:
                    aside = self.file("catalog.db.damaged")
                    self.assertEqual(stat.S_IMODE(aside.stat().st_mode), 0o600)
                for path in Path(self.state).rglob("*.hc?"):
                    self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600, path)

    def test_repair(self):
        self.hcache("repair", code=3)
        with start(self.state) as server:
            Conversation(2).step(server, session_id="talk")
            self.assertEqual(server.stop(), 0)
        before = json.loads(self.hcache("stat", "--json"))
        self.assertGreater(before["record_bytes"], 0)
        self.assertIn("nothing to repair", self.hcache("repair"))
        path = self.file("catalog.db")
        path.write_bytes(os.urandom(path.stat().st_size))
        self.assertIn("hcache store repair", self.hcache("ls", code=6))
        report = json.loads(self.hcache("repair", "--json"))
        self.assertEqual(report["chunks_found"], before["chunks"])
        self.assertEqual(report["sessions_found"], 1)
        self.assertEqual(report["set_aside"], str(path) + ".damaged")
        self.assertTrue(json.loads(self.hcache("verify", "--json"))["ok"])
        self.assertEqual(json.loads(self.hcache("ls", "--json"))[0]["name"], "talk")
        path.unlink()
        text = self.hcache("repair")
        self.assertIn("found again", text)
        self.assertIn(f"{before['chunks']} chunks", text)
        self.assertIn("made anew", self.hcache("repair", "--rebuild"))
        self.hcache("gc")
        self.assertFalse(Path(str(path) + ".damaged").exists())
        # Where nothing says what the pages are, it says so.
        for name in ("records-*.hcr", "segment-*.hcs", "hcache-disk"):
            for gone in Path(self.state).rglob(name):
                gone.unlink()
        path.write_bytes(b"junk" * 1000)
        self.hcache("repair", code=6)


if __name__ == "__main__":
    unittest.main()
