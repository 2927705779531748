#!/usr/bin/env python3
"""An encrypted store under a real server: conversations survive a SIGKILL and move to another server
through Redis, nobody reads them without the key, and a key that does not fit changes nothing.

    encrypt_test.py HCACHE [-v] [name]
"""

import hashlib
import os
import stat
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import serving
from serving import STATE_COMES_BACK, Conversation, Redis, Server

PROGRAM = sys.argv.pop(1)
MODEL = serving.default_model()
SECRET = "the-plan-for-the-bank"


class Encryption(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.state = os.path.join(self.folder.name, "state")
        self.key = self.new_key("key")

    def new_key(self, name: str) -> str:
        path = os.path.join(self.folder.name, name)
        self.hcache("new-key", "-o", path)
        self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), 0o600)
        return path

    def hcache(self, *args: str, code: int = 0) -> str:
        done = subprocess.run([PROGRAM, "store", *args], capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, code, f"{args}\n{done.stdout}\n{done.stderr}")
        return done.stdout if code == 0 else done.stderr

    def start(self, state: str, *options: str) -> Server:
        return Server(PROGRAM, "-m", MODEL, "--state-dir", state, "-t", "2", "--ctx", "2048",
                      *STATE_COMES_BACK, *options)

    def store_files(self) -> dict:
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest()
                for path in sorted(Path(self.state, "store").rglob("*"))
                if path.is_file() and path.name != "hcache-store.lock"}  # which names who opens it

    def readable(self, text: str) -> list:
        return [str(path) for path in Path(self.state, "store").rglob("*")
                if path.is_file() and text.encode() in path.read_bytes()]

    def test_a_conversation_survives_and_is_not_readable(self):
        plain, talk = Conversation(1), Conversation(1)
        with self.start(os.path.join(self.folder.name, "plain")) as server:
            plain.step(server, session_id=SECRET)
            plain.step(server, session_id=SECRET)
        with self.start(self.state, "--encrypt-key-file", self.key) as server:
            talk.step(server, session_id=SECRET)
            time.sleep(2)  # twice the interval at which state is flushed
            server.kill()
        with self.start(self.state, "--encrypt-key-file", self.key) as server:
            talk.step(server, session_id=SECRET)
            names = [s["id"] for s in server.call("GET", "/v1/sessions")[1]["data"]]
            self.assertEqual(server.stop(), 0)
        self.assertEqual(names, [SECRET])
        self.assertEqual(talk.answers, plain.answers)
        self.assertGreaterEqual(talk.cached, talk.returned - 64)
        self.assertEqual(self.readable(SECRET), [])

        before = self.store_files()
        other = self.new_key("other")
        for options, says in (((), "give its key (--encrypt-key-file)"),
                              (("--encrypt-key-file", other), "another key")):
            for verb in ("stat", "ls", "gc", "repair"):
                self.assertIn(says, self.hcache(verb, "--state-dir", self.state, *options, code=4))
            done = subprocess.run([PROGRAM, "serve", "-m", MODEL, "--state-dir", self.state, "--port", "0",
                                   *options], capture_output=True, text=True, timeout=300)
            self.assertEqual(done.returncode, 4, done.stderr)
            self.assertIn(says, done.stderr)
        self.assertEqual(self.store_files(), before)
        with_key = ("--state-dir", self.state, "--encrypt-key-file", self.key)
        self.assertIn(SECRET, self.hcache("ls", *with_key))
        self.hcache("verify", *with_key)

        # A plain store takes no key; what it has can be taken over.
        source = ("--state-dir", os.path.join(self.folder.name, "plain"))
        self.assertIn("not encrypted", self.hcache("stat", *source, "--encrypt-key-file", self.key, code=4))
        file = os.path.join(self.folder.name, "session.hcache")
        self.hcache("export", *source, "--session", SECRET, "-o", file)
        self.hcache("import", *with_key, "-f", file, "--session", "moved")
        self.assertIn("moved", self.hcache("ls", *with_key))
        self.assertEqual(self.readable("moved"), [])

    def test_servers_with_the_same_key_share_a_remote_store(self):
        redis = Redis()
        self.addCleanup(redis.close)
        other = self.new_key("other")
        remote = ("--remote", redis.url, "--remote-timeout", "60s")
        talk = Conversation(2)
        with self.start(self.state, *remote, "--encrypt-key-file", self.key) as server:
            talk.step(server)
            self.assertEqual(server.stop(), 0)
        self.assertNotEqual(redis.ask("DBSIZE"), "0")
        cached = {}
        for name, options in (("same", ("--encrypt-key-file", self.key)),
                              ("other", ("--encrypt-key-file", other)), ("none", ())):
            again = Conversation(2)
            again.messages, again.answers = list(talk.messages), list(talk.answers)
            again.completed = talk.completed
            with self.start(os.path.join(self.folder.name, "state-" + name), *remote, *options) as server:
                again.step(server)
                cached[name] = again.cached
                self.assertEqual(server.stop(), 0)
        self.assertGreaterEqual(cached["same"], talk.completed - 64)
        self.assertEqual((cached["other"], cached["none"]), (0, 0))

    def test_key_files_that_are_none(self):
        self.assertIn("exists", self.hcache("new-key", "-o", self.key, code=4))
        bad = os.path.join(self.folder.name, "bad")
        Path(bad).write_text("hunter2")
        for path, code, says in ((bad, 2, "64 hex digits"), (bad + "none", 3, "bad" + "none")):
            text = self.hcache("stat", "--state-dir", self.state, "--encrypt-key-file", path, code=code)
            self.assertIn(says, text)
            self.assertNotIn("hunter2", text)
        self.hcache("new-key", code=2)


if __name__ == "__main__":
    unittest.main()
