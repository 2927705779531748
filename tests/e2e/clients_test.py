#!/usr/bin/env python3
"""The official clients against `hcache serve`: openai, anthropic and ollama.

    clients_test.py HCACHE [-v] [name]

Needs tests/e2e/requirements.txt; `make test-clients` installs it into build/clients.
"""

import json
import sys
import tempfile
import unittest

import anthropic
import ollama
import openai

import serving

PROGRAM = sys.argv.pop(1)
TOOL = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Clients(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.server = serving.Server(PROGRAM, "-m", serving.default_model(), "--state-dir",
                                    cls.folder.name, "-t", "2", "--ctx", "4096", "--alias", "tiny",
                                    "--api-key", "secret")
        cls.openai = openai.OpenAI(base_url=cls.server.url + "/v1", api_key="secret",
                                   max_retries=0)
        cls.anthropic = anthropic.Anthropic(base_url=cls.server.url, api_key="secret",
                                            max_retries=0)
        cls.ollama = ollama.Client(cls.server.url, headers={"Authorization": "Bearer secret"})

    @classmethod
    def tearDownClass(cls):
        cls.ollama.close()
        with cls.server:
            code = cls.server.stop()
        cls.folder.cleanup()
        assert code == 0

    # ---- openai

    def test_openai_chat(self):
        answer = self.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Name a colour."}], n=2, seed=1,
            max_tokens=6, logprobs=True, top_logprobs=3)
        self.assertEqual(len(answer.choices), 2)
        self.assertEqual(len(answer.choices[1].logprobs.content[0].top_logprobs), 3)
        self.assertEqual(answer.usage.completion_tokens, 12)

    def test_openai_embeddings(self):
        # The client asks for base64 and decodes it.
        answer = self.openai.embeddings.create(model="tiny", input=["A lamp at noon.", "Fog at sea."])
        self.assertEqual([row.index for row in answer.data], [0, 1])
        self.assertEqual(len(answer.data[0].embedding), 576)
        plain = self.openai.embeddings.create(model="tiny", input="A lamp at noon.",
                                              encoding_format="float")
        for coded, number in zip(answer.data[0].embedding, plain.data[0].embedding, strict=True):
            self.assertAlmostEqual(coded, number, places=6)

    def test_openai_stream(self):
        chunks = list(self.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Count to three."}], stream=True,
            temperature=0, max_tokens=8, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        self.assertTrue(text)
        self.assertEqual(chunks[-1].usage.completion_tokens, 8)

    def test_openai_tools(self):
        tools = [{"type": "function", "function": {"name": "weather", "parameters": TOOL}}]
        messages = [{"role": "user", "content": "What is the weather in Bergen?"}]
        answer = self.openai.chat.completions.create(
            model="tiny", messages=messages, tools=tools, tool_choice="required", temperature=0,
            max_tokens=200)
        call = answer.choices[0].message.tool_calls[0]
        self.assertEqual(call.function.name, "weather")
        self.assertIn("city", json.loads(call.function.arguments))
        # The call and its result go back.
        messages += [answer.choices[0].message.model_dump(exclude_none=True),
                     {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        again = self.openai.chat.completions.create(model="tiny", messages=messages, tools=tools,
                                                    temperature=0, max_tokens=12)
        self.assertGreater(again.usage.prompt_tokens_details.cached_tokens, 0)

    def test_openai_streamed_tool_call(self):
        tools = [{"type": "function", "function": {"name": "weather", "parameters": TOOL}}]
        arguments: dict = {}  # by call
        for chunk in self.openai.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Weather in Oslo?"}],
                tools=tools, tool_choice={"type": "function", "function": {"name": "weather"}},
                temperature=0, max_tokens=200, stream=True):
            for call in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
                arguments[call.index] = (arguments.get(call.index, "") +
                                         (call.function.arguments or ""))
        self.assertIn("city", json.loads(arguments[0]))

    def test_openai_schema(self):
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
                  "additionalProperties": False}
        answer = self.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "How many legs has a cat?"}],
            temperature=0, max_tokens=40,
            response_format={"type": "json_schema",
                             "json_schema": {"name": "legs", "schema": schema, "strict": True}})
        self.assertIsInstance(json.loads(answer.choices[0].message.content)["n"], int)

    def test_openai_completion_response_and_models(self):
        text = self.openai.completions.create(model="tiny", prompt="The sea", max_tokens=4)
        self.assertTrue(text.choices[0].text)
        first = self.openai.responses.create(model="tiny", input="I am called Ada.",
                                             max_output_tokens=8)
        second = self.openai.responses.create(model="tiny", input="Who am I?",
                                              previous_response_id=first.id, max_output_tokens=8)
        self.assertGreater(second.usage.input_tokens_details.cached_tokens, 0)
        self.assertIn("tiny", [m.id for m in self.openai.models.list()])

    def test_openai_conversations(self):
        conversations = self.openai.conversations
        made = conversations.create(metadata={"topic": "names"}, items=[
            {"type": "message", "role": "user", "content": "I am called Ada."}])
        self.assertEqual((made.object, made.metadata), ("conversation", {"topic": "names"}))
        answer = self.openai.responses.create(model="tiny", input="Who am I?", conversation=made.id,
                                              max_output_tokens=8)
        self.assertEqual(answer.conversation.id, made.id)
        *_, last = self.openai.responses.create(model="tiny", input="And I?", max_output_tokens=8,
                                                conversation={"id": made.id}, stream=True)
        streamed = last.response
        added = conversations.items.create(made.id, items=[
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hm."}]}])
        # The client follows the pages.
        items = list(conversations.items.list(made.id, order="asc", limit=2))
        self.assertEqual([item.role for item in items],
                         ["user", "user", "assistant", "user", "assistant", "user"])
        self.assertEqual(items[0].content[0].text, "I am called Ada.")
        self.assertEqual([items[2].id, items[4].id, items[5].id],
                         [answer.output[0].id, streamed.output[0].id, added.data[0].id])
        self.assertEqual(items[2].content[0].text, answer.output_text)
        self.assertEqual(conversations.items.retrieve(items[1].id, conversation_id=made.id), items[1])
        self.assertEqual(conversations.items.delete(items[1].id, conversation_id=made.id).id, made.id)
        self.assertEqual(conversations.update(made.id, metadata={"a": "b"}).metadata, {"a": "b"})
        self.assertEqual(conversations.retrieve(made.id).created_at, made.created_at)
        counted = self.openai.responses.input_tokens.count(model="tiny", input="Well?", conversation=made.id)
        self.assertGreater(counted.input_tokens, 40)
        self.assertTrue(conversations.delete(made.id).deleted)
        for path in (conversations.retrieve, conversations.items.list):
            with self.assertRaises(openai.NotFoundError):
                path(made.id)
        with self.assertRaises(openai.NotFoundError):
            self.openai.responses.create(model="tiny", input="x", conversation=made.id)

    def test_openai_batch(self):
        def line(name: str, **body) -> str:
            return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions",
                               "body": {"model": "tiny", "max_tokens": 4, "temperature": 0, **body}})

        text = "\n".join([line("a", prompt="The sea"), line("b", prompt="The sky"), line("c")])
        file = self.openai.files.create(file=("in.jsonl", text.encode()), purpose="batch")
        self.assertEqual((file.purpose, file.bytes), ("batch", len(text)))
        self.assertEqual(self.openai.files.content(file.id).text, text)
        batch = self.openai.batches.create(input_file_id=file.id, endpoint="/v1/completions",
                                           completion_window="24h", metadata={"job": "x"})
        serving.wait_until(
            lambda: self.openai.batches.retrieve(batch.id).status == "completed", "its end")
        batch = self.openai.batches.retrieve(batch.id)
        self.assertEqual(batch.metadata, {"job": "x"})
        self.assertEqual((batch.request_counts.completed, batch.request_counts.failed), (2, 1))
        results = {r["custom_id"]: r["response"]["body"] for r in map(
            json.loads, self.openai.files.content(batch.output_file_id).text.splitlines())}
        asked = self.openai.completions.create(model="tiny", prompt="The sea", max_tokens=4,
                                               temperature=0)
        self.assertEqual(results["a"]["choices"][0]["text"], asked.choices[0].text)
        self.assertIn('"c"', self.openai.files.content(batch.error_file_id).text)
        self.assertIn(batch.id, [b.id for b in self.openai.batches.list(limit=1)])
        self.assertIn(file.id, [f.id for f in self.openai.files.list(purpose="batch")])
        with self.assertRaises(openai.ConflictError):
            self.openai.batches.cancel(batch.id)
        self.assertTrue(self.openai.files.delete(file.id).deleted)
        with self.assertRaises(openai.NotFoundError):
            self.openai.files.retrieve(file.id)

    def test_openai_errors(self):
        with self.assertRaises(openai.BadRequestError):
            self.openai.chat.completions.create(model="tiny", messages=[])
        with self.assertRaises(openai.AuthenticationError):
            openai.OpenAI(base_url=self.server.url + "/v1", api_key="wrong", max_retries=0) \
                .completions.create(model="tiny", prompt="x")

    # ---- anthropic

    def test_anthropic_messages(self):
        messages = [{"role": "user", "content": [{
            "type": "text", "text": serving.TEXT[:900],
            "cache_control": {"type": "ephemeral"}}]}]
        first = self.anthropic.messages.create(model="tiny", max_tokens=6, system="Be brief.",
                                               messages=messages)
        self.assertEqual(first.type, "message")
        again = self.anthropic.messages.create(model="tiny", max_tokens=6, system="Be brief.",
                                               messages=messages)
        self.assertGreater(again.usage.cache_read_input_tokens, 100)
        count = self.anthropic.messages.count_tokens(model="tiny", system="Be brief.",
                                                     messages=messages)
        self.assertGreater(count.input_tokens, 100)

    def test_anthropic_stream(self):
        with self.anthropic.messages.stream(
                model="tiny", max_tokens=8,
                messages=[{"role": "user", "content": "Count to three."}]) as stream:
            text = "".join(stream.text_stream)
            self.assertEqual(stream.get_final_message().content[0].text, text)

    def test_anthropic_tools(self):
        answer = self.anthropic.messages.create(
            model="tiny", max_tokens=200, extra_body={"temperature": 0},
            messages=[{"role": "user", "content": "What is the weather in Bergen?"}],
            tools=[{"name": "weather", "input_schema": TOOL}], tool_choice={"type": "any"})
        use = next(block for block in answer.content if block.type == "tool_use")
        self.assertEqual(use.name, "weather")
        self.assertIn("city", use.input)

    def test_anthropic_batch(self):
        params = {"model": "tiny", "max_tokens": 4,
                  "messages": [{"role": "user", "content": "Hello"}]}
        batches = self.anthropic.messages.batches
        batch = batches.create(requests=[{"custom_id": "a", "params": params},
                                         {"custom_id": "b", "params": params}])
        self.assertEqual(batch.type, "message_batch")
        serving.wait_until(
            lambda: batches.retrieve(batch.id).processing_status == "ended", "its end")
        results = {r.custom_id: r.result for r in batches.results(batch.id)}
        self.assertEqual(set(results), {"a", "b"})
        self.assertEqual(results["a"].type, "succeeded")
        self.assertEqual(results["a"].message.role, "assistant")
        self.assertIn(batch.id, [b.id for b in batches.list(limit=1)])
        with self.assertRaises(anthropic.ConflictError):
            batches.cancel(batch.id)
        self.assertEqual(batches.delete(batch.id).type, "message_batch_deleted")
        with self.assertRaises(anthropic.NotFoundError):
            batches.retrieve(batch.id)

    def test_anthropic_errors(self):
        with self.assertRaises(anthropic.BadRequestError):
            self.anthropic.messages.create(model="tiny", max_tokens=4, messages=[
                {"role": "user", "content": [{"type": "image", "source": {
                    "type": "base64", "media_type": "image/png", "data": "AAAA"}}]}])

    # ---- ollama

    def test_ollama_chat(self):
        answer = self.ollama.chat("tiny", [{"role": "user", "content": "Name a colour."}],
                                  options={"num_predict": 6, "seed": 1}, logprobs=True,
                                  top_logprobs=3)
        self.assertTrue(answer.message.content)
        self.assertEqual((answer.done, answer.done_reason, answer.eval_count), (True, "length", 6))
        self.assertEqual(len(answer.logprobs[0].top_logprobs), 3)

    def test_ollama_stream(self):
        ask = {"messages": [{"role": "user", "content": "Count to three."}],
               "options": ollama.Options(temperature=0, num_predict=8)}
        parts = list(self.ollama.chat("tiny", stream=True, **ask))
        self.assertEqual("".join(part.message.content for part in parts),
                         self.ollama.chat("tiny", **ask).message.content)
        self.assertEqual([part.done for part in parts], [False] * (len(parts) - 1) + [True])

    def test_ollama_tools(self):
        def weather(city: str) -> str:
            """Says how the weather is.

            Args:
              city: Where.
            """
            return f"rain in {city}"

        questions = serving.weather_questions()
        answer = self.ollama.chat("tiny", questions, tools=[weather],
                                  options={"temperature": 0, "num_predict": 200})
        call = answer.message.tool_calls[0].function
        self.assertEqual(call.name, "weather")
        result = {"role": "tool", "tool_name": call.name, "content": weather(**call.arguments)}
        again = self.ollama.chat("tiny", [*questions, answer.message, result], tools=[weather],
                                 options={"temperature": 0, "num_predict": 12})
        self.assertTrue(again.message.content)

    def test_ollama_schema(self):
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
                  "additionalProperties": False}
        answer = self.ollama.chat(
            "tiny", [{"role": "user", "content": "How many legs has a cat?"}], format=schema,
            options={"temperature": 0, "num_predict": 40})
        self.assertIsInstance(json.loads(answer.message.content)["n"], int)

    def test_ollama_generate(self):
        answer = self.ollama.generate("tiny", "Name a colour.", system="Be brief.",
                                      options={"num_predict": 6})
        self.assertTrue(answer.response)
        parts = list(self.ollama.generate("tiny", "The sea is", raw=True, stream=True,
                                          options={"num_predict": 6}))
        self.assertEqual(parts[-1].eval_count, 6)
        self.assertEqual(self.ollama.generate("tiny").done_reason, "load")

    def test_ollama_embed(self):
        answer = self.ollama.embed("tiny", ["A lamp at noon.", "Fog at sea."])
        self.assertEqual([len(vector) for vector in answer.embeddings], [576, 576])
        self.assertGreater(answer.prompt_eval_count, 4)
        self.assertEqual(len(self.ollama.embeddings("tiny", "A lamp at noon.").embedding), 576)

    def test_ollama_model(self):
        self.assertEqual([m.model for m in self.ollama.list().models], ["tiny"])
        self.assertEqual([m.context_length for m in self.ollama.ps().models], [4096])
        shown = self.ollama.show("tiny:latest")
        self.assertIn("tools", shown.capabilities)
        self.assertEqual(shown.modelinfo["general.architecture"], "llama")
        self.assertEqual(shown.details.format, "gguf")

    def test_ollama_errors(self):
        def error(call) -> tuple:
            with self.assertRaises(ollama.ResponseError) as raised:
                call()
            return raised.exception.status_code, raised.exception.error

        self.assertEqual(error(lambda: self.ollama.pull("other"))[0], 501)
        self.assertEqual(error(lambda: self.ollama.delete("tiny"))[0], 501)
        self.assertEqual(error(lambda: self.ollama.show("other")),
                         (404, "there is no model 'other'; this server has 'tiny'"))
        picture = {"role": "user", "content": "What is this?", "images": [b"PNG"]}
        status, text = error(lambda: self.ollama.chat("tiny", [picture]))
        self.assertEqual(status, 400)
        self.assertIn("--mmproj", text)
        with ollama.Client(self.server.url) as stranger:
            self.assertEqual(error(stranger.list)[0], 401)


if __name__ == "__main__":
    unittest.main(verbosity=2)
