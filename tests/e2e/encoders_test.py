#!/usr/bin/env python3
"""`hcache serve` with models that make vectors or ranks: small BERT models with random weights, and a
decoder that ranks.

    encoders_test.py HCACHE [MAKE_TINY_ENCODER] [LLAMA_SERVER] [-v] [name]

With LLAMA_SERVER its vectors and ranks are compared, too.
"""

import base64
import concurrent.futures
import http.client
import json
import math
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from urllib.parse import urlparse

import serving

PROGRAM = sys.argv.pop(1)
MAKE = Path(PROGRAM).resolve().parent / "make_tiny_encoder"
if len(sys.argv) > 1 and "make_tiny_encoder" in sys.argv[1]:
    MAKE = Path(sys.argv.pop(1))
PEER = sys.argv.pop(1) if len(sys.argv) > 1 and Path(sys.argv[1]).is_file() else None
NONE, MEAN, RANK = 0, 1, 4  # as files have them
CONTEXT = 64
WIDTH = 32
FOLDER = tempfile.TemporaryDirectory()
KEY = "secret"


def model(pooling: int, context: int = CONTEXT) -> str:
    path = Path(FOLDER.name) / f"tiny-{pooling}-{context}.gguf"
    if not path.exists():
        subprocess.run([MAKE, path, str(pooling), str(context)], check=True)
    return str(path)


def ranking_decoder() -> str:
    path = Path(FOLDER.name) / "ranking-decoder.gguf"
    if not path.exists():
        subprocess.run([MAKE, path, "qwen3", serving.default_model()], check=True)
    return str(path)


def start(pooling: int, *options: str) -> serving.Server:
    return serving.Server(PROGRAM, "-m", model(pooling), "-t", "1", *options)


def vectors(answer: dict) -> list:
    return [entry["embedding"] for entry in answer["data"]]


class Case(unittest.TestCase):
    def assert_close(self, a: list, b: list, delta: float = 1e-4) -> None:
        self.assertEqual(len(a), len(b))
        for x, y in zip(a, b, strict=True):
            self.assertAlmostEqual(x, y, delta=delta)

    def assert_error(self, answer: tuple, status: int, *words: str) -> None:
        self.assertEqual(answer[0], status, answer[1])
        for word in words:
            self.assertIn(word, json.dumps(answer[1]))


class Vectors(Case):
    @classmethod
    def setUpClass(cls):
        cls.server = start(MEAN, "--alias", "tiny")

    @classmethod
    def tearDownClass(cls):
        code = cls.server.stop()
        cls.server.__exit__()
        assert code == 0, code

    def test_every_protocol_gives_the_same_vectors(self):
        texts = ["the sea", "a light house", "storm 42!"]
        answer = self.server.post("/v1/embeddings", {"input": texts})
        self.assertEqual(answer["model"], "tiny")
        self.assertEqual([entry["index"] for entry in answer["data"]], [0, 1, 2])
        wanted = vectors(answer)
        for vector in wanted:
            self.assertEqual(len(vector), WIDTH)
            self.assertAlmostEqual(math.hypot(*vector), 1, delta=1e-5)
        self.assertGreater(math.dist(wanted[0], wanted[1]), 0.05)
        tokens = sum(len(self.server.post("/tokenize", {"content": text, "add_special": True})["tokens"])
                     for text in texts)
        self.assertEqual(answer["usage"], {"prompt_tokens": tokens, "total_tokens": tokens})
        coded = vectors(self.server.post("/v1/embeddings", {"input": texts, "encoding_format": "base64"}))
        for text, a, b in zip(texts, wanted, coded, strict=True):
            self.assert_close(a, struct.unpack(f"<{WIDTH}f", base64.b64decode(b)))
            self.assert_close(a, vectors(self.server.post("/v1/embeddings", {"input": text}))[0])
            for path in ("/embedding", "/embeddings"):
                llama = self.server.post(path, {"content": text})
                self.assert_close(a, llama[0]["embedding"][0])
            self.assert_close(a, self.server.post("/api/embed", {"model": "tiny", "input": text})
                              ["embeddings"][0])
            one = self.server.post("/api/embeddings", {"model": "tiny", "prompt": text})["embedding"]
            self.assert_close(a, [x / math.hypot(*one) for x in one])
        ids = self.server.post("/tokenize", {"content": texts[0], "add_special": True})["tokens"]
        self.assert_close(wanted[0], vectors(self.server.post("/v1/embeddings", {"input": ids}))[0])

    def test_many_at_once_get_their_own(self):
        texts = [f"storm {i} and the light house" for i in range(40)]
        alone = vectors(self.server.post("/v1/embeddings", {"input": texts}))

        def ask(i: int) -> list:
            return vectors(self.server.post("/v1/embeddings", {"input": texts[i]}))[0]

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            for i, vector in enumerate(pool.map(ask, range(len(texts)))):
                self.assert_close(alone[i], vector)

    def test_what_is_too_long_is_refused_or_cut(self):
        long = "sea " * 100
        answer = self.server.call("POST", "/v1/embeddings", {"input": ["sea", long]})
        self.assert_error(answer, 400, "input[1]: 102 tokens", "64 at most", "exceed_context_size_error")
        self.assertEqual(answer[1]["error"]["n_prompt_tokens"], 102)
        cut = self.server.post("/api/embed", {"model": "tiny", "input": long})
        self.assertEqual(cut["prompt_eval_count"], CONTEXT)
        self.assert_close(cut["embeddings"][0],
                          vectors(self.server.post("/v1/embeddings", {"input": "sea " * 62}))[0])
        answer = self.server.call("POST", "/api/embed", {"model": "tiny", "input": long, "truncate": False})
        self.assert_error(answer, 400, "102 tokens")

    def test_errors(self):
        call = self.server.call
        for body in ({"input": []}, {}, {"input": 3}, {"input": [100000]}, {"input": "x", "dimensions": 33}):
            self.assert_error(call("POST", "/v1/embeddings", body), 400)
        self.assert_error(call("POST", "/v1/embeddings", None), 400)
        for path in ("/v1/chat/completions", "/completion", "/v1/messages", "/api/chat", "/v1/responses",
                     "/infill", "/apply-template"):
            self.assert_error(call("POST", path, {}), 501, "this model makes vectors or ranks, no text")
        self.assertIsInstance(call("POST", "/api/generate", {})[1]["error"], str)
        self.assert_error(call("GET", "/slots"), 501)
        self.assert_error(call("POST", "/v1/rerank", {"query": "a", "documents": ["b"]}), 501, "reranker")
        self.assert_error(call("GET", "/nowhere"), 404)

    def test_it_tells_of_itself(self):
        get = lambda path: self.server.call("GET", path)  # noqa: E731
        for path in ("/health", "/v1/health"):
            self.assertEqual(get(path)[:2], (200, {"status": "ok"}))
        for path in ("/v1/models", "/models"):
            entry = get(path)[1]["data"][0]
            self.assertEqual(entry["id"], "tiny")
            self.assertEqual(entry["meta"]["n_ctx_train"], CONTEXT)
            self.assertEqual(entry["meta"]["n_embd"], WIDTH)
        self.assertEqual(get("/v1/models/tiny")[1]["id"], "tiny")
        self.assertEqual(get("/v1/models/other")[0], 404)
        self.assertEqual(get("/props")[1]["pooling"], "mean")
        self.assertEqual(get("/api/tags")[1]["models"][0]["name"], "tiny")
        self.assertEqual(get("/api/ps")[1]["models"][0]["details"]["family"], "bert")
        self.assertIn("version", get("/api/version")[1])
        self.server.post("/v1/embeddings", {"input": ["sea", "storm"]})
        metrics = dict(line.rsplit(" ", 1) for line in get("/metrics")[1].splitlines() if line[0] != "#")
        self.assertGreaterEqual(int(metrics["hcache_encode_texts_total"]), 2)
        self.assertEqual(int(metrics["hcache_encode_requests_waiting"]), 0)
        self.assertGreater(float(metrics["hcache_encode_seconds_total"]), 0)
        paths = get("/openapi.json")[1]["paths"]
        self.assertIn("/v1/embeddings", paths)
        self.assertNotIn("/v1/chat/completions", paths)
        text = self.server.post("/detokenize", self.server.post("/tokenize", {"content": "The sea."}))
        self.assertEqual(text["content"].split(), ["the", "sea", "."])


class Ranks(Case):
    DOCUMENTS = ("the sea", "a storm", "light house keeper", "a storm", "x y z")

    def test_documents_come_best_first(self):
        with start(RANK, "--reranking") as server:
            body = {"query": "a house", "documents": self.DOCUMENTS}
            answer = server.post("/v1/rerank", body)
            results = answer["results"]
            scores = [result["relevance_score"] for result in results]
            self.assertEqual(scores, sorted(scores, reverse=True))
            self.assertEqual(sorted(result["index"] for result in results), [0, 1, 2, 3, 4])
            self.assertGreater(scores[0], scores[-1])
            self.assertEqual(answer["object"], "list")
            self.assertGreater(answer["usage"]["total_tokens"], 5 * 5)
            by_index = {result["index"]: result["relevance_score"] for result in results}
            self.assertAlmostEqual(by_index[1], by_index[3], delta=1e-3)
            for path in ("/rerank", "/reranking", "/v1/reranking"):
                self.assertEqual(len(server.post(path, {**body, "top_n": 2})["results"]), 2)
            for i, document in enumerate(self.DOCUMENTS):  # alone it has the same score
                one = server.post("/rerank", {"query": "a house", "documents": [document]})
                self.assertAlmostEqual(one["results"][0]["relevance_score"], by_index[i], delta=1e-3)
            tei = server.post("/rerank", {"query": "a house", "texts": self.DOCUMENTS, "return_text": True})
            self.assertEqual([entry["index"] for entry in tei], [result["index"] for result in results])
            for entry in tei:
                self.assertEqual(entry["text"], self.DOCUMENTS[entry["index"]])
                self.assertAlmostEqual(entry["score"], by_index[entry["index"]], delta=1e-3)
            for bad in ({"documents": ["x"]}, {"query": "x"}, {"query": "x", "documents": []},
                        {"query": 1, "documents": ["x"]}, {"query": "x", "documents": "x"}):
                self.assert_error(server.call("POST", "/rerank", bad), 400)
            long = {"query": "sea", "documents": ["sea", "sea " * 100]}
            self.assert_error(server.call("POST", "/rerank", long), 400, "documents[1] with the query",
                              "64 at most")
            self.assert_error(server.call("POST", "/v1/embeddings", {"input": "x"}), 501, "/v1/rerank")
            self.assertEqual(server.stop(), 0)

    def test_the_file_decides_and_must_fit(self):
        with start(RANK) as server:
            self.assertEqual(server.call("GET", "/props")[1]["pooling"], "rank")
        with start(RANK, "--pooling", "mean") as server:
            self.assertEqual(len(vectors(server.post("/v1/embeddings", {"input": "sea"}))[0]), WIDTH)
        for options, words in ((["--reranking"], "no head that ranks"),
                               (["--reranking", "--pooling", "cls"], "contradict"),
                               (["--lora", "/nowhere"], "--lora")):
            done = subprocess.run([PROGRAM, "serve", "-m", model(MEAN), "--port", "0", *options],
                                  capture_output=True, text=True, timeout=60)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(words, done.stderr)


    def test_a_decoder_ranks_by_its_first_label(self):
        body = {"query": "Where is the light?", "documents": ["On a rock.", "It rains.", serving.TEXT[:600]]}
        with serving.Server(PROGRAM, "-m", ranking_decoder(), "-t", "1") as server:
            self.assertEqual(server.call("GET", "/props")[1]["pooling"], "rank")
            results = server.post("/v1/rerank", body)["results"]
            scores = {result["index"]: result["relevance_score"] for result in results}
            for i, document in enumerate(body["documents"]):
                self.assertTrue(0 < scores[i] < 1, scores)  # its share of two labels
                # The file says what the two are written into.
                prompt = ("Does the document answer the query?\nQuery: Where is the light?\n"
                          f"Document: {document}\n")
                tokens = len(server.post("/tokenize", {"content": prompt})["tokens"])
                one = server.post("/v1/rerank", {**body, "documents": [document]})
                self.assertEqual(one["usage"]["total_tokens"], tokens)
                self.assertAlmostEqual(one["results"][0]["relevance_score"], scores[i], delta=2e-3)
            self.assertGreater(max(scores.values()) - min(scores.values()), 1e-2)
            self.assert_error(server.call("POST", "/v1/embeddings", {"input": "x"}), 501, "/v1/rerank")
            self.assertEqual(server.stop(), 0)


@unittest.skipUnless(PEER, "needs llama-server")
class LikeLlamaServer(Case):
    TEXTS = ("the sea", "a storm", "light house keeper 42!", "x y z")

    def test_vectors(self):
        with serving.LlamaServer(PEER, model(MEAN), "-t", "2", "--embeddings") as theirs, \
                start(MEAN) as server:
            for path, body in (("/v1/embeddings", {"input": self.TEXTS}),
                               ("/v1/embeddings", {"input": "the sea"})):
                ours, other = server.post(path, body), theirs.post(path, body)
                self.assertEqual(ours["usage"], other["usage"])
                for a, b in zip(vectors(ours), vectors(other), strict=True):
                    self.assert_close(a, b)

    def test_ranks(self):
        body = {"query": "a house", "documents": self.TEXTS}
        for path, delta in ((model(RANK), 1e-3), (ranking_decoder(), 2e-3)):
            with self.subTest(model=path), \
                    serving.LlamaServer(PEER, path, "-t", "2", "--reranking") as theirs, \
                    serving.Server(PROGRAM, "-m", path, "-t", "1", "--reranking") as server:
                ours, other = (s.post("/v1/rerank", body) for s in (server, theirs))
                self.assertEqual(ours["usage"], other["usage"])
                scores = [{result["index"]: result["relevance_score"] for result in answer["results"]}
                          for answer in (ours, other)]
                for i in range(len(self.TEXTS)):
                    self.assertAlmostEqual(scores[0][i], scores[1][i], delta=delta)


class Serving(Case):
    def test_without_pooling_each_token_has_a_row(self):
        with start(NONE) as server:
            rows = server.post("/embedding", {"content": "the sea"})[0]["embedding"]
            self.assertEqual((len(rows), len(rows[0])), (4, WIDTH))
            self.assert_error(server.call("POST", "/v1/embeddings", {"input": "sea"}), 400, "/embedding")

    def test_keys_are_asked_for(self):
        with start(MEAN, "--api-key", KEY) as server:
            self.assertEqual(server.call("POST", "/v1/embeddings", {"input": "sea"})[0], 401)
            self.assertEqual(server.call("POST", "/v1/chat/completions", {})[0], 401)
            self.assertEqual(server.call("GET", "/health")[0], 200)
            headers = {"Authorization": f"Bearer {KEY}"}
            self.assertEqual(server.call("POST", "/v1/embeddings", {"input": "sea"}, headers)[0], 200)

    def test_a_full_queue_and_clients_that_leave(self):
        many = {"input": ["the light house keeper and the storm at sea"] * 1024}
        with start(MEAN, "--max-queued", "1") as server:
            url = urlparse(server.url)
            leaving = http.client.HTTPConnection(url.hostname, url.port)
            leaving.request("POST", "/v1/embeddings", json.dumps(many), {"Content-Type": "application/json"})
            refused = None
            for _ in range(2000):
                status, _, headers = server.call("POST", "/v1/embeddings", {"input": "sea"})
                if status == 429:
                    refused = headers["Retry-After"]
                    break
            self.assertEqual(refused, "1")
            leaving.close()
            for _ in range(600):
                if server.call("POST", "/v1/embeddings", {"input": "sea"})[0] == 200:
                    break
                time.sleep(0.1)
            else:
                self.fail("the queue stays full")
            self.assertEqual(server.stop(), 0)

    def test_a_signal_lets_what_runs_end(self):
        many = {"input": ["the light house keeper and the storm at sea"] * 512}
        with start(MEAN) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.call, "POST", "/v1/embeddings", many)
            while "waiting 1" not in server.call("GET", "/metrics")[1] and not answer.done():
                time.sleep(0.005)
            self.assertEqual(server.stop(), 0)
            status, body, _ = answer.result()
            self.assertEqual((status, len(body["data"])), (200, 512))


if __name__ == "__main__":
    unittest.main(verbosity=2)
