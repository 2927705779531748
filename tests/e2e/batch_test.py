#!/usr/bin/env python3
"""`hcache batch` on the real default model: killed, interrupted, and as a server answers.

    batch_test.py HCACHE [-v] [name]
"""

import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

import serving
from serving import wait_until

PROGRAM = sys.argv.pop(1)
MODEL = serving.default_model()


def chat(number: int) -> dict:
    return {"messages": [{"role": "user", "content": f"Name {number + 2} animals."}],
            "max_tokens": 20, "temperature": 0}


def lines(count: int) -> str:
    out = [{"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions",
            "body": chat(n)} for n in range(count)]
    return "".join(json.dumps(line) + "\n" for line in out)


class Batch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.input = self.folder / "in.jsonl"

    def command(self, output: pathlib.Path, *options: str) -> list:
        return [PROGRAM, "batch", str(self.input), "-o", str(output), "-m", MODEL, "--state-dir",
                str(self.folder / "state"), "-t", "2", "--ctx", "1024", "--parallel", "2",
                *options]

    def run_batch(self, output: pathlib.Path, *options: str) -> subprocess.CompletedProcess:
        return subprocess.run(self.command(output, *options), capture_output=True, text=True,
                              timeout=500)

    @staticmethod
    def answers(output: pathlib.Path) -> dict:
        """By custom_id; a second answer to the same request fails."""
        found: dict = {}
        for line in output.read_text().splitlines():
            result = json.loads(line)
            assert result["custom_id"] not in found, line
            found[result["custom_id"]] = (
                result["response"]["body"]["choices"][0]["message"]["content"])
        return found

    def end_early(self, output: pathlib.Path, how: int) -> int:
        def written() -> int:
            return output.read_bytes().count(b"\n") if output.exists() else 0

        before = written()
        process = subprocess.Popen(self.command(output), stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        wait_until(lambda: written() >= before + 2, "results")
        process.send_signal(how)
        return process.wait(timeout=300)

    def test_every_answer_is_there_once_whatever_happens(self):
        self.input.write_text(lines(12))
        undisturbed = self.folder / "undisturbed.jsonl"
        done = self.run_batch(undisturbed)
        self.assertEqual(done.returncode, 0, done.stderr)
        right = self.answers(undisturbed)
        self.assertEqual(len(right), 12)

        output = self.folder / "out.jsonl"
        self.assertEqual(self.end_early(output, signal.SIGKILL), -signal.SIGKILL)
        with output.open("a") as torn:
            torn.write('{"id":"batch_req_')
        self.assertEqual(self.end_early(output, signal.SIGINT), 130)
        again = self.run_batch(output, "--json")
        self.assertEqual(again.returncode, 0, again.stderr)
        summary = json.loads(again.stdout)
        self.assertGreaterEqual(summary["found"], 2)
        self.assertEqual(summary["completed"], 12)
        self.assertEqual(self.answers(output), right)
        self.assertFalse(list(self.folder.glob("out.jsonl.*")))

    def test_a_server_says_the_same_and_wrong_requests_have_their_errors(self):
        wrong = {"custom_id": "w", "method": "POST", "url": "/v1/completions",
                 "body": {"prompt": "x", "temperature": "hot"}}
        messages = {"custom_id": "m", "params": {
            "max_tokens": 6, "temperature": 0, "stream": True,
            "messages": [{"role": "user", "content": "Hello"}]}}
        self.input.write_text(lines(2) + json.dumps(wrong) + "\nnonsense\n" +
                              json.dumps(messages) + "\n")
        output = self.folder / "out.jsonl"
        done = self.run_batch(output, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        summary = json.loads(done.stdout)
        self.assertEqual([summary[k] for k in ("completed", "failed", "bad_lines")], [3, 2, 1])
        results = {r["custom_id"]: r for r in map(json.loads, output.read_text().splitlines())}
        self.assertEqual(results["w"]["response"]["status_code"], 400)
        self.assertIn("temperature", results["w"]["response"]["body"]["error"]["message"])
        self.assertEqual(results[None]["error"]["code"], "invalid_line")
        self.assertIn("line 4", results[None]["error"]["message"])
        with serving.Server(PROGRAM, "-m", MODEL, "--state-dir", str(self.folder / "other"), "-t",
                            "2", "--ctx", "1024") as server:
            for n in range(2):
                said = server.post("/v1/chat/completions", chat(n))["choices"][0]["message"]
                body = results[f"c{n}"]["response"]["body"]
                self.assertEqual(body["choices"][0]["message"], said)
            said = server.post("/v1/messages", {**messages["params"], "stream": False})
            self.assertEqual(results["m"]["response"]["body"]["content"], said["content"])

    def test_both_engines_give_the_same_answers(self):
        bodies = [chat(n) for n in range(3)] + [
            {**chat(3), "temperature": 0.9, "seed": 7, "n": 2},
            {**chat(4), "logprobs": True, "top_logprobs": 2, "stop": ["\n"]},
            {**chat(5), "max_tokens": 40, "response_format": {"type": "json_schema", "json_schema": {
                "name": "pet", "schema": {"type": "object", "required": ["name"], "properties": {
                    "name": {"type": "string", "maxLength": 12}}}}}},
        ]
        requests = [{"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions",
                     "body": body} for n, body in enumerate(bodies)]
        self.input.write_text("".join(json.dumps(r) + "\n" for r in requests))
        answers = []
        for engine in ("ordinary", "hybrid"):
            output = self.folder / f"{engine}.jsonl"
            done = self.run_batch(output, "--engine", engine, "--no-store", "--json",
                                  "--cache-memory", "1MiB", "--cache-policy", "unmanaged")
            self.assertEqual(done.returncode, 0, done.stderr)
            summary = json.loads(done.stdout)
            self.assertEqual(summary["engine"]["name"], engine)
            self.assertEqual(summary["completed"], len(requests))
            bodies = {r["custom_id"]: r["response"]["body"]
                      for r in map(json.loads, output.read_text().splitlines())}
            answers.append({name: (body["choices"], body["usage"]["completion_tokens"])
                            for name, body in bodies.items()})
        self.assertGreater(summary["engine"]["steps"], 0)
        self.assertGreater(summary["engine"]["fits"]["load_kv"]["r2"], -1)
        self.assertEqual(answers[0], answers[1])

    def test_a_request_that_fits_no_buffer_fails_alone_and_what_is_saved_is_used(self):
        long = {"custom_id": "long", "method": "POST", "url": "/v1/completions",
                "body": {"prompt": "one two three " * 200, "max_tokens": 4}}
        shared = {"custom_id": "kept", "method": "POST", "url": "/v1/completions",
                  "body": {"prompt": "The cat sat. " * 40, "max_tokens": 4, "temperature": 0}}
        self.input.write_text(json.dumps(long) + "\n" + json.dumps(shared) + "\n")
        told = []
        for run in ("first", "second"):
            output = self.folder / f"{run}.jsonl"
            done = self.run_batch(output, "--engine", "hybrid", "--buffer", "384", "--json",
                                  "--cache-policy", "kv")
            self.assertEqual(done.returncode, 0, done.stderr)
            summary = json.loads(done.stdout)
            self.assertEqual([summary["completed"], summary["failed"]], [1, 1])
            results = {r["custom_id"]: r["response"]
                       for r in map(json.loads, output.read_text().splitlines())}
            self.assertEqual(results["long"]["status_code"], 400)
            self.assertIn("384", results["long"]["body"]["error"]["message"])
            told.append((summary["cached_tokens"], results["kept"]["body"]["choices"][0]["text"]))
        self.assertEqual(told[0][0], 0)
        self.assertGreaterEqual(told[1][0], 128)
        self.assertEqual(told[0][1], told[1][1])

    def test_auto_takes_the_batch_engine_where_weights_are_streamed_or_the_cache_is_small(self):
        def engine(name: str, *options: str) -> dict:
            done = self.run_batch(self.folder / f"{name}.jsonl", "--no-store", "--json", "--buffer", "2048",
                                  *options)
            self.assertEqual(done.returncode, 0, done.stderr)
            return json.loads(done.stdout)["engine"]

        self.input.write_text(lines(3))
        self.assertEqual(engine("small")["name"], "ordinary")
        streamed = engine("streamed", "--weights", "disk")
        self.assertEqual(streamed["name"], "hybrid")
        self.assertGreater(streamed["streamed_bytes"], 0)
        self.assertEqual(engine("asked", "--weights", "disk", "--engine", "ordinary")["name"], "ordinary")
        self.assertEqual(self.answers(self.folder / "streamed.jsonl"),
                         self.answers(self.folder / "asked.jsonl"))
        self.input.write_text("".join(json.dumps(
            {"custom_id": str(n), "method": "POST", "url": "/v1/completions",
             "body": {"prompt": f"{n} two three " * 200, "max_tokens": 2, "temperature": 0}}) + "\n"
            for n in range(2)))
        self.assertEqual(engine("long")["name"], "hybrid")

    def test_refusals_say_what_to_do(self):
        self.input.write_text(lines(1) * 2)
        output = self.folder / "out.jsonl"
        twice = self.run_batch(output)
        self.assertEqual(twice.returncode, 2)
        self.assertIn("lines 1 and 2", twice.stderr)
        self.input.write_text(lines(1))
        output.write_text("mine\n")
        there = self.run_batch(output)
        self.assertEqual(there.returncode, 4)
        self.assertIn("--restart", there.stderr)
        self.assertEqual(output.read_text(), "mine\n")


if __name__ == "__main__":
    unittest.main(verbosity=2)
