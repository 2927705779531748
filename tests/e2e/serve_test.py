#!/usr/bin/env python3
"""`hcache serve` on the real default model: protocols, conversations that return, isolation, stop.

    serve_test.py HCACHE [-v] [name]

On another device (HCACHE_TEST_DEVICE) with two random layers of its shape.
"""

import http.client
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import serving
from serving import LOST, STATE_COMES_BACK, Conversation, Server, wait_until

PROGRAM = sys.argv.pop(1)
MODEL_FOLDER = tempfile.TemporaryDirectory()
MODEL = serving.model_for_device(PROGRAM, MODEL_FOLDER.name)


def start(folder: str, *options: str, **kwargs) -> Server:
    return Server(PROGRAM, "-m", MODEL, "--device", serving.DEVICE, "--state-dir", folder, "-t", "2",
                  *options, **kwargs)


def request_lines(server: Server) -> list:
    """What the server has logged of requests that ended."""
    return [dict(field.split("=", 1) for field in shlex.split(line)[3:])
            for line in server.errors().splitlines() if " info: request " in line]


@serving.not_in_software
class Protocols(unittest.TestCase):
    """One server for all: they leave nothing behind that another one could see."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.server = start(cls.folder.name, "--ctx", "2048", "--alias", "tiny")

    @classmethod
    def tearDownClass(cls):
        with cls.server:
            code = cls.server.stop()
            errors = cls.server.errors()
        cls.folder.cleanup()
        assert code == 0, f"exit code {code}: {errors}"

    def ask(self, text: str, **fields) -> dict:
        return self.server.chat([{"role": "user", "content": text}], **fields)

    def test_a_whole_answer_and_a_stream_say_the_same(self):
        body = {"messages": [{"role": "user", "content": "Name three colours."}],
                "temperature": 0, "max_tokens": 16}
        whole = self.server.post("/v1/chat/completions", body)
        events = self.server.stream("/v1/chat/completions", {
            **body, "stream": True, "stream_options": {"include_usage": True}})
        self.assertEqual(events[-1][1], "[DONE]")
        chunks = [data for _, data in events[:-1]]
        text = "".join(c["choices"][0]["delta"].get("content") or ""
                       for c in chunks if c["choices"])
        self.assertEqual(text, whole["choices"][0]["message"]["content"])
        usage = chunks[-1]["usage"]
        self.assertEqual(usage["prompt_tokens"], whole["usage"]["prompt_tokens"])
        self.assertGreater(usage["prompt_tokens_details"]["cached_tokens"], 0)
        self.assertEqual(sum(whole["hcache"]["tokens"].values()), whole["usage"]["prompt_tokens"])
        self.assertGreater(whole["timings"]["predicted_per_second"], 0)

    def test_choices_logprobs_stop_and_length(self):
        answer = self.ask("Name a colour.", n=2, temperature=1, seed=4, max_tokens=5, logprobs=True,
                          top_logprobs=2)
        self.assertEqual([c["index"] for c in answer["choices"]], [0, 1])
        content = answer["choices"][0]["logprobs"]["content"]
        self.assertEqual(len(content), 5)
        self.assertEqual(len(content[0]["top_logprobs"]), 2)
        self.assertLessEqual(content[0]["logprob"], 0)
        self.assertEqual(answer["choices"][0]["finish_reason"], "length")
        whole = self.ask("Count from one to five in words.", max_tokens=24)
        text = whole["choices"][0]["message"]["content"]
        word = text.split()[1]
        cut = self.ask("Count from one to five in words.", max_tokens=24, stop=[word])
        self.assertEqual(cut["choices"][0]["message"]["content"], text[:text.index(word)])
        self.assertEqual(cut["choices"][0]["finish_reason"], "stop")

    def test_json_schema_is_followed(self):
        schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}},
                  "required": ["colour"], "additionalProperties": False}
        answer = self.ask("Red or blue?", max_tokens=40, response_format={
            "type": "json_schema", "json_schema": {"name": "c", "schema": schema, "strict": True}})
        parsed = json.loads(answer["choices"][0]["message"]["content"])
        self.assertIn(parsed["colour"], ("red", "blue"))

    def test_a_required_tool_is_called(self):
        tool = {"type": "function", "function": {
            "name": "set_light", "parameters": {
                "type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}}}
        answer = self.ask("Switch the light on.", tools=[tool], tool_choice="required",
                          max_tokens=60)
        call = answer["choices"][0]["message"]["tool_calls"][0]
        self.assertEqual(call["function"]["name"], "set_light")
        self.assertIsInstance(json.loads(call["function"]["arguments"])["on"], bool)

    def test_completions_and_responses(self):
        text = self.server.post("/v1/completions", {"prompt": "The sea is", "max_tokens": 4,
                                                    "temperature": 0})["choices"][0]["text"]
        ids = self.server.post("/tokenize", {"content": "The sea is"})["tokens"]
        again = self.server.post("/v1/completions", {"prompt": ids, "max_tokens": 4,
                                                     "temperature": 0})
        self.assertEqual(again["choices"][0]["text"], text)
        llama = self.server.post("/completion", {"prompt": "The sea is", "n_predict": 4,
                                                 "temperature": 0})
        self.assertEqual(llama["content"], text)
        self.assertEqual(llama["stop_type"], "limit")
        first = self.server.post("/v1/responses", {"input": "My name is Ada. Remember it.",
                                                   "temperature": 0, "max_output_tokens": 12})
        second = self.server.post("/v1/responses", {
            "input": "What is my name?", "previous_response_id": first["id"], "temperature": 0,
            "max_output_tokens": 12})
        self.assertGreater(second["usage"]["input_tokens_details"]["cached_tokens"], 20)
        likely = self.server.post("/v1/responses", {
            "input": "What is my name?", "temperature": 0, "max_output_tokens": 4,
            "top_logprobs": 3})["output"][0]["content"][0]
        self.assertEqual("".join(t["token"] for t in likely["logprobs"]), likely["text"])
        self.assertTrue(all(len(t["top_logprobs"]) == 3 for t in likely["logprobs"]))
        status, error, _ = self.server.call("POST", "/v1/responses", {
            "input": "x", "previous_response_id": "resp_none"})
        self.assertEqual(status, 404)
        self.assertIn("resp_none", error["error"]["message"])

    def test_messages(self):
        body = {"model": "tiny", "max_tokens": 8, "temperature": 0,
                "messages": [{"role": "user", "content": "Say hi."}]}
        whole = self.server.post("/v1/messages", body)
        self.assertEqual(whole["type"], "message")
        events = self.server.stream("/v1/messages", {**body, "stream": True})
        self.assertEqual(events[0][0], "message_start")
        self.assertEqual(events[-1][0], "message_stop")
        text = "".join(d["delta"]["text"] for n, d in events
                       if n == "content_block_delta" and d["delta"]["type"] == "text_delta")
        self.assertEqual(text, whole["content"][0]["text"])
        count = self.server.post("/v1/messages/count_tokens", {
            "model": "tiny", "messages": body["messages"]})
        usage = whole["usage"]
        self.assertEqual(count["input_tokens"], usage["input_tokens"] +
                         usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"])

    def test_an_agents_header_keeps_nothing_from_coming_back(self):
        # Claude Code begins its system prompt so, with other numbers in every request.
        system = serving.TEXT[3000:5000]
        cached = []
        for number in ("a5145", "0f3c2"):
            header = f"x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch={number};"
            answer = self.server.post("/v1/messages", {
                "system": [{"type": "text", "text": header}, {"type": "text", "text": system}],
                "messages": [{"role": "user", "content": "Who waved?"}], "max_tokens": 4})
            cached.append(answer["usage"]["cache_read_input_tokens"])
        self.assertEqual(cached[0], 0)
        self.assertGreater(cached[1], 300)

    def test_what_llama_servers_clients_ask_for(self):
        messages = [{"role": "user", "content": serving.TEXT[:1500]}]
        tokens = self.server.post("/v1/chat/completions/input_tokens",
                                  {"messages": messages})["input_tokens"]
        self.assertEqual(self.server.post("/responses/input_tokens", {"input": messages})["input_tokens"],
                         tokens)
        events = self.server.stream("/v1/chat/completions", {
            "messages": messages, "stream": True, "max_tokens": 3, "return_progress": True,
            "timings_per_token": True, "cache_salt": "progress"})
        told = [data["prompt_progress"] for _, data in events
                if isinstance(data, dict) and "prompt_progress" in data]
        self.assertGreater(len(told), 1)
        self.assertEqual((told[0]["processed"], told[-1]["processed"], told[-1]["total"]),
                         (0, tokens, tokens))
        processed = [one["processed"] for one in told]
        self.assertEqual(processed, sorted(set(processed)))

        answer = self.server.chat(messages, max_tokens=2, verbose=True)
        self.assertIn(serving.TEXT[:1500], answer["__verbose"]["prompt"])
        self.assertNotIn("__verbose", self.server.chat(messages, max_tokens=2))
        answer = self.server.post("/completion", {
            "prompt": "Count: one, two,", "n_predict": 2, "n_probs": 3, "post_sampling_probs": True,
            "seed": 1, "response_fields": ["completion_probabilities", "generation_settings/seed"]})
        self.assertEqual(set(answer), {"completion_probabilities", "generation_settings/seed"})
        for token in answer["completion_probabilities"]:
            self.assertTrue(0 < token["prob"] <= 1)
            self.assertIn(len(token["top_probs"]), (1, 2, 3))
            self.assertGreaterEqual(token["top_probs"][0]["prob"], token["prob"])
        if serving.DEVICE == "cpu":  # random weights need not write whole characters
            # Texts stand for their tokens.
            ask = {"prompt": "Hello", "n_predict": 1, "temperature": 0}
            word = self.server.post("/completion", ask)["content"]
            other = self.server.post("/completion", {**ask, "logit_bias": [[word, False]]})["content"]
            self.assertNotEqual(word, other)
        self.assertEqual(self.server.call("POST", "/infill", {"input_prefix": "a",
                                                              "input_suffix": "b"})[0], 501)
        self.assertEqual(self.server.call("GET", "/lora-adapters")[:2], (200, []))
        self.assertIn("llamacpp:tokens_predicted_total ", self.server.call("GET", "/metrics")[1])

    def test_a_prompt_that_is_too_long_says_by_how_much(self):
        status, answer = self.server.call("POST", "/v1/chat/completions", {
            "messages": [{"role": "user", "content": serving.TEXT[:20000]}], "max_tokens": 1})[:2]
        error = answer["error"]
        self.assertEqual((status, error["type"], error["code"]),
                         (400, "exceed_context_size_error", "context_length_exceeded"))
        self.assertGreater(error["n_prompt_tokens"], error["n_ctx"])

    def test_the_small_endpoints(self):
        self.assertEqual(self.server.call("GET", "/health")[0], 200)
        models = self.server.call("GET", "/v1/models")[1]
        self.assertEqual(models["data"][0]["id"], "tiny")
        self.assertEqual(self.server.call("GET", "/v1/models/none")[0], 404)
        tokens = self.server.post("/tokenize", {"content": "Hello world"})["tokens"]
        self.assertEqual(self.server.post("/detokenize", {"tokens": tokens})["content"],
                         "Hello world")
        prompt = self.server.post("/apply-template", {
            "messages": [{"role": "user", "content": "Hi"}]})["prompt"]
        self.assertIn("<|im_start|>user\nHi<|im_end|>", prompt)
        self.assertIn("chat_template", self.server.call("GET", "/props")[1])
        self.assertIsInstance(self.server.call("GET", "/slots")[1], list)
        self.assertIn("openapi", self.server.call("GET", "/openapi.json")[1])
        self.ask("Hi.", max_tokens=2)
        self.assertIn("hcache_ttft_seconds_count", self.server.call("GET", "/metrics")[1])
        self.assertGreater(self.server.call("GET", "/v1/store")[1]["chunks"], -1)
        self.assertTrue(self.server.call("POST", "/v1/store/verify")[1]["ok"])

    def test_errors_name_the_place(self):
        for body, words in (({}, "messages"), ({"messages": 5}, "messages"),
                            ({"messages": [{"role": "user", "content": 5}]},
                             "messages[0].content"),
                            ({"messages": [{"role": "user", "content": "x"}], "temperature": "hot"},
                             "temperature")):
            status, answer, _ = self.server.call("POST", "/v1/chat/completions", body)
            self.assertEqual(status, 400)
            self.assertIn(words, answer["error"]["message"])
        status, answer, _ = self.server.call("POST", "/v1/chat/completions", {
            "messages": [{"role": "user", "content": serving.TEXT}]})
        self.assertEqual(status, 400)
        self.assertIn("2048", answer["error"]["message"])
        self.assertEqual(self.server.call("GET", "/nothing")[0], 404)
        self.assertEqual(self.server.call("GET", "/v1/chat/completions")[0], 405)

    def test_how_long_and_where_state_is_kept(self):
        def messages(name):
            return [{"role": "user", "content": f"Keep {name}. " + serving.TEXT[:600]}]

        def session(name, **fields):
            self.server.chat(messages(name), max_tokens=2, session_id=name, **fields)
            return self.server.call("GET", f"/v1/sessions/{name}")[1]

        def tokens(name):
            prompt = self.server.post("/apply-template", {"messages": messages(name)})["prompt"]
            return self.server.post("/tokenize", {"content": prompt})["tokens"]

        day = session("day", prompt_cache_retention="24h", prompt_cache_key="k")
        self.assertGreater(day["kept_until"] - time.time(), 23 * 3600)
        self.assertEqual(day["prompt_cache_key"], "k")
        memory = session("memory", prompt_cache_retention="in_memory")
        self.assertIsNone(memory["kept_until"])

        def saved(name):
            return self.server.call("GET", f"/v1/sessions/{name}")[1]["saved_tokens"]

        wait_until(lambda: saved("day") > 64, "the day's conversation is on disk")
        # All that is saved of it is what the other one begins with as well.
        shared = len(os.path.commonprefix([tokens("day"), tokens("memory")]))
        self.assertEqual(saved("memory"), shared)

    def test_sessions_are_named_pinned_renamed_and_deleted(self):
        self.ask("This one has a name.", session_id="named", max_tokens=3)
        session = self.server.call("GET", "/v1/sessions/named")[1]
        self.assertIn("This one has a name.", session["text"])
        changed = self.server.call("PATCH", "/v1/sessions/named", {"pinned": True, "ttl_s": 60})
        self.assertEqual(changed[0], 200)
        self.assertTrue(changed[1]["pinned"])
        self.assertIsNotNone(changed[1]["expires"])
        self.assertEqual(self.server.call("PATCH", "/v1/sessions/named", {"id": "other"})[0], 200)
        names = [s["id"] for s in self.server.call("GET", "/v1/sessions")[1]["data"]]
        self.assertIn("other", names)
        self.assertNotIn("named", names)
        self.assertEqual(self.server.call("PATCH", "/v1/sessions/other", {"ttl_s": -1})[0], 400)
        self.assertEqual(self.server.call("DELETE", "/v1/sessions/other")[0], 200)
        self.assertEqual(self.server.call("DELETE", "/v1/sessions/other")[0], 404)


class Returning(unittest.TestCase):
    def test_text_that_does_not_tokenise_to_what_was_generated(self):
        # A reply whose tokens are forced apart by a grammar: "a" "b" "c", not "abc".
        with tempfile.TemporaryDirectory() as folder, start(folder, "--ctx", "2048") as server:
            first = server.post("/completion", {
                "prompt": "Letters:", "n_predict": 12, "temperature": 1, "seed": 3,
                "grammar": 'root ::= [a-c] [a-c] [a-c] [a-c] [a-c] [a-c] [a-c] [a-c]',
                "return_tokens": True})
            text = "Letters:" + first["content"]
            split = server.post("/tokenize", {"content": text})["tokens"]
            chain = server.post("/tokenize", {"content": "Letters:"})["tokens"] + first["tokens"]
            self.assertNotEqual(split, chain, "the reply happens to survive the round trip")
            again = server.post("/completion", {"prompt": text + " are", "n_predict": 2,
                                                "temperature": 0})
            self.assertGreaterEqual(again["timings"]["cache_n"], len(chain) - 1)

    @serving.not_in_software
    def test_twelve_conversations_survive_a_small_arena_and_a_kill(self):
        with tempfile.TemporaryDirectory() as folder, \
                start(folder, "--ctx", "8192", "--no-store") as server:
            undisturbed = [Conversation(i) for i in range(12)]
            for conversation in undisturbed:
                while not conversation.done():
                    conversation.step(server)
        with tempfile.TemporaryDirectory() as folder:
            # Three of them fit: each ends with about 430 tokens.
            options = ["--ctx", "1408", "--parallel", "4", "--flush-interval", "100ms",
                       *STATE_COMES_BACK]
            servers = [start(folder, *options)]
            conversations = [Conversation(i) for i in range(12)]
            answered = threading.Semaphore(0)
            failures = []

            def hold(own):
                lost = 0
                try:
                    while not all(c.done() for c in own):
                        for conversation in own:  # by turns, so that all of them come back
                            while not conversation.done():
                                try:
                                    conversation.step(servers[-1])
                                    answered.release()
                                    break
                                except LOST:
                                    lost += 1
                                    self.assertLess(lost, 600, "the server does not come back")
                                    time.sleep(0.2)
                except Exception as error:  # shown by the main thread
                    failures.append(error)
                    raise

            threads = [threading.Thread(target=hold, args=(conversations[i::4],))
                       for i in range(4)]
            for thread in threads:
                thread.start()
            for n in range(18):  # half of all answers
                for _ in range(600):
                    if answered.acquire(timeout=1):
                        break
                    self.assertFalse(failures)
                else:
                    self.fail(f"only {n} answers came")
            time.sleep(1)  # what was complete before this is on disk
            servers[-1].kill()
            servers.append(start(folder, *options))
            self.addCleanup(servers[0].log.close)
            for thread in threads:
                thread.join()
            self.assertFalse(failures)
            for ours, theirs in zip(conversations, undisturbed, strict=True):
                self.assertEqual(ours.answers, theirs.answers)
            cached = sum(c.cached for c in conversations)
            returned = sum(c.returned for c in conversations)
            self.assertGreaterEqual(cached / returned, 0.95)
            with servers[-1]:
                self.assertEqual(servers[-1].stop(), 0, servers[-1].errors())

    def test_cache_prompt_false_computes_everything_anew(self):
        body = {"prompt": serving.TEXT[:1500], "max_tokens": 8, "temperature": 0}
        with tempfile.TemporaryDirectory() as folder:
            with start(folder, "--ctx", "2048") as server:
                expected = server.post("/v1/completions", body)["choices"][0]["text"]
                # What is in the arena, and what is on disk, when it could be restored from there.
                resident = server.post("/v1/completions", {**body, "cache_prompt": False})
                self.assertEqual(server.stop(), 0)
            with start(folder, "--ctx", "2048") as server:
                saved = server.post("/v1/completions", {**body, "cache_prompt": False})
                cached = server.post("/v1/completions", body)
                self.assertEqual(server.stop(), 0)
        for anew in (resident, saved):
            self.assertEqual(anew["choices"][0]["text"], expected)
            tokens = anew["hcache"]["tokens"]
            self.assertEqual(tokens["new"], anew["usage"]["prompt_tokens"], tokens)
            self.assertEqual(anew["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
        self.assertEqual(cached["choices"][0]["text"], expected)
        self.assertGreater(cached["usage"]["prompt_tokens_details"]["cached_tokens"], 100)

    def test_guessed_tokens_change_no_answer(self):
        # A passage and the beginning of a copy: what follows stands in the prompt.
        passage = serving.TEXT[:600]
        body = {"prompt": f"{passage}\n\n{passage[:200]}", "n_predict": 48, "temperature": 0}
        answers = []
        for draft in ("0", "16"):
            with tempfile.TemporaryDirectory() as folder, \
                    start(folder, "--ctx", "2048", "--draft-max", draft) as server:
                answers.append(server.post("/completion", body))
                off = server.post("/completion", {**body, "speculative.n_max": 0, "cache_prompt": False})
                metrics = server.call("GET", "/metrics")[1]
                self.assertEqual(server.stop(), 0)
            self.assertEqual(off["content"], answers[0]["content"])
            self.assertNotIn("draft_n", off["timings"])
        plain, drafted = answers
        self.assertEqual(drafted["content"], plain["content"])
        self.assertNotIn("draft_n", plain["timings"])
        timings = drafted["timings"]
        self.assertGreater(timings["draft_n_accepted"], 0)
        self.assertGreaterEqual(timings["draft_n"], timings["draft_n_accepted"])
        self.assertIn(f'hcache_drafted_tokens_total{{accepted="yes"}} {timings["draft_n_accepted"]}',
                      metrics)

    def test_host_memory_comes_before_the_disk(self):
        self.check_host_memory()

    @serving.not_in_software
    def test_host_memory_may_lie_in_a_file(self):
        with tempfile.TemporaryDirectory() as place:
            self.check_host_memory("--dram-place", place)

    def check_host_memory(self, *options):
        with tempfile.TemporaryDirectory() as folder, \
                start(folder, "--ctx", "512", "--dram", "256MiB", *options,
                      *STATE_COMES_BACK) as server:
            conversations = [Conversation(i, rounds=2) for i in range(3)]
            for _ in range(2):
                for conversation in conversations:
                    conversation.step(server)
            tiers = server.call("GET", "/v1/store")[1]["tiers"]
            self.assertGreater(tiers["dram"]["hits"], 0, server.errors())
            self.assertGreater(tiers["dram"]["used_bytes"], 0)


@serving.not_in_software
class Isolation(unittest.TestCase):
    def test_keys_share_nothing(self):
        with tempfile.TemporaryDirectory() as folder, \
                start(folder, "--ctx", "2048", "--api-key", "alpha,beta") as server:
            messages = [{"role": "user", "content": serving.TEXT[:1200]}]
            body = {"messages": messages, "max_tokens": 2, "temperature": 0}
            self.assertEqual(server.call("POST", "/v1/chat/completions", body)[0], 401)

            def cached(key):
                usage = server.post("/v1/chat/completions", body,
                                    {"Authorization": f"Bearer {key}"})["usage"]
                return usage["prompt_tokens_details"]["cached_tokens"]

            self.assertEqual(cached("alpha"), 0)
            self.assertGreater(cached("alpha"), 100)
            self.assertEqual(cached("beta"), 0)
            mine = server.call("GET", "/v1/sessions", headers={"x-api-key": "alpha"})[1]["data"]
            self.assertEqual(len(mine), 1)
            name = mine[0]["id"]
            theirs = server.call("GET", f"/v1/sessions/{name}", headers={"x-api-key": "beta"})
            self.assertNotIn("text", theirs[1])

    def test_a_key_keeps_to_its_quota(self):
        with tempfile.TemporaryDirectory() as folder:
            def talk(server, key, text, salt=""):
                body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2,
                        "temperature": 0, "cache_salt": salt}
                usage = server.post("/v1/chat/completions", body,
                                    {"Authorization": f"Bearer {key}"})["usage"]
                return usage["prompt_tokens_details"]["cached_tokens"]

            def used(server, key):
                return server.call("GET", "/v1/store", headers={"x-api-key": key})[1]["key"]

            texts = [f"{i} " + serving.TEXT[100 * i:100 * i + 1200] for i in range(4)]
            options = ("--ctx", "2048", "--api-key", "alpha,beta", *serving.STATE_COMES_BACK)
            with start(folder, *options) as server:
                talk(server, "beta", texts[0])
                talk(server, "alpha", texts[0])
                server.stop()
            with start(folder, *options) as server:
                one = used(server, "alpha")["used_bytes"]
                self.assertGreater(one, 1000)
                server.stop()
            quota = one * 5 // 2
            with start(folder, *options, "--quota-per-key", str(quota)) as server:
                for i, text in enumerate(texts[1:]):
                    talk(server, "alpha", text, salt=f"user {i}")
                server.stop()
            with start(folder, *options, "--quota-per-key", str(quota)) as server:
                mine = used(server, "alpha")
                self.assertEqual(mine["quota_bytes"], quota)
                self.assertGreater(mine["used_bytes"], one)
                self.assertLessEqual(mine["used_bytes"], quota)
                self.assertGreater(talk(server, "beta", texts[0]), 100)  # the oldest of all
                self.assertGreater(talk(server, "alpha", texts[3], salt="user 2"), 100)
                self.assertEqual(talk(server, "alpha", texts[0]), 0)

    def test_a_salt_in_the_request_isolates_too(self):
        with tempfile.TemporaryDirectory() as folder, start(folder, "--ctx", "2048") as server:
            messages = [{"role": "user", "content": serving.TEXT[:1200]}]

            def cached(**fields):
                usage = server.chat(messages, max_tokens=2, **fields)["usage"]
                return usage["prompt_tokens_details"]["cached_tokens"]

            self.assertEqual(cached(cache_salt="a"), 0)
            self.assertEqual(cached(cache_salt="b"), 0)
            self.assertEqual(cached(), 0)
            self.assertGreater(cached(cache_salt="a"), 100)


@serving.not_in_software
class Operating(unittest.TestCase):
    """What llama-server's flags, logs, metrics and browsers get."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.server = start(cls.folder.name, "-np", "2", "-ub", "64", "-fa", "on", "-ngl", "99",
                           "--jinja", "-ctk", "q8_0", "-ctv", "q8_0", "-n", "3", "-s", "7",
                           "--no-slots", "--no-jinja", "--mirostat", "0",
                           env={"LLAMA_ARG_CTX_SIZE": "2048", "LLAMA_ARG_CACHE_RAM": "64"})

    @classmethod
    def tearDownClass(cls):
        with cls.server:
            cls.server.stop()
        cls.folder.cleanup()

    def metric(self, name):
        text = self.server.call("GET", "/metrics")[1]
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
                   if line.startswith(name))

    def test_llama_servers_flags(self):
        notes = self.server.errors()
        for flag in ("-fa", "--jinja", "--no-jinja"):
            self.assertIn(f"hcache: {flag} is ignored: ", notes)
        if serving.DEVICE == "cpu":
            self.assertIn("--gpu-layers does nothing: --device cpu names no device but the CPU", notes)
        self.assertIn("hcache: -c 2048 -np 2: a conversation may have 1024 tokens", notes)
        status, answer = self.server.call("GET", "/slots")[:2]
        self.assertEqual((status, answer["error"]["code"]), (501, "unimplemented"))
        props = self.server.call("GET", "/props")[1]
        self.assertEqual((props["total_slots"], props["default_generation_settings"]["n_ctx"],
                          props["default_generation_settings"]["params"]["seed"]), (2, 1024, 7))
        self.assertEqual(self.metric("hcache_arena_cells"), 2048)
        self.assertEqual(
            self.server.call("GET", "/v1/store")[1]["tiers"]["dram"]["capacity_bytes"], 64 << 20)
        messages = [{"role": "user", "content": "Count to a thousand."}]
        self.assertEqual(self.server.chat(messages)["usage"]["completion_tokens"], 3)
        self.assertEqual(self.server.chat(messages, max_tokens=5)["usage"]["completion_tokens"], 5)
        for options in (["-ctk", "q8_0"], ["--lora-scaled", "x"], ["-np"], ["--evict-policy", "mru"],
                        ["--dram", "1MiB", "--dram-place", "/dev/null"]):
            done = subprocess.run([PROGRAM, "serve", "-m", MODEL, *options], capture_output=True,
                                  text=True, timeout=60)
            self.assertEqual(done.returncode, 2, done.stderr)

    def test_the_seed_of_requests_that_name_none(self):
        body = {"prompt": "Once upon a time", "n_predict": 3, "temperature": 2}
        with_default = {self.server.post("/completion", body)["content"] for _ in range(3)}
        self.assertEqual(len(with_default), 1)
        named = self.server.post("/completion", {**body, "seed": 7})["content"]
        self.assertEqual(with_default, {named})
        others = {self.server.post("/completion", {**body, "seed": -1, "n_predict": 12})["content"]
                  for _ in range(3)}
        self.assertGreater(len(others), 1)

    def test_every_reply_has_a_line(self):
        before = len(request_lines(self.server))
        answer = self.server.chat([{"role": "user", "content": "Chrysanthemum."}], n=2)
        wait_until(lambda: len(request_lines(self.server)) == before + 2, "two lines")
        lines = request_lines(self.server)[before:]
        self.assertEqual({line["choice"] for line in lines}, {"0", "1"})
        for line in lines:
            self.assertEqual(answer["id"], f"chatcmpl-{line['id']}")
            self.assertEqual(line["key"], "-")
            self.assertEqual((line["result"], line["finish"]), ("done", "length"))
            self.assertEqual(line["reply_tokens"], "3")
            tokens = sum(int(line[s]) for s in ("resident", "hidden", "kv", "recomputed", "new"))
            self.assertEqual(tokens, int(line["prompt_tokens"]))
            self.assertGreater(float(line["ttft_ms"]), 0)
        self.assertNotIn("hrysanthemum", self.server.errors())

    def test_messages_say_what_was_put_into_the_cache(self):
        body = {"model": "tiny", "max_tokens": 2, "temperature": 0,
                "messages": [{"role": "user", "content": serving.TEXT[2000:2600]}]}
        first = self.server.post("/v1/messages", body)["usage"]
        self.assertGreater(first["cache_creation_input_tokens"], 50)
        body["messages"][0]["content"] += serving.TEXT[2600:3200]
        events = self.server.stream("/v1/messages", {**body, "stream": True})
        begun = next(data for name, data in events if name == "message_start")["message"]["usage"]
        ended = next(data for name, data in events if name == "message_delta")["usage"]
        for usage in (begun, ended):
            self.assertGreater(usage["cache_read_input_tokens"], 50)
            self.assertGreater(usage["cache_creation_input_tokens"], 50)
            self.assertEqual(usage["input_tokens"], 1)
        unsaved = self.server.post("/v1/messages", {
            **body, "cache_salt": "apart", "cache_prompt": False})["usage"]
        self.assertEqual(unsaved["cache_creation_input_tokens"], 0)
        self.assertGreater(unsaved["input_tokens"], 100)

    def test_a_deleted_session_leaves_the_arena(self):
        salted = "?cache_salt=deleting"
        idle = 'hcache_arena_cells{use="idle"}'
        before = self.metric(idle)
        messages = [{"role": "user", "content": serving.TEXT[4000:4400]}]
        self.server.chat(messages, session_id="gone", cache_salt="deleting")
        self.assertGreater(self.metric(idle), before + 50)
        self.assertEqual(self.server.call("DELETE", f"/v1/sessions/gone{salted}")[0], 200)
        wait_until(lambda: self.metric(idle) == before, "the arena without the session")

    def test_pages_of_other_origins_are_refused(self):
        body = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1}
        own = self.server.url
        port = own.rsplit(":", 1)[1]
        for headers, status in (({"Origin": own}, 200), ({"Origin": "https://evil.example"}, 403),
                                ({"Origin": "null"}, 403), ({"Host": "evil.example"}, 403),
                                ({"Host": f"evil.example:{port}",
                                  "Origin": f"http://evil.example:{port}"}, 403),
                                ({"Host": "localhost:1234"}, 200)):
            answer = self.server.call("POST", "/v1/chat/completions", body, headers)
            self.assertEqual(answer[0], status, headers)
            if status == 403:
                self.assertIn("allowed", answer[1]["error"]["message"])

    def test_request_lines_can_be_left_out(self):
        with tempfile.TemporaryDirectory() as folder, \
                start(folder, "--ctx", "512", "--no-store", "--log-requests", "off") as server:
            server.chat([{"role": "user", "content": "Hi."}], max_tokens=1)
            self.assertEqual(server.stop(), 0)
            self.assertEqual(request_lines(server), [])


@serving.not_in_software
class Starting(unittest.TestCase):
    def test_it_listens_while_the_model_loads(self):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as out:
            process = subprocess.Popen(
                [PROGRAM, "serve", "-m", MODEL, "--state-dir", folder, "-t", "2", "--port", "0",
                 "--ctx", "512"], stdout=out, stderr=subprocess.PIPE, text=True)
            self.addCleanup(process.stderr.close)
            try:
                for line in process.stderr:
                    found = re.search(r"listening on http://127.0.0.1:(\d+)", line)
                    if found:
                        break
                # Measuring the machine takes seconds, so the first answers come before its end.
                answers = []
                while not answers or answers[-1][0] == 503:
                    for method, path in (("POST", "/v1/chat/completions"), ("GET", "/api/tags"),
                                         ("GET", "/health")):
                        connection = http.client.HTTPConnection("127.0.0.1", int(found.group(1)))
                        connection.request(method, path)
                        answer = connection.getresponse()
                        answers.append((answer.status, json.loads(answer.read())))
                        connection.close()
                self.assertEqual(answers[0][0], 503)
                error = answers[0][1]["error"]
                self.assertEqual((error["message"], error["type"], error["code"]),
                                 ("Loading model", "unavailable_error", 503))
                self.assertTrue(error["reason"])
                self.assertTrue(0 <= error["progress"] <= 1)
                self.assertEqual((answers[1][0], answers[2][0]), (503, 503))
                self.assertIn("is being loaded", answers[1][1]["error"])  # Ollama's form
                self.assertGreater(
                    len({a[1]["error"]["reason"] for a in answers[2::3] if a[0] == 503}), 1)
                self.assertEqual(answers[-1], (200, {"status": "ok"}))
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait()

    def test_a_start_that_fails_says_so_in_its_exit_code(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([PROGRAM, "serve", "-m", "/nonexistent.gguf", "--port", "0",
                                   "--state-dir", folder], capture_output=True, timeout=60)
            self.assertEqual(done.returncode, 3, done.stderr)
            done = subprocess.run([PROGRAM, "serve", "-m", __file__, "--port", "0",
                                   "--state-dir", folder], capture_output=True, timeout=60)
            self.assertEqual(done.returncode, 6, done.stderr)

    def test_host_memory_is_used_unless_it_is_refused(self):
        def capacity(*options):
            with tempfile.TemporaryDirectory() as folder, \
                    start(folder, "--ctx", "512", *options) as server:
                tiers = server.call("GET", "/v1/store")[1]["tiers"]
                return tiers["dram"]["capacity_bytes"], server.errors()

        by_default, said = capacity()
        self.assertGreater(by_default, 0)
        self.assertIn("of host memory for saved state", said)
        self.assertEqual(capacity("--dram", "0")[0], 0)


class Stopping(unittest.TestCase):
    def test_disconnects_free_the_server(self):
        with tempfile.TemporaryDirectory() as folder, start(folder, "--ctx", "2048") as server:
            host, port = server.url.removeprefix("http://").rsplit(":", 1)
            for _ in range(3):
                connection = http.client.HTTPConnection(host, int(port), timeout=60)
                connection.request("POST", "/v1/chat/completions", json.dumps({
                    "messages": [{"role": "user", "content": "Count to a thousand."}],
                    "max_tokens": 1500, "stream": True}), {"Content-Type": "application/json"})
                with connection.getresponse() as reply:
                    reply.read(200)
                connection.close()

            def metric(name):
                text = server.call("GET", "/metrics")[1]
                return [float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
                        if line.startswith(name)][0]

            wait_until(lambda: metric('hcache_requests_total{result="cancelled"}') == 3,
                       "three cancelled requests")
            # Told once the iteration that ended the last one is over.
            wait_until(lambda: metric('hcache_requests{state="decoding"}') == 0, "no running request")

    def test_sigterm_lets_replies_end(self):
        # However slow the machine is.
        options = ("--ctx", "2048", "--grace", "100s")
        with tempfile.TemporaryDirectory() as folder, start(folder, *options) as server:
            answers = []
            thread = threading.Thread(target=lambda: answers.append(
                server.chat([{"role": "user", "content": "Tell me a story."}], max_tokens=60)))
            thread.start()
            wait_until(lambda: "decoding\"} 1" in server.call("GET", "/metrics")[1], "a reply")
            self.assertEqual(server.stop(), 0)
            thread.join()
            self.assertEqual(answers[0]["usage"]["completion_tokens"], 60)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    unittest.main(verbosity=2)
