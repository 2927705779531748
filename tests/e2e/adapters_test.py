#!/usr/bin/env python3
"""Low-rank adapters of `hcache serve` and `hcache run`, on both engines: two random ones of the model.

    adapters_test.py HCACHE [-v] [name]
"""

import contextlib
import http.client
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from urllib.parse import urlparse

import serving

PROGRAM = sys.argv.pop(1)
MODEL = serving.default_model()
PROMPT = serving.TEXT[:1200]


def run(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([PROGRAM, *args], capture_output=True, text=True, timeout=300)


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.adapters = [str(Path(self.folder.name) / f"adapter-{i}.gguf") for i in range(2)]
        for seed, path in enumerate(self.adapters):
            made = run("model", "synth-adapter", MODEL, path, "--only", "attn_", "--size", "0.2",
                       "--seed", str(seed))
            self.assertEqual(made.returncode, 0, made.stderr)

    def start(self, *options: str, state: str = "state") -> serving.Server:
        return serving.Server(PROGRAM, "-m", MODEL, "--state-dir", str(Path(self.folder.name) / state),
                              "-t", "2", "--ctx", "2048", "--dram", "0", *options)

    @staticmethod
    def answer(server: serving.Server, lora: dict | None = None, prompt: str = PROMPT, **fields) -> dict:
        body = {"prompt": prompt, "n_predict": 16, "temperature": 0, **fields}
        if lora is not None:
            body["lora"] = [{"id": i, "scale": scale} for i, scale in lora.items()]
        return server.post("/completion", body)

    def set_scales(self, server: serving.Server, *scales: float) -> None:
        body = [{"id": i, "scale": scale} for i, scale in enumerate(scales)]
        self.assertEqual(server.post("/lora-adapters", body), {"success": True})


class OwnEngine(Case):
    def test_requests_choose_and_state_is_kept_apart(self):
        both = ("--lora", ",".join(self.adapters))
        with self.start(*both, "--lora-init-without-apply") as server:
            listed = server.call("GET", "/lora-adapters")[1]
            self.assertEqual([(a["id"], a["path"], a["scale"]) for a in listed],
                             [(0, self.adapters[0], 0), (1, self.adapters[1], 0)])
            plain = self.answer(server)
            texts = {plain["content"]}
            for lora in ({0: 1}, {1: 1}, {0: 1, 1: -0.5}):
                changed = self.answer(server, lora)
                texts.add(changed["content"])
                self.assertEqual(changed["generation_settings"]["lora"],
                                 [{"id": i, "scale": scale} for i, scale in lora.items()])
                self.assertEqual(changed["timings"]["cache_n"], 0)
                again = self.answer(server, lora)
                self.assertEqual(again["content"], changed["content"])
                self.assertGreater(again["timings"]["cache_n"], 200)
            self.assertEqual(len(texts), 4)
            self.assertEqual(self.answer(server)["content"], plain["content"])
            first = self.answer(server, {0: 1})["content"]
            self.set_scales(server, 1)
            self.assertEqual([a["scale"] for a in server.call("GET", "/lora-adapters")[1]], [1, 0])
            self.assertEqual(self.answer(server)["content"], first)
            self.assertEqual(self.answer(server, {})["content"], plain["content"])
            refused = server.call("POST", "/completion", {"prompt": "a", "lora": [{"id": 2, "scale": 1}]})
            self.assertEqual(refused[0], 400)
            self.assertIn("there is no adapter 2", refused[1]["error"]["message"])
            self.assertEqual(server.call("POST", "/lora-adapters", [{"id": 7, "scale": 1}])[0], 400)
            self.assertEqual(server.stop(), 0)
        with self.start("--lora", self.adapters[0]) as server:  # found again, by what they are
            again = self.answer(server)
            self.assertEqual(again["content"], first)
            self.assertGreater(again["timings"]["cache_n"], 200)
            plain_again = self.answer(server, {0: 0})
            self.assertEqual(plain_again["content"], plain["content"])
            self.assertGreater(plain_again["timings"]["cache_n"], 200)

    def test_session_files_know_their_adapters(self):
        def transfer(server, method, path, body=None):
            client = http.client.HTTPConnection(urlparse(server.url).netloc, timeout=300)
            with contextlib.closing(client):
                client.request(method, path, body)
                reply = client.getresponse()
                return reply.status, reply.read()

        with self.start("--lora", self.adapters[0]) as server:
            talked = self.answer(server, session_id="talk")
            status, file = transfer(server, "GET", "/v1/sessions/talk/export")
            self.assertEqual(status, 200)
            self.assertEqual(server.stop(), 0)
        out = str(Path(self.folder.name) / "talk.hcache")
        exported = run("store", "export", "--state-dir", str(Path(self.folder.name) / "state"),
                       "--session", "talk", "--file", out)
        self.assertNotEqual(exported.returncode, 0)
        with self.start(state="other") as server:
            status, body = transfer(server, "POST", "/v1/sessions/import", file)
            self.assertGreaterEqual(status, 400)
            self.assertIn("adapters", json.loads(body)["error"]["message"])
        with self.start("--lora", self.adapters[0], state="third") as server:
            status, body = transfer(server, "POST", "/v1/sessions/import", file)
            self.assertEqual(status, 200, body)
            again = self.answer(server)
            self.assertEqual(again["content"], talked["content"])
            self.assertGreater(again["timings"]["cache_n"], 200)

    def test_what_can_not_be_applied_is_named(self):
        for path, said in ((MODEL, "it is no adapter"), ("/nowhere.gguf", "/nowhere.gguf")):
            done = run("run", "-m", MODEL, "--no-store", "--lora", path, "-p", "Hi", "-n", "1")
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(said, done.stderr)
        done = run("run", "-m", MODEL, "--lora-scaled", self.adapters[0] + ":much", "-p", "Hi")
        self.assertEqual(done.returncode, 2)
        self.assertIn("FILE:SCALE", done.stderr)

    def test_the_command_line_has_them(self):
        def reply(*options: str) -> dict:
            done = run("run", "-m", MODEL, "--state-dir", str(Path(self.folder.name) / "cli"), "--raw",
                       "-p", PROMPT, "-n", "12", "--temp", "0", "--json", *options)
            self.assertEqual(done.returncode, 0, done.stderr)
            return json.loads(done.stdout)

        plain = reply()
        scaled = reply("--lora-scaled", self.adapters[0] + ":0.5", "--session", "talk")
        self.assertNotEqual(plain["reply"], scaled["reply"])
        self.assertEqual(scaled["restore"]["restored_tokens"], 0)
        done = run("run", "-m", MODEL, "--state-dir", str(Path(self.folder.name) / "cli"), "--raw",
                   "-p", "More.", "--session", "talk")
        self.assertIn("other adapters", done.stderr)


class Libllama(Case):
    """Its numbers depend on what else is computed, so that texts of random adapters may differ."""

    def likely(self, server: serving.Server, lora: dict) -> dict:
        """The log-probabilities of the likeliest first tokens."""
        answer = self.answer(server, lora, n_predict=1, n_probs=100)
        return {t["id"]: t["logprob"] for t in answer["completion_probabilities"][0]["top_logprobs"]}

    @staticmethod
    def distance(a: dict, b: dict) -> float:
        """Of the ten that are likeliest in `a`, on average."""
        top = sorted(a, key=a.get)[-10:]
        return sum(abs(a[token] - b.get(token, -20)) for token in top) / len(top)

    def test_requests_choose_and_state_comes_back(self):
        options = ("--engine", "llama", "--lora", ",".join(self.adapters), "--lora-init-without-apply")
        with self.start(*options) as server:
            plain = self.likely(server, {})
            first = self.likely(server, {0: 1})
            self.assertGreater(self.distance(plain, first), 0.5)
            self.assertLess(self.distance(self.likely(server, {}), plain), 0.15)
            self.assertEqual(server.stop(), 0)
        with self.start(*options) as server:
            for lora, before in (({0: 1}, first), ({}, plain)):
                self.assertLess(self.distance(self.likely(server, lora), before), 0.15)
                self.assertGreater(self.answer(server, lora)["timings"]["cache_n"], 200)
        with self.start("--lora", self.adapters[0], state="own") as server:  # the other engine agrees
            self.assertLess(self.distance(self.likely(server, {0: 1}), first), 0.15)


if __name__ == "__main__":
    unittest.main(verbosity=2)
