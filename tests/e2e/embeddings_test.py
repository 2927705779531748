#!/usr/bin/env python3
"""Vectors for texts from `hcache serve` on the default model, which generates.

    embeddings_test.py HCACHE [-v] [name]
"""

import base64
import math
import struct
import sys
import tempfile
import unittest

import serving

PROGRAM = sys.argv.pop(1)
MODEL = serving.default_model()
WIDTH = 576
TEXTS = [f"{i}. {serving.TEXT[53 * i:53 * i + 20 + 7 * i]}" for i in range(40)]


def start(folder: str, *options: str) -> serving.Server:
    return serving.Server(PROGRAM, "-m", MODEL, "--state-dir", folder, "-t", "2", "--ctx", "1024",
                          "--alias", "tiny", *options)


def embed(server: serving.Server, texts: object, **fields) -> list:
    answer = server.post("/v1/embeddings", {"input": texts, **fields})
    return [row["embedding"] for row in answer["data"]]


def cosine(a: list, b: list) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(
        sum(x * x for x in a) * sum(y * y for y in b))


class Embeddings(serving.OneServer):
    @classmethod
    def start(cls, folder: str) -> serving.Server:
        return start(folder)

    def refused(self, path: str, body: dict, status: int = 400) -> str:
        code, answer, _ = self.server.call("POST", path, body)
        self.assertEqual(code, status, answer)
        error = answer["error"]
        return error if isinstance(error, str) else error["message"]

    def test_many_texts_are_each_as_alone(self):
        together = embed(self.server, TEXTS)
        self.assertEqual(len(together), len(TEXTS))
        for i in (0, 17, 39):
            (alone,) = embed(self.server, TEXTS[i])
            self.assertEqual(alone, together[i])
        for vector in together:
            self.assertEqual(len(vector), WIDTH)
            self.assertAlmostEqual(sum(x * x for x in vector), 1, places=4)
        self.assertEqual(len({tuple(vector) for vector in together}), len(TEXTS))

    def test_what_means_the_same_is_nearer(self):
        sea, ocean, tax = embed(self.server, ["The ship sails across the sea to the harbour.",
                                              "A boat is crossing the ocean towards the port.",
                                              "Income tax is due at the end of the fiscal year."])
        self.assertGreater(cosine(sea, ocean), cosine(sea, tax))

    def test_forms_of_an_answer(self):
        text = "A lamp at noon."
        (floats,) = embed(self.server, text)
        (coded,) = embed(self.server, text, encoding_format="base64")
        self.assertEqual([struct.unpack("f", struct.pack("f", x))[0] for x in floats],
                         list(struct.unpack(f"<{WIDTH}f", base64.b64decode(coded))))
        tokens = self.server.post("/tokenize", {"content": text, "add_special": True})["tokens"]
        self.assertEqual(embed(self.server, tokens), [floats])
        answer = self.server.post("/v1/embeddings", {"input": [tokens, text], "model": "tiny"})
        self.assertEqual(answer["usage"], {"prompt_tokens": 2 * len(tokens),
                                           "total_tokens": 2 * len(tokens)})
        (short,) = embed(self.server, text, dimensions=64)
        self.assertEqual(len(short), 64)
        self.assertAlmostEqual(cosine(short, floats[:64]), 1, places=6)
        self.assertAlmostEqual(sum(x * x for x in short), 1, places=4)

    def test_llama_servers_form(self):
        text = "A lamp at noon."
        (floats,) = embed(self.server, text)
        for path in ("/embedding", "/embeddings"):
            answer = self.server.post(path, {"content": [text, "x"]})
            self.assertEqual([row["index"] for row in answer], [0, 1])
            self.assertEqual(answer[0]["embedding"], [floats])
        (row,) = self.server.post("/embedding", {"input": text, "embd_normalize": -1})
        (plain,) = row["embedding"]
        self.assertGreater(sum(x * x for x in plain), 2)
        self.assertAlmostEqual(cosine(plain, floats), 1, places=6)

    def test_ollamas_forms(self):
        text = "A lamp at noon."
        (floats,) = embed(self.server, text)
        answer = self.server.post("/api/embed", {"model": "tiny", "input": [text, text]})
        self.assertEqual(answer["embeddings"], [floats, floats])
        self.assertGreater(answer["total_duration"], 0)
        one = self.server.post("/api/embeddings", {"model": "tiny", "prompt": text})["embedding"]
        self.assertAlmostEqual(cosine(one, floats), 1, places=6)

    def test_a_text_that_is_too_long(self):
        self.assertIn("1024", self.refused("/v1/embeddings", {"input": ["x", serving.TEXT]}))
        error = self.server.call("POST", "/v1/embeddings", {"input": serving.TEXT})[1]["error"]
        self.assertEqual((error["type"], error["n_ctx"]), ("exceed_context_size_error", 1024))
        self.assertGreater(error["n_prompt_tokens"], 1024)
        body = {"model": "tiny", "input": serving.TEXT}
        self.assertEqual(len(self.server.post("/api/embed", body)["embeddings"]), 1)
        self.refused("/api/embed", {**body, "truncate": False})

    def test_bad_requests_name_the_place(self):
        self.assertIn("input: missing", self.refused("/v1/embeddings", {}))
        self.assertIn("input[0]: it has no tokens", self.refused("/v1/embeddings", {"input": ""}))
        self.assertIn("dimensions: 577", self.refused("/v1/embeddings",
                                                      {"input": "x", "dimensions": 577}))
        self.assertIn("token 99999999", self.refused("/v1/embeddings", {"input": [99999999]}))
        self.assertIn("content: missing", self.refused("/embedding", {}))
        self.assertIn("model: missing", self.refused("/api/embed", {"input": "x"}))

    def test_conversations_go_on_beside_them(self):
        conversation = serving.Conversation(1)
        while not conversation.done():
            conversation.step(self.server)
            embed(self.server, TEXTS)
        self.assertGreater(conversation.cached, 0)

    def test_nothing_of_them_is_saved(self):
        stat = self.server.call("GET", "/v1/store")[1]
        sessions = len(self.server.call("GET", "/v1/sessions")[1]["data"])
        embed(self.server, [serving.TEXT[-2000:]])
        self.assertEqual(self.server.call("GET", "/v1/store")[1]["tokens"], stat["tokens"])
        self.assertEqual(len(self.server.call("GET", "/v1/sessions")[1]["data"]), sessions)


class Options(unittest.TestCase):
    def test_pooling(self):
        text = "A lamp at noon."
        with tempfile.TemporaryDirectory() as folder:
            with start(folder, "--pooling", "none") as server:
                (row,) = server.post("/embedding", {"content": text})
                rows = row["embedding"]
                status, answer, _ = server.call("POST", "/v1/embeddings", {"input": text})
                self.assertEqual(status, 400)
                self.assertIn("--pooling", answer["error"]["message"])
            made = {}
            for pooling in ("mean", "cls", "last"):
                with start(folder, "--pooling", pooling, "--embd-normalize", "-1") as server:
                    (made[pooling],) = embed(server, text)
        self.assertEqual(made["cls"], rows[0])
        self.assertEqual(made["last"], rows[-1])
        for i in (0, 100, WIDTH - 1):
            mean = sum(row[i] for row in rows) / len(rows)
            self.assertAlmostEqual(made["mean"][i], mean, places=4)

    def test_a_long_beginning_is_computed_once_where_the_last_row_counts(self):
        with tempfile.TemporaryDirectory() as folder, \
                start(folder, "--pooling", "last", "--log-requests", "on") as server:
            for question in ("Who waved?", "What did he count?"):
                embed(server, serving.TEXT[:1500] + question)
            resident = [int(word.removeprefix("resident=")) for word in server.errors().split()
                        if word.startswith("resident=")]
            self.assertEqual(resident[0], 0)
            self.assertGreater(resident[1], 200)
            self.assertEqual(server.stop(), 0)

    def test_either_engine_makes_the_same_vectors(self):
        vectors = []
        for engine in ("own", "llama"):
            with tempfile.TemporaryDirectory() as folder, start(folder, "--engine", engine) as server:
                vectors.append(embed(server, TEXTS))
        for own, llamas in zip(*vectors, strict=True):
            self.assertGreater(cosine(own, llamas), 0.999)


if __name__ == "__main__":
    unittest.main()
