#!/usr/bin/env python3
"""Files and batches on the server: through SIGKILL and restarts, beside other requests, apart by
API key, and against clients who send nonsense.

    server_batches_test.py HCACHE [-v] [name]
"""

import json
import pathlib
import random
import signal
import stat
import sys
import tempfile
import unittest
import urllib.error
import urllib.request

import hostile
import serving
from serving import wait_until

PROGRAM = sys.argv.pop(1)
MODEL = serving.default_model()
BOUNDARY = "----boundary"


def chat(number: int, tokens: int = 16) -> dict:
    return {"messages": [{"role": "user", "content": f"Name {number + 2} animals."}],
            "max_tokens": tokens, "temperature": 0}


def lines(count: int, tokens: int = 16) -> str:
    out = [{"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions",
            "body": chat(n, tokens)} for n in range(count)]
    return "".join(json.dumps(line) + "\n" for line in out)


def form(content: bytes, purpose: str = "batch", more: str = "") -> bytes:
    head = (f"--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\n"
            f"{purpose}\r\n{more}--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"file\"; "
            f"filename=\"in.jsonl\"\r\nContent-Type: application/jsonl\r\n\r\n")
    return head.encode() + content + f"\r\n--{BOUNDARY}--\r\n".encode()


class Batches(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def serve(self, *options: str) -> serving.Server:
        return serving.Server(PROGRAM, "-m", MODEL, "--state-dir", str(self.folder / "state"),
                              "-t", "2", "--ctx", "1024", "--parallel", "2", *options)

    @staticmethod
    def send_form(server, body: bytes, key: str = "", content_type: str = "") -> tuple:
        headers = {"Content-Type": content_type or f"multipart/form-data; boundary={BOUNDARY}"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(server.url + "/v1/files", body, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def upload(self, server, text: str, key: str = "") -> str:
        status, file = self.send_form(server, form(text.encode()), key)
        self.assertEqual(status, 200, file)
        self.assertEqual(file["bytes"], len(text.encode()))
        return file["id"]

    def create(self, server, text: str, key: str = "") -> str:
        body = {"input_file_id": self.upload(server, text, key), "completion_window": "24h",
                "endpoint": "/v1/chat/completions", "metadata": {"n": "1"}}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        batch = server.post("/v1/batches", body, headers)
        self.assertIn(batch["status"], ("validating", "in_progress"))
        return batch["id"]

    @staticmethod
    def get(server, path: str, key: str = "") -> dict:
        return server.call("GET", path, headers={"x-api-key": key} if key else {})[1]

    def wait(self, server, batch: str, key: str = "") -> dict:
        ended = ("completed", "failed", "expired", "cancelled")
        wait_until(lambda: self.get(server, f"/v1/batches/{batch}", key)["status"] in ended,
                   f"the end of {batch}")
        return self.get(server, f"/v1/batches/{batch}", key)

    def results(self, server, file: str, key: str = "") -> dict:
        """By custom_id; a second answer to the same request fails."""
        found: dict = {}
        for line in self.get(server, f"/v1/files/{file}/content", key).splitlines():
            result = json.loads(line)
            self.assertNotIn(result["custom_id"], found)
            found[result["custom_id"]] = result
        return found

    @staticmethod
    def said(results: dict) -> dict:
        return {name: result["response"]["body"]["choices"][0]["message"]["content"]
                for name, result in results.items()}

    def test_every_answer_is_there_once_after_kills_and_restarts(self):
        with self.serve() as server:
            whole = self.wait(server, self.create(server, lines(10)))
            right = self.said(self.results(server, whole["output_file_id"]))
            asked = server.post("/v1/chat/completions", chat(3))["choices"][0]["message"]
        self.assertEqual(len(right), 10)
        self.assertEqual(right["c3"], asked["content"])

        def count(server) -> int:
            return self.get(server, f"/v1/batches/{batch}")["request_counts"]["completed"]

        with self.serve() as server:
            batch = self.create(server, lines(10))
            wait_until(lambda: count(server) >= 2, "answers")
            server.process.send_signal(signal.SIGKILL)
            server.process.wait(timeout=300)
        with self.serve() as server:
            wait_until(lambda: count(server) >= 2, "what was answered to be counted again")
            before = count(server)
            self.assertGreaterEqual(before, 2)
            wait_until(lambda: count(server) > before, "more answers")
            self.assertEqual(server.stop(), 0, server.errors())
        with self.serve() as server:
            ended = self.wait(server, batch)
            self.assertEqual(ended["status"], "completed")
            self.assertEqual(ended["request_counts"], {"total": 10, "completed": 10, "failed": 0})
            self.assertEqual(self.said(self.results(server, ended["output_file_id"])), right)
            answered = hostile.metrics(server.url)['hcache_batch_answers{result="completed"}']
            self.assertLess(answered, 10 - before)  # nothing was computed again
        for path in (self.folder / "state/batches").rglob("*"):
            self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o700 if path.is_dir() else 0o600)

    def test_others_go_first_and_a_batch_can_be_cancelled(self):
        with self.serve("--batch-parallel", "4") as server:
            batch = self.create(server, lines(40, 200))
            wait_until(lambda: hostile.metrics(server.url)[
                'hcache_batch_requests{state="in-flight"}'] == 4, "the batch to run")
            for number in range(3):
                server.post("/v1/chat/completions", chat(number))
            running = self.get(server, f"/v1/batches/{batch}")
            self.assertEqual(running["status"], "in_progress")
            self.assertEqual(server.call("DELETE", f"/v1/files/{running['input_file_id']}")[0], 409)
            cancelled = server.post(f"/v1/batches/{batch}/cancel", {})
            self.assertIn(cancelled["status"], ("cancelling", "cancelled"))
            ended = self.wait(server, batch)
            self.assertEqual(ended["status"], "cancelled")
            counts = ended["request_counts"]
            self.assertEqual(counts["completed"] + counts["failed"], 40)
            errors = self.results(server, ended["error_file_id"])
            self.assertEqual({e["error"]["code"] for e in errors.values()}, {"batch_cancelled"})
            self.assertEqual(server.call("POST", f"/v1/batches/{batch}/cancel", {})[0], 409)
            self.assertEqual(server.stop(), 0, server.errors())

    def test_each_key_has_its_own(self):
        with self.serve("--api-key", "one,two", "--batch-quota", "1MiB") as server:
            batch = self.create(server, lines(2) + json.dumps({
                "custom_id": "w", "method": "POST", "url": "/v1/chat/completions",
                "body": {"messages": [], "temperature": "hot"}}), "one")
            ended = self.wait(server, batch, "one")
            self.assertEqual(ended["request_counts"], {"total": 3, "completed": 2, "failed": 1})
            wrong = self.results(server, ended["error_file_id"], "one")["w"]
            self.assertEqual(wrong["response"]["status_code"], 400)
            for path in (f"/v1/batches/{batch}", f"/v1/files/{ended['output_file_id']}",
                         f"/v1/files/{ended['output_file_id']}/content",
                         f"/v1/files/{ended['input_file_id']}"):
                two = {"x-api-key": "two"}
                self.assertEqual(server.call("GET", path, headers=two)[0], 404, path)
                self.assertEqual(server.call("GET", path)[0], 401, path)
            self.assertEqual(self.get(server, "/v1/files", "two")["data"], [])
            self.assertEqual(self.get(server, "/v1/batches", "two")["data"], [])
            self.assertEqual(len(self.get(server, "/v1/files?purpose=batch", "one")["data"]), 1)
            status, error = self.send_form(server, form(b"x" * (1 << 20)), "one")
            self.assertEqual(status, 429)
            self.assertIn("--batch-quota", error["error"]["message"])
            deleted = server.call("DELETE", f"/v1/files/{ended['output_file_id']}",
                                  headers={"x-api-key": "one"})
            self.assertEqual(deleted[:2], (200, {"id": ended["output_file_id"], "object": "file",
                                                 "deleted": True}))
        # Without its key a batch waits; nobody else sees it.
        with self.serve("--api-key", "two") as server:
            self.assertEqual(self.get(server, "/v1/batches", "two")["data"], [])

    def test_anthropic_s_batches(self):
        with self.serve() as server:
            def request(name, **more):
                return {"custom_id": name, "params": {"max_tokens": 6, "temperature": 0, "messages":
                        [{"role": "user", "content": "Hello"}], **more}}

            created = server.post("/v1/messages/batches",
                                  {"requests": [request("a"), request("b", max_tokens="many")]})
            self.assertEqual(created["request_counts"]["processing"], 2)
            path = f"/v1/messages/batches/{created['id']}"
            wait_until(lambda: self.get(server, path)["processing_status"] == "ended", "its end")
            ended = self.get(server, path)
            self.assertEqual(ended["request_counts"], {"processing": 0, "succeeded": 1, "errored": 1,
                                                       "canceled": 0, "expired": 0})
            text = self.get(server, ended["results_url"])
            results = {r["custom_id"]: r["result"] for r in map(json.loads, text.splitlines())}
            said = server.post("/v1/messages", request("a")["params"])
            self.assertEqual(results["a"]["message"]["content"], said["content"])
            self.assertEqual(results["b"]["error"]["error"]["type"], "invalid_request_error")
            self.assertEqual(self.get(server, "/v1/files")["data"], [])
            self.assertEqual([b["id"] for b in self.get(server, "/v1/messages/batches")["data"]],
                             [created["id"]])
            self.assertEqual(server.call("DELETE", path)[0], 200)
            status, error, _ = server.call("GET", path)
            self.assertEqual((status, error["type"]), (404, "error"))

    def test_nonsense_is_refused_and_leaves_nothing(self):
        dice = random.Random(1)
        good = form(lines(2).encode())
        with self.serve() as server:
            bodies = [b"", b"--", form(b"x", "vision"), good[:-40], good[40:],
                      form(b"x", more="--" + BOUNDARY + "\r\nA: " + "b" * 9000 + "\r\n\r\n\r\n"),
                      form(b"x", more=f"--{BOUNDARY}\r\nContent-Disposition: form-data; "
                           "name=\"expires_after[seconds]\"\r\n\r\n5\r\n"),
                      b"".join([b"--" + BOUNDARY.encode() + b"\r\n\r\n\r\n"] * 100)]
            bodies += [good[:dice.randrange(len(good) - 10)] for _ in range(20)]
            for body in bodies:
                status, error = self.send_form(server, body)
                self.assertEqual(status, 400, body)
                self.assertTrue(error["error"]["message"])
            for content_type in ("application/json", "multipart/form-data", "multipart/mixed; "
                                 f"boundary={BOUNDARY}"):
                self.assertEqual(self.send_form(server, good, content_type=content_type)[0], 400)
            self.assertEqual(self.get(server, "/v1/files")["data"], [])

            file = self.upload(server, "nonsense\n" + lines(1))
            for body in ({}, [], {"input_file_id": 5}, {"input_file_id": file},
                         {"input_file_id": file, "endpoint": "/v1/embeddings"},
                         {"input_file_id": file, "endpoint": "/v1/completions",
                          "completion_window": "soon"},
                         {"input_file_id": file, "endpoint": "/v1/completions",
                          "metadata": {"a": 1}}):
                self.assertEqual(server.call("POST", "/v1/batches", body)[0], 400, body)
            self.assertEqual(server.call("POST", "/v1/batches", {
                "input_file_id": "file-x", "endpoint": "/v1/completions"})[0], 404)
            batch = server.post("/v1/batches", {"input_file_id": file,
                                                "endpoint": "/v1/chat/completions"})
            failed = self.wait(server, batch["id"])
            self.assertEqual(failed["status"], "failed")
            self.assertEqual(failed["errors"]["data"][0]["line"], 1)
            self.assertNotIn(str(self.folder), json.dumps(failed))
            for body in ({}, {"requests": []}, {"requests": [5]}, {"requests": [{}]},
                         {"requests": [{"custom_id": "a", "params": 5}]},
                         {"requests": [{"custom_id": "a", "params": {}}] * 2}):
                status, error, _ = server.call("POST", "/v1/messages/batches", body)
                self.assertEqual((status, error["type"]), (400, "error"), body)
            for query in ("limit=0", "limit=x", "limit=101", "after=nothing", "after="):
                wanted = 200 if query == "after=" else 400
                self.assertEqual(server.call("GET", "/v1/batches?" + query)[0], wanted, query)
            for path in ("/v1/files/..%2f..%2fx", "/v1/files/x/content", "/v1/batches/lock"):
                self.assertEqual(server.call("GET", path)[0], 404, path)
            for path in ("/v1/messages/batches/%00", "/v1/messages/batches?limit=%0"):
                status, error, _ = server.call("GET", path)
                self.assertEqual((status, error.get("type")), (400, "error"), path)
            self.assertEqual(self.get(server, "/v1/messages/batches")["data"], [])
            self.assertEqual(server.stop(), 0, server.errors())


if __name__ == "__main__":
    unittest.main(verbosity=2)
