#!/usr/bin/env python3
"""Several models behind one port: `hcache serve --models-dir`, on small models.

    router_test.py HCACHE [-v] [name]
"""

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import unittest
import urllib.request
from pathlib import Path

import serving
from serving import STATE_COMES_BACK, Server, wait_until

PROGRAM = sys.argv.pop(1)
STORY = [{"role": "user", "content": serving.TEXT[:1500]}]
# The likeliest token of random weights is the last one again. Among all tokens a seed chooses those
# that follow from all that was computed.
CHOSEN = {"temperature": 1, "seed": 7, "top_k": 0, "top_p": 1, "min_p": 0}
ENDLESS = 1900  # tokens: more than a test waits for


def make_models(folder: str) -> None:
    """Three models of one shape with weights of their own: a file, one in a folder, and a file."""
    Path(folder, "b").mkdir()
    for seed, path in enumerate(("a.gguf", "b/weights.gguf", "c.gguf"), 1):
        subprocess.run([PROGRAM, "model", "synth", "--shape", "smollm2-135m", "--layers", "2", "--type",
                        "q8_0", "--seed", str(seed), "--vocab-from", serving.default_model(), "-o",
                        str(Path(folder) / path)], check=True, stderr=subprocess.DEVNULL)


MODELS = tempfile.TemporaryDirectory()


def setUpModule():
    make_models(MODELS.name)


def tearDownModule():
    MODELS.cleanup()


def runs(process: str) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class Router(Server):
    """The router with state in a folder of its own."""

    def __init__(self, *options: str, models: str | None = None, state: str | None = None,
                 env: dict | None = None):
        self.folder = tempfile.TemporaryDirectory()
        super().__init__(PROGRAM, "--models-dir", models or MODELS.name, "--state-dir",
                         state or self.folder.name, "-t", "1", "--ctx", "2048", "--dram", "0",
                         *STATE_COMES_BACK, *options, env=env)

    def kill(self) -> None:
        """And waits for its servers, which follow it at their own pace and write until then."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        servers = " ".join(file.read_text() for file in tasks.glob("*/children")).split()
        super().kill()
        wait_until(lambda: not any(runs(server) for server in servers), "the router's servers")

    def __exit__(self, *details):
        super().__exit__(*details)
        self.folder.cleanup()

    def status(self, model: str) -> dict:
        """What GET /v1/models tells of it."""
        entries = self.call("GET", "/v1/models")[1]["data"]
        return next(entry["status"] for entry in entries if entry["id"] == model)

    def wait_for(self, model: str, value: str) -> None:
        wait_until(lambda: self.status(model)["value"] == value, f"{model} to be {value}")

    def ask(self, model: str, **fields) -> dict:
        return self.chat(STORY, model=model, max_tokens=8, **CHOSEN, **fields)

    def metric(self, name: str, model: str) -> float:
        text = self.call("GET", "/metrics")[1]
        line = next(line for line in text.splitlines() if line.startswith(f'{name}{{model="{model}"}}'))
        return float(line.split()[-1])

    def servers(self) -> dict:
        """The models' processes: their ids by name."""
        out = {}
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            for pid in (task / "children").read_text().split():
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                name = next((w.removeprefix("--alias=") for w in words if w.startswith("--alias=")), None)
                if name:
                    out[name] = int(pid)
        return out


class Stream:
    """A chat under way, whose answer comes as it is generated."""

    def __init__(self, server: Router, model: str, tokens: int = ENDLESS):
        host, port = server.url.removeprefix("http://").split(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=300)
        body = {"model": model, "messages": STORY, "stream": True, "max_tokens": tokens,
                "ignore_eos": True, **CHOSEN}
        self.connection.request("POST", "/v1/chat/completions", json.dumps(body),
                                {"Content-Type": "application/json"})
        self.reply = self.connection.getresponse()
        assert self.reply.status == 200, self.reply.read()

    def event(self) -> dict:
        """The next one."""
        while True:
            line = self.reply.readline().decode()
            if line.startswith("data: {"):
                return json.loads(line.removeprefix("data: "))
            if not line:
                raise AssertionError("the stream has ended")

    def close(self) -> None:
        self.reply.close()
        self.connection.close()


class Loading(unittest.TestCase):
    def test_models_are_loaded_when_they_are_asked_for(self):
        with Router() as server:
            self.assertEqual([m["id"] for m in server.call("GET", "/v1/models")[1]["data"]],
                             ["a", "b", "c"])
            self.assertEqual(server.servers(), {})
            first = server.ask("a")
            self.assertEqual(first["model"], "a")
            self.assertEqual({m: server.status(m)["value"] for m in "abc"},
                             {"a": "loaded", "b": "unloaded", "c": "unloaded"})
            other = server.ask("b")
            self.assertNotEqual(first["choices"][0]["message"]["content"],
                                other["choices"][0]["message"]["content"])
            self.assertEqual(sorted(server.servers()), ["a", "b"])
            # What its server says of it stands in the list.
            wait_until(lambda: "n_vocab" in server.call("GET", "/v1/models/a")[1]["meta"], "a's card")
            self.assertEqual(server.metric("hcache_model_loads_total", "a"), 1)
            self.assertEqual(server.metric("hcache_model_requests_total", "b"), 1)
            self.assertEqual(server.stop(), 0)
            self.assertIn("[a] loaded in", server.errors())

    def test_a_conversation_is_its_models(self):
        with Router() as server:
            self.assertEqual(server.call("POST", "/v1/conversations", {})[0], 400)
            name = server.post("/v1/conversations?model=a", {"metadata": {}})["id"]
            body = {"input": "Hello", "conversation": name, "max_output_tokens": 4}
            answer = server.post("/v1/responses", {**body, "model": "a"})
            self.assertEqual(answer["conversation"], {"id": name})
            items = server.call("GET", f"/upstream/a/v1/conversations/{name}/items")[1]["data"]
            self.assertEqual(len(items), 2)
            path = f"/v1/conversations/{name}/items/{items[0]['id']}"
            self.assertEqual(server.call("GET", path + "?model=a")[1], items[0])
            self.assertEqual(server.call("POST", "/v1/responses", {**body, "model": "b"})[0], 404)
            self.assertEqual(server.call("DELETE", f"/v1/conversations/{name}?model=a")[0], 200)
            self.assertEqual(server.stop(), 0)

    def test_requests_without_a_body_name_theirs(self):
        with Router() as server:
            self.assertEqual(server.call("GET", "/props")[1]["role"], "router")
            status, answer, _ = server.call("GET", "/v1/sessions")
            self.assertEqual(status, 400)
            self.assertIn("'a', 'b', 'c'", answer["error"]["message"])
            status, answer, _ = server.call("GET", "/slots?model=a")
            self.assertEqual((status, server.status("a")["value"]), (400, "unloaded"))
            # Nor does a model's page, which may stay open: it redirects to where its paths are right.
            self.assertIn("<title>", server.call("GET", "/upstream/a")[1])
            listed = server.call("GET", "/upstream/a/v1/models")[1]["data"]
            self.assertEqual([m["id"] for m in listed], ["a"])
            self.assertEqual(server.call("GET", "/upstream/a/v1/sessions")[0], 400)
            self.assertEqual(server.servers(), {})
            self.assertTrue(server.call("GET", "/props?model=a")[1]["model_path"].endswith("a.gguf"))
            self.assertEqual(server.call("GET", "/slots?model=a")[0], 200)
            self.assertIn("llamacpp:", server.call("GET", "/metrics?model=a")[1])
            self.assertEqual(server.call("GET", "/upstream/a/props")[1]["model_alias"], "a")
            self.assertEqual(server.call("POST", "/upstream/a/tokenize", {"content": "Hi"})[0], 200)
            self.assertIn('href="upstream/b/"', server.call("GET", "/")[1])
            document = server.call("GET", "/openapi.json")[1]
            self.assertIn("/models/load", document["paths"])
            self.assertEqual(server.stop(), 0)

    def test_one_model_needs_no_name(self):
        with tempfile.TemporaryDirectory() as models:
            shutil.copy(Path(MODELS.name) / "a.gguf", models)
            with Router(models=models) as server:
                self.assertEqual(server.chat(STORY, max_tokens=2)["model"], "a")
                self.assertEqual(server.call("GET", "/v1/sessions")[0], 200)
                # What is put there later is found, too.
                shutil.copy(Path(MODELS.name) / "c.gguf", models)
                self.assertEqual(server.ask("c")["model"], "c")
                os.remove(Path(models) / "c.gguf")
                listed = server.call("GET", "/models?reload=1")[1]["data"]
                self.assertEqual([m["id"] for m in listed], ["a"])
                wait_until(lambda: "c" not in server.servers(), "the removed model's end")

    def test_a_projector_in_a_models_folder_is_its_own(self):
        with tempfile.TemporaryDirectory() as models:
            Path(models, "seeing").mkdir()
            for name in ("a.gguf", "seeing/model.gguf"):
                shutil.copy(Path(MODELS.name) / "a.gguf", Path(models) / name)
            subprocess.run([PROGRAM, "model", "synth-projector", Path(models) / "a.gguf",
                            Path(models) / "seeing/mmproj-model.gguf"], check=True, stderr=subprocess.DEVNULL)
            with Router(models=models) as server:
                sizes = {entry["id"]: entry["meta"]["size"]
                         for entry in server.call("GET", "/v1/models")[1]["data"]}
                self.assertEqual(sizes["seeing"] - sizes["a"],
                                 os.path.getsize(Path(models) / "seeing/mmproj-model.gguf"))
                sees = {name: server.call("GET", f"/props?model={name}")[1]["modalities"]["vision"]
                        for name in ("a", "seeing")}
                self.assertEqual(sees, {"a": False, "seeing": True})

    def test_loading_and_unloading_by_hand(self):
        with Router("--no-models-autoload") as server:
            status, answer, _ = server.call("POST", "/v1/chat/completions",
                                            {"model": "a", "messages": STORY})
            self.assertEqual(status, 400, answer)
            self.assertIn("not loaded", answer["error"]["message"])
            self.assertEqual(server.post("/models/load", {"model": "a"}), {"success": True})
            server.wait_for("a", "loaded")
            self.assertEqual(server.call("POST", "/models/load", {"model": "a"})[0], 400)
            server.ask("a")
            server.post("/models/unload", {"model": "a"})
            server.wait_for("a", "unloaded")
            self.assertEqual(server.call("POST", "/models/unload", {"model": "a"})[0], 400)
            self.assertEqual(server.call("POST", "/models/load", {"model": "x"})[0], 404)
            self.assertEqual(server.call("POST", "/tokenize?autoload=true",
                                         {"model": "b", "content": "x"})[0], 200)

    def test_unknown_models(self):
        with Router() as server:
            body = {"model": "x", "messages": STORY, "max_tokens": 1}
            status, answer, _ = server.call("POST", "/v1/chat/completions", body)
            self.assertEqual((status, answer["error"]["code"], answer["error"]["param"]),
                             (404, "model_not_found", "model"))
            status, answer, _ = server.call("POST", "/v1/messages", body)
            self.assertEqual((status, answer["error"]["type"]), (404, "not_found_error"))
            status, answer, _ = server.call("POST", "/api/chat", body)
            self.assertEqual((status, list(answer)), (404, ["error"]))
            self.assertIn("'a', 'b', 'c'", answer["error"])
            self.assertEqual(server.call("GET", "/v1/models/x")[0], 404)
            self.assertEqual(server.call("GET", "/nothing")[0], 404)

    def test_a_model_that_cannot_be_loaded(self):
        with tempfile.TemporaryDirectory() as models:
            shutil.copy(Path(MODELS.name) / "a.gguf", models)
            Path(models, "broken.gguf").write_bytes(b"no model")
            with Router(models=models) as server:
                for _ in range(2):
                    status, answer, _ = server.call("POST", "/v1/chat/completions",
                                                    {"model": "broken", "messages": STORY})
                    self.assertEqual(status, 503, answer)
                    self.assertIn("'broken' could not be loaded (exit code 6", answer["error"]["message"])
                self.assertEqual(server.status("broken"),
                                 {"value": "unloaded", "failed": True, "exit_code": 6})
                server.ask("a")


class PassingOn(unittest.TestCase):
    def test_streams_come_as_they_are_made(self):
        with Router() as server:
            whole = server.ask("a")["choices"][0]["message"]["content"]
            stream = Stream(server, "a")
            texts = [stream.event()["choices"][0]["delta"].get("content") or "" for _ in range(6)]
            # It has not nearly ended, and yet its beginning is here.
            self.assertTrue(whole.startswith("".join(texts)[:4]), (whole, texts))
            slots = server.call("GET", "/slots?model=a")[1]
            self.assertTrue(any(slot["is_processing"] for slot in slots))
            self.assertEqual(server.metric("hcache_model_requests_running", "a"), 1)
            stream.close()
            wait_until(lambda: server.metric("hcache_model_requests_running", "a") == 0,
                       "the end of an answer that nobody reads")
            wait_until(lambda: not any(slot["is_processing"]
                                       for slot in server.call("GET", "/slots?model=a")[1]),
                       "the end of its generation")
            self.assertEqual(server.stop(), 0)

    def test_protocols_and_headers(self):
        with Router() as server:
            answer = server.post("/v1/messages", {"model": "a", "messages": STORY, "max_tokens": 4})
            self.assertEqual((answer["type"], answer["model"]), ("message", "a"))
            lines = server.lines("/api/chat", {"model": "a:latest", "messages": STORY,
                                               "options": {"num_predict": 4}})
            self.assertTrue(lines[-1]["done"])
            events = server.stream("/v1/responses", {"model": "a", "input": "Hi",
                                                     "stream": True, "max_output_tokens": 4})
            self.assertEqual(events[-1][0], "response.incomplete")  # it was to be short
            status, answer, headers = server.call("POST", "/v1/chat/completions", {"model": "a"})
            self.assertEqual(status, 400)
            self.assertIn("messages", answer["error"]["message"])
            self.assertEqual(headers["Content-Type"], "application/json")
            self.assertEqual(server.call("HEAD", "/props?model=a")[0], 200)

    def test_api_keys(self):
        keys = {name: {"Authorization": f"Bearer {name}"} for name in ("one", "two")}
        with tempfile.NamedTemporaryFile("w") as file:
            file.write("two\n")
            file.flush()
            with Router("--api-key", "one", "--api-key-file", file.name) as server:
                body = {"model": "a", "messages": STORY, "max_tokens": 2, "session_id": "mine"}
                self.assertEqual(server.call("POST", "/v1/chat/completions", body)[0], 401)
                self.assertEqual(server.call("GET", "/v1/models")[0], 200)
                self.assertEqual(server.servers(), {})
                server.post("/v1/chat/completions", body, keys["one"])
                words = Path(f"/proc/{server.servers()['a']}/cmdline").read_text()
                self.assertNotIn("one", words.split("--", 1)[1])
                # Each key has state of its own in the model's server.
                for key, sessions in (("one", ["mine"]), ("two", [])):
                    listed = server.call("GET", "/v1/sessions?model=a", headers=keys[key])[1]
                    self.assertEqual([s["id"] for s in listed["data"]], sessions)
                self.assertEqual(server.stop(), 0)

    def test_ollama(self):
        with Router() as server:
            tags = server.call("GET", "/api/tags")[1]["models"]
            self.assertEqual([m["name"] for m in tags], ["a", "b", "c"])
            self.assertEqual(tags[0]["details"]["family"], "llama")
            self.assertEqual(server.call("GET", "/api/ps")[1]["models"], [])
            shown = server.post("/api/show", {"model": "b"})
            self.assertEqual(shown["model_info"]["general.architecture"], "llama")
            self.assertEqual(shown["model_info"]["llama.block_count"], 2)
            self.assertEqual(server.servers(), {})  # that loads none
            server.post("/api/generate", {"model": "b"})  # and this does
            self.assertEqual([m["name"] for m in server.call("GET", "/api/ps")[1]["models"]], ["b"])
            answer = server.post("/api/generate", {"model": "b", "keep_alive": 0})
            self.assertEqual((answer["done"], answer["done_reason"]), (True, "unload"))
            server.wait_for("b", "unloaded")
            self.assertEqual(server.call("POST", "/api/pull", {"model": "x"})[0], 501)


class Swapping(unittest.TestCase):
    def test_conversations_survive_the_swap(self):
        with Router("--models-max", "1") as server:
            talks = {name: serving.Conversation(2) for name in ("swapped", "stays")}
            # The same conversation, once in the model that stays, once with another model between.
            talks["stays"].step(server, model="a", cache_salt="stays", **CHOSEN)
            talks["stays"].step(server, model="a", cache_salt="stays", **CHOSEN)
            talks["swapped"].step(server, model="a", cache_salt="swapped", **CHOSEN)
            server.ask("b")
            self.assertEqual([server.status(m)["value"] for m in "ab"], ["unloaded", "loaded"])
            self.assertEqual(list(server.servers()), ["b"])
            talks["swapped"].step(server, model="a", cache_salt="swapped", **CHOSEN)
            self.assertEqual(list(server.servers()), ["a"])
            self.assertEqual(talks["swapped"].answers, talks["stays"].answers)
            self.assertEqual(talks["swapped"].cached, talks["swapped"].returned)
            self.assertGreater(talks["swapped"].cached, 50)
            self.assertEqual(server.metric("hcache_model_loads_total", "a"), 2)
            self.assertEqual(server.metric("hcache_model_unloads_total", "a"), 1)

    def test_one_that_answers_is_not_unloaded(self):
        with Router("--models-max", "1") as server:
            stream = Stream(server, "a")
            stream.event()
            answers = []
            asking = threading.Thread(target=lambda: answers.append(server.ask("b")))
            asking.start()
            wait_until(lambda: server.metric("hcache_model_requests_waiting", "b") == 1, "b's request")
            self.assertEqual(server.status("b")["value"], "loading")
            for _ in range(20):
                stream.event()
            self.assertEqual(server.status("a")["value"], "loaded")
            stream.close()  # now it may
            asking.join()
            self.assertEqual(answers[0]["model"], "b")
            self.assertEqual(server.status("a")["value"], "unloaded")

    def test_who_leaves_the_queue_costs_nobody_his_model(self):
        with Router("--models-max", "1") as server:
            stream = Stream(server, "a")
            stream.event()
            host, port = server.url.removeprefix("http://").split(":")
            waiting = http.client.HTTPConnection(host, int(port))
            waiting.request("POST", "/tokenize", json.dumps({"model": "b", "content": "x"}))
            wait_until(lambda: server.metric("hcache_model_requests_waiting", "b") == 1, "b's request")
            waiting.close()
            wait_until(lambda: server.metric("hcache_model_requests_waiting", "b") == 0, "its end")
            stream.close()
            wait_until(lambda: server.metric("hcache_model_requests_running", "a") == 0, "a's end")
            server.ask("a")
            self.assertEqual(server.metric("hcache_model_loads_total", "a"), 1)

    def test_requests_for_two_models_with_room_for_one(self):
        with Router("--models-max", "1") as server:
            answers: dict = {"a": [], "b": []}

            def ask(model: str) -> None:
                for _ in range(3):
                    answers[model].append(server.ask(model)["choices"][0]["message"]["content"])

            threads = [threading.Thread(target=ask, args=(model,)) for model in "abab"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for model, texts in answers.items():
                self.assertEqual(len(texts), 6, model)
                self.assertEqual(len(set(texts)), 1, model)
            self.assertLessEqual(len(server.servers()), 1)
            self.assertEqual(server.stop(), 0)

    def test_memory_limits_what_is_loaded(self):
        size = (Path(MODELS.name) / "a.gguf").stat().st_size
        with Router("--models-memory", str(2 * size)) as server:  # each has its KV cache, too
            server.ask("a")
            server.ask("b")
            self.assertEqual(list(server.servers()), ["b"])

    def test_idle_models_leave(self):
        # As llama-server's flag has it.
        with Router("--sleep-idle-seconds", "1") as server:
            talk = serving.Conversation(3)
            talk.step(server, model="a", **CHOSEN)
            server.wait_for("a", "unloaded")
            self.assertEqual(server.servers(), {})
            talk.step(server, model="a", **CHOSEN)
            self.assertGreater(talk.cached, 50)
            self.assertEqual(talk.cached, talk.returned)


    def test_the_only_model_leaves_too(self):
        with tempfile.TemporaryDirectory() as state, serving.Server(
                PROGRAM, "-m", str(Path(MODELS.name) / "a.gguf"), "--alias", "it", "--state-dir", state,
                "-t", "1", "--ctx", "2048", "--sleep-idle-seconds", "1", *STATE_COMES_BACK) as server:
            def value() -> str:
                return server.call("GET", "/v1/models")[1]["data"][0]["status"]["value"]

            talk = serving.Conversation(6)
            talk.step(server, **CHOSEN)  # any name, or none, is its own
            wait_until(lambda: value() == "unloaded", "its sleep")
            # What looks at it does not wake it.
            self.assertTrue(server.call("GET", "/props")[1]["is_sleeping"])
            self.assertIn("hcache_model_loaded", server.call("GET", "/metrics")[1])
            self.assertIn("<title>", server.call("GET", "/")[1])
            self.assertEqual(server.call("GET", "/v1/sessions")[0], 400)
            self.assertEqual((value(), server.call("GET", "/v1/models")[1]["data"][0]["id"]),
                             ("unloaded", "it"))
            talk.step(server, model="whatever", **CHOSEN)
            self.assertGreater(talk.cached, 50)
            self.assertEqual(talk.cached, talk.returned)
            self.assertEqual(server.stop(), 0)
            # With its state where it is without that option.
            self.assertTrue(Path(state, "store").is_dir())

    def test_a_model_with_a_batch_is_not_idle(self):
        with Router("--models-idle", "5") as server:
            lines = "".join(json.dumps({
                "custom_id": str(i), "method": "POST", "url": "/v1/completions",
                "body": {"prompt": f"{i}", "max_tokens": 600, "ignore_eos": True}}) + "\n"
                for i in range(16))
            file = self.upload(server, lines)
            batch = server.post("/v1/batches?model=a", {
                "input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"})
            path = Path(server.folder.name, "models", "a", "batches")
            wait_until(lambda: server.status("a")["value"] == "unloaded", "the end of the batch")
            self.assertEqual(server.metric("hcache_model_loads_total", "a"), 1)
            self.assertTrue(path.is_dir())
            done = server.call("GET", f"/v1/batches/{batch['id']}?model=a")[1]
            self.assertEqual((done["status"], done["request_counts"]["completed"]), ("completed", 16))

    @staticmethod
    def upload(server: Router, lines: str) -> str:
        """A file for a batch of model a; its id."""
        text = "\r\n".join(["--x", 'Content-Disposition: form-data; name="purpose"', "", "batch", "--x",
                            'Content-Disposition: form-data; name="file"; filename="b.jsonl"', "",
                            lines, "--x--", ""])
        request = urllib.request.Request(server.url + "/v1/files?model=a", text.encode(), {
            "Content-Type": "multipart/form-data; boundary=x"})
        with urllib.request.urlopen(request, timeout=300) as reply:
            return json.load(reply)["id"]


class Failing(unittest.TestCase):
    def test_a_killed_server_takes_nothing_else_along(self):
        with Router() as server:
            talk = serving.Conversation(4)
            talk.step(server, model="a", **CHOSEN)
            kept = Stream(server, "b")
            kept.event()
            torn = Stream(server, "a")
            torn.event()
            os.kill(server.servers()["a"], signal.SIGKILL)
            with self.assertRaises((http.client.HTTPException, ConnectionError, AssertionError)):
                while True:
                    torn.event()
            wait_until(lambda: server.status("a").get("failed"), "the failure")
            self.assertEqual(server.status("a"), {"value": "unloaded", "failed": True,
                                                  "exit_code": 128 + signal.SIGKILL})
            for _ in range(5):
                kept.event()
            kept.close()
            # It goes on with what was saved; the last second may have to be computed again.
            talk.step(server, model="a", **CHOSEN)
            self.assertEqual(server.metric("hcache_model_failures_total", "a"), 1)
            self.assertEqual(server.stop(), 0)

    def test_requests_that_were_not_answered_yet(self):
        with Router("--parallel", "1") as server:
            stream = Stream(server, "a")
            stream.event()
            results = []
            asking = threading.Thread(target=lambda: results.append(server.call(
                "POST", "/v1/chat/completions", {"model": "a", "messages": STORY, "max_tokens": 1})))
            asking.start()
            wait_until(lambda: server.metric("hcache_model_requests_running", "a") == 2, "both requests")
            os.kill(server.servers()["a"], signal.SIGKILL)
            asking.join()
            stream.close()
            status, answer, _ = results[0]
            self.assertEqual(status, 502, answer)
            self.assertIn("'a' went away", answer["error"]["message"])
            self.assertIn("signal 9", answer["error"]["message"])

    def test_the_end_saves_everything(self):
        with tempfile.TemporaryDirectory() as state:
            talks = {name: serving.Conversation(5) for name in ("a", "b")}
            with Router(state=state) as server:
                for model, talk in talks.items():
                    talk.step(server, model=model, **CHOSEN)
                servers = server.servers()
                self.assertEqual(server.stop(), 0)
                for pid in servers.values():
                    self.assertFalse(Path(f"/proc/{pid}").exists())
            with Router(state=state) as server:
                for model, talk in talks.items():
                    talk.step(server, model=model, **CHOSEN)
                    self.assertEqual(talk.cached, talk.returned)
                self.assertEqual(server.stop(), 0)

    def test_servers_do_not_outlive_the_router(self):
        with Router() as server:
            server.ask("a")
            pid = server.servers()["a"]
            server.kill()
            wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the model's server")

    def test_options_that_make_no_sense(self):
        for options, words in ((("-m", "x.gguf"), "--model"), (("--alias", "x"), "--alias"),
                               (("--models-preset", "x.ini"), "--models-preset")):
            done = subprocess.run([PROGRAM, "serve", "--models-dir", MODELS.name, *options],
                                  capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(words, done.stderr)
        with tempfile.TemporaryDirectory() as empty:
            done = subprocess.run([PROGRAM, "serve", "--models-dir", empty], capture_output=True,
                                  text=True, check=False)
            self.assertEqual(done.returncode, 3, done.stderr)
            self.assertIn("no GGUF", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
