#!/usr/bin/env python3
"""Ollama's API of `hcache serve` on the default model.

    ollama_test.py HCACHE [-v] [name]
"""

import json
import sys
import tempfile
import unittest
from datetime import datetime

import serving

PROGRAM = sys.argv.pop(1)
MODEL = serving.default_model()
HELLO = [{"role": "user", "content": "Name three colours."}]
BRIEF = {"temperature": 0, "num_predict": 12}


def start(folder: str, *options: str) -> serving.Server:
    return serving.Server(PROGRAM, "-m", MODEL, "--state-dir", folder, "-t", "2", "--ctx", "2048",
                          "--alias", "tiny", *options)


class Ollama(serving.OneServer):
    @classmethod
    def start(cls, folder: str) -> serving.Server:
        return start(folder)

    def refused(self, status: int, method: str, path: str, body: object = None) -> str:
        """The error's text, which is all that its body holds."""
        got, answer, _ = self.server.call(method, path, body)
        self.assertEqual((got, list(answer)), (status, ["error"]), answer)
        return answer["error"]

    def test_a_stream_of_lines_and_one_object_say_the_same(self):
        body = {"model": "tiny:latest", "messages": HELLO, "options": BRIEF}
        whole = self.server.post("/api/chat", {**body, "stream": False})
        lines = self.server.lines("/api/chat", body)
        self.assertEqual([line["done"] for line in lines], [False] * (len(lines) - 1) + [True])
        self.assertTrue(all(line["model"] == "tiny:latest" for line in lines))
        self.assertEqual("".join(line["message"]["content"] for line in lines),
                         whole["message"]["content"])
        last = lines[-1]
        for end in (last, whole):
            self.assertEqual((end["done_reason"], end["eval_count"]), ("length", 12))
            self.assertGreaterEqual(end["total_duration"], end["eval_duration"])
            self.assertGreater(end["eval_duration"], 1_000_000)  # nanoseconds
            self.assertLess(end["total_duration"], 300e9)
        self.assertEqual(last["prompt_eval_count"], whole["prompt_eval_count"])
        # The second one's prompt was in memory.
        self.assertGreater(last["hcache"]["tokens"]["resident"], 0)
        datetime.fromisoformat(last["created_at"].replace("Z", "+00:00"))
        openai = self.server.chat(HELLO, max_tokens=12)
        self.assertEqual(openai["choices"][0]["message"]["content"], whole["message"]["content"])

    def test_options_formats_and_logprobs(self):
        def ask(**fields) -> dict:
            return self.server.post("/api/chat", {"messages": HELLO, "stream": False, **fields})

        text = ask(options=BRIEF)["message"]["content"]
        word = text.split()[2]
        cut = ask(options={**BRIEF, "stop": [word], "num_ctx": 64})
        self.assertEqual((cut["message"]["content"], cut["done_reason"]),
                         (text[:text.index(word)], "stop"))
        schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}},
                  "required": ["colour"], "additionalProperties": False}
        answer = ask(format=schema, options={"temperature": 0, "num_predict": 40})
        self.assertIn(json.loads(answer["message"]["content"])["colour"], ("red", "blue"))
        likely = ask(logprobs=True, top_logprobs=2, options=BRIEF)["logprobs"]
        self.assertEqual(len(likely), 12)
        self.assertEqual("".join(token["token"] for token in likely), text)
        self.assertTrue(all(len(token["top_logprobs"]) == 2 for token in likely))

    def test_prompts(self):
        chat = self.server.post("/api/chat", {"messages": HELLO, "stream": False, "options": BRIEF})
        body = {"model": "tiny", "prompt": HELLO[0]["content"], "options": BRIEF}
        lines = self.server.lines("/api/generate", body)
        text = "".join(line["response"] for line in lines)
        self.assertEqual(text, chat["message"]["content"])
        self.assertEqual(lines[-1]["eval_count"], 12)
        raw = self.server.post("/api/generate", {**body, "raw": True, "prompt": "The sea is",
                                                 "stream": False})
        plain = self.server.post("/completion", {"prompt": "The sea is", "n_predict": 12,
                                                 "temperature": 0})
        self.assertEqual(raw["response"], plain["content"])
        systems = [self.server.post("/api/generate", {**body, "stream": False, "system": system})
                   for system in ("You are a pirate.", "You are a poet.")]
        self.assertEqual([s["prompt_eval_count"] for s in systems], [
            self.server.post("/v1/chat/completions/input_tokens", {"messages": [
                {"role": "system", "content": system}, *HELLO]})["input_tokens"]
            for system in ("You are a pirate.", "You are a poet.")])
        self.assertIn("gap", self.refused(501, "POST", "/api/generate", {**body, "suffix": "end"}))

    def test_tools(self):
        tool = {"type": "function", "function": {
            "name": "weather", "parameters": {
                "type": "object", "properties": {"city": {"type": "string"}},
                "required": ["city"]}}}
        messages = serving.weather_questions()
        body = {"messages": messages, "tools": [tool],
                "options": {"temperature": 0, "num_predict": 60}}
        whole = self.server.post("/api/chat", {**body, "stream": False})
        calls = whole["message"]["tool_calls"]
        self.assertEqual(calls[0]["function"]["name"], "weather")
        self.assertEqual(calls[0]["function"]["arguments"], {"city": "Bergen"})
        told = [line["message"]["tool_calls"] for line in self.server.lines("/api/chat", body)
                if "tool_calls" in line["message"]]
        self.assertEqual([[call["function"] for call in calls] for calls in told],
                         [[call["function"] for call in calls]])
        # The call and its result go back.
        messages += [whole["message"], {"role": "tool", "tool_name": "weather", "content": "rain"}]
        again = self.server.post("/api/chat", {**body, "messages": messages, "stream": False})
        self.assertGreater(again["hcache"]["tokens"]["resident"], 0)

    def test_requests_that_only_load(self):
        for path, body in (("/api/chat", {"messages": []}), ("/api/chat", {}),
                           ("/api/generate", {"prompt": ""}), ("/api/generate", {"keep_alive": 0})):
            answer = self.server.post(path, {"model": "tiny", **body})
            self.assertEqual((answer["model"], answer["done"], answer["done_reason"]),
                             ("tiny", True, "load"))

    def test_the_model(self):
        self.assertEqual(self.server.call("HEAD", "/")[0], 200)  # what the command line asks first
        version = self.server.call("GET", "/api/version")[1]
        self.assertRegex(version["version"], r"^\d+\.\d+\.\d+$")
        listed = self.server.call("GET", "/api/tags")[1]["models"]
        running = self.server.call("GET", "/api/ps")[1]["models"]
        self.assertEqual([m["name"] for m in listed + running], ["tiny", "tiny"])
        meta = self.server.call("GET", "/v1/models")[1]["data"][0]["meta"]
        self.assertEqual((listed[0]["size"], running[0]["context_length"]),
                         (meta["size"], 2048))
        self.assertEqual(running[0]["size_vram"], 0)
        self.assertRegex(listed[0]["digest"], r"^[0-9a-f]{64}$")
        self.assertEqual(listed[0]["details"]["family"], "llama")
        self.assertRegex(listed[0]["details"]["parameter_size"], r"^\d+\.\dM$")
        for body in ({"model": "tiny"}, {"model": "tiny:latest"}, {"name": "tiny"}):
            shown = self.server.post("/api/show", body)
            self.assertEqual(shown["model_info"]["llama.context_length"], 2048)
            self.assertEqual(shown["capabilities"], ["completion", "tools"])
            self.assertIn("<|im_start|>", shown["template"])
        self.assertIn("other", self.refused(404, "POST", "/api/show", {"model": "other"}))

    def test_refusals(self):
        self.assertIn("--mmproj", self.refused(400, "POST", "/api/chat", {
            "messages": [{"role": "user", "content": "What is this?", "images": ["iVBORw0KGgo="]}]}))
        self.assertIn("messages[0].role", self.refused(400, "POST", "/api/chat",
                                                       {"messages": [{"content": "x"}]}))
        self.refused(400, "POST", "/api/show", {})
        self.refused(404, "GET", "/api/none")
        self.refused(405, "GET", "/api/chat")
        for path in ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/blobs/sha256:0"):
            self.refused(501, "POST", path, {"model": "tiny"})
        self.refused(501, "DELETE", "/api/delete", {"model": "tiny"})
        too_long = self.refused(400, "POST", "/api/chat", {
            "messages": [{"role": "user", "content": serving.TEXT[:20000]}]})
        self.assertIn("truncation", too_long)


class Keys(unittest.TestCase):
    def test_keys_hold_here_too(self):
        with tempfile.TemporaryDirectory() as folder, start(folder, "--api-key", "secret") as server:
            status, answer, _ = server.call("GET", "/api/tags")
            self.assertEqual((status, list(answer)), (401, ["error"]))
            self.assertIsInstance(answer["error"], str)
            key = {"Authorization": "Bearer secret"}
            self.assertEqual(server.call("GET", "/api/tags", headers=key)[0], 200)
            answer = server.post("/api/chat", {
                "messages": HELLO, "stream": False, "session_id": "mine", "options": BRIEF}, key)
            self.assertTrue(answer["message"]["content"])
            sessions = server.call("GET", "/v1/sessions", headers=key)[1]["data"]
            self.assertEqual([s["id"] for s in sessions], ["mine"])
            self.assertEqual(server.stop(), 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
