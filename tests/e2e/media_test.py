#!/usr/bin/env python3
"""Pictures in conversations, in every protocol, on the default model with a random projector.

    media_test.py HCACHE [LLAMA_SERVER] [-v] [name]

With LLAMA_SERVER its answers are compared, too.
"""

import base64
import json
import random
import re
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import serving
from serving import Server, wait_until

PROGRAM = sys.argv.pop(1)
PEER = sys.argv.pop(1) if len(sys.argv) > 1 and Path(sys.argv[1]).is_file() else None
MODEL = serving.default_model()
ROWS = 64  # of a picture: 8 x 8 patches
TEXT = serving.TEXT[:900]
QUESTION = "What can be seen there?"


def picture(seed: int) -> bytes:
    """A BMP file of 60 x 40 pixels."""
    width, height = 60, 40
    pixels = random.Random(seed).randbytes(3 * width * height)
    header = struct.pack("<2sIIIIiiHHIIiiII", b"BM", 54 + len(pixels), 0, 54, 40, width, height, 1, 24, 0, 0,
                         0, 0, 0, 0)
    return header + pixels


def text64(seed: int) -> str:
    return base64.b64encode(picture(seed)).decode()


def part(seed: int) -> dict:
    return {"type": "image_url", "image_url": {"url": "data:image/bmp;base64," + text64(seed)}}


def ask(seed: int, question: str = QUESTION) -> list:
    return [{"role": "user", "content": [{"type": "text", "text": TEXT}, part(seed),
                                         {"type": "text", "text": question}]}]


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def encoded(server: Server) -> int:
    found = re.search(r"^hcache_media_encoded (\S+)$", server.call("GET", "/metrics")[1], re.M)
    return int(float(found.group(1)))


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.files = tempfile.TemporaryDirectory()
        cls.projector = str(Path(cls.files.name) / "mmproj.gguf")
        subprocess.run([PROGRAM, "model", "synth-projector", MODEL, cls.projector], check=True)

    @classmethod
    def tearDownClass(cls):
        cls.files.cleanup()

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def start(self, *options: str, projector: bool = True) -> Server:
        mmproj = ("--mmproj", self.projector) if projector else ()
        return Server(PROGRAM, "-m", MODEL, "--device", "cpu", "--state-dir", self.folder, "-t", "2", "-c",
                      "4096", "--dram", "0", *mmproj, *options)

    def durable(self, server: Server, name: str, tokens: int) -> None:
        wait_until(lambda: server.call("GET", f"/v1/sessions/{name}")[1]["saved_tokens"] >= tokens,
                   f"{tokens} saved tokens of {name}")


class Conversations(Case):
    def test_a_picture_comes_back_without_its_projector(self):
        with self.start() as server:
            first = server.chat(ask(1), max_tokens=12, session_id="talk")
            self.assertGreater(first["usage"]["prompt_tokens"], ROWS)
            self.assertEqual(encoded(server), 1)
            history = [*ask(1), first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
            second = server.chat(history, max_tokens=12, session_id="talk")
            self.assertGreater(cached(second), ROWS)
            self.assertEqual(encoded(server), 1)
            # Another picture in the same words shares what is before it.
            other = server.chat(ask(2), max_tokens=12)
            self.assertLess(cached(other), cached(second) - ROWS)
            alone = server.chat(ask(2), max_tokens=12, cache_prompt=False)
            self.assertEqual(other["choices"][0]["message"], alone["choices"][0]["message"])
            shown = server.call("GET", "/v1/sessions/talk")[1]
            self.assertRegex(shown["text"], rf"<media:[0-9a-f]{{16}}:{ROWS}>")
            self.durable(server, "talk", second["usage"]["prompt_tokens"] // 64 * 64)
            server.kill()
        with self.start() as server:
            again = server.chat(history, max_tokens=12, session_id="talk")
            self.assertEqual(again["choices"][0]["message"], second["choices"][0]["message"])
            self.assertGreaterEqual(cached(again), second["usage"]["prompt_tokens"] // 64 * 64)
            self.assertEqual(encoded(server), 0)
            self.assertEqual(server.stop(), 0)

    def test_what_the_server_continues(self):
        def item(seed: int) -> list:
            return [{"role": "user", "content": [
                {"type": "input_text", "text": TEXT},
                {"type": "input_image", "image_url": "data:image/bmp;base64," + text64(seed)}]}]

        def responses(server: Server, **body) -> dict:
            return server.post("/v1/responses", {"max_output_tokens": 8, "temperature": 0, **body})

        with self.start() as server:
            first = responses(server, input=item(3))
            conversation = server.post("/v1/conversations", {"items": item(4)})["id"]
            self.durable(server, first["id"], ROWS)
            server.kill()
        with self.start() as server:
            next_one = responses(server, input=QUESTION, previous_response_id=first["id"])
            self.assertGreater(next_one["usage"]["input_tokens_details"]["cached_tokens"], ROWS)
            whole = responses(server, input=[*item(3), *first["output"],
                                             {"role": "user", "content": QUESTION}])
            self.assertEqual(whole["output"][0]["content"], next_one["output"][0]["content"])
            self.assertEqual(encoded(server), 0)
            told = responses(server, input=QUESTION, conversation=conversation)
            self.assertEqual(encoded(server), 1)
            self.assertEqual(
                told["output"][0]["content"],
                responses(server, input=[*item(4), {"role": "user", "content": QUESTION}])
                ["output"][0]["content"])
            kept = server.call("GET", f"/v1/conversations/{conversation}/items")[1]["data"]
            self.assertIn("input_image", json.dumps(kept))

    def test_folder_of_media(self):
        Path(self.files.name, "shown").mkdir(exist_ok=True)
        Path(self.files.name, "shown/a.bmp").write_bytes(picture(1))
        Path(self.files.name, "hidden.bmp").write_bytes(picture(1))

        def by_url(url: str) -> list:
            messages = ask(1)
            messages[0]["content"][1]["image_url"]["url"] = url
            return messages

        with self.start("--media-path", self.files.name + "/shown") as server:
            named = server.chat(by_url("file://a.bmp"), max_tokens=4)
            sent = server.chat(ask(1), max_tokens=4)
            self.assertEqual(sent["choices"][0]["message"], named["choices"][0]["message"])
            self.assertGreater(cached(sent), ROWS)
            for url in ("file://../hidden.bmp", f"file://{self.files.name}/hidden.bmp", "file://",
                        "file://b.bmp"):
                status, answer, _ = server.call("POST", "/v1/chat/completions", {"messages": by_url(url)})
                self.assertEqual(status, 400, answer)
                self.assertIn("file://", answer["error"]["message"])
        with self.start() as server:
            status, answer, _ = server.call("POST", "/v1/chat/completions",
                                            {"messages": by_url("file://a.bmp")})
            self.assertEqual(status, 400)
            self.assertIn("--media-path", answer["error"]["message"])


class Protocols(Case):
    def test_all_of_them(self):
        with self.start() as server:
            counts = []
            chat = server.chat(ask(1), max_tokens=4)
            counts.append(chat["usage"]["prompt_tokens"])
            data = {"type": "base64", "media_type": "image/bmp", "data": text64(1)}
            blocks = [{"role": "user", "content": [{"type": "text", "text": TEXT},
                                                   {"type": "image", "source": data},
                                                   {"type": "text", "text": QUESTION}]}]
            message = server.post("/v1/messages", {"messages": blocks, "max_tokens": 4, "temperature": 0})
            usage = message["usage"]
            counts.append(usage["input_tokens"] + usage["cache_read_input_tokens"] +
                          usage["cache_creation_input_tokens"])
            self.assertEqual(message["content"][0]["text"], chat["choices"][0]["message"]["content"])
            counts.append(server.post("/v1/messages/count_tokens", {"messages": blocks})["input_tokens"])
            self.assertEqual(set(counts), {counts[0]})
            self.assertEqual(encoded(server), 1)

            def ollama(path: str, **body) -> dict:
                return server.post(path, {"stream": False, "options": {"num_predict": 4, "temperature": 0},
                                          **body})

            talked = ollama("/api/chat", messages=[{"role": "user", "content": QUESTION,
                                                    "images": [text64(1)]}])
            written = ollama("/api/generate", prompt=QUESTION, images=[text64(1)])
            self.assertEqual(talked["message"]["content"], written["response"])
            self.assertGreater(talked["prompt_eval_count"], ROWS)

            def complete(marker: str, data: list) -> dict:
                return server.post("/completion", {"prompt": {"prompt_string": f"See {marker} and",
                                                              "multimodal_data": data},
                                                   "n_predict": 4, "temperature": 0})

            props = server.call("GET", "/props")[1]
            self.assertEqual(props["modalities"], {"vision": True, "audio": False})
            by_name = complete(props["media_marker"], [text64(1)])
            self.assertEqual(by_name["content"], complete("<__media__>", [text64(1)])["content"])
            self.assertGreater(by_name["tokens_evaluated"], ROWS)
            self.assertIn("vision", server.post("/api/show", {"model": Path(MODEL).stem})["capabilities"])

    def test_what_is_wrong_is_said(self):
        with self.start() as server:
            def refused(messages: list) -> str:
                status, answer, _ = server.call("POST", "/v1/chat/completions", {"messages": messages})
                self.assertEqual(status, 400, answer)
                return answer["error"]["message"]

            bad = ask(1)
            bad[0]["content"][1]["image_url"]["url"] = base64.b64encode(b"no picture").decode()
            self.assertIn("medium 1", refused(bad))
            bad[0]["content"][1]["image_url"]["url"] = "https://example.org/a.png"
            self.assertIn("fetches nothing", refused(bad))
            marker = server.call("GET", "/props")[1]["media_marker"]
            self.assertIn("2 places", refused(ask(1, "And " + marker)))
            long = ask(1)
            long[0]["content"][0]["text"] = serving.TEXT * 2
            self.assertIn("context", refused(long))
            # It still answers.
            self.assertTrue(server.chat(ask(1), max_tokens=2)["choices"])
        with self.start(projector=False) as server:
            self.assertIn("--mmproj", server.call("POST", "/v1/chat/completions",
                                                  {"messages": ask(1)})[1]["error"]["message"])
            self.assertEqual(server.call("GET", "/props")[1]["modalities"],
                             {"vision": False, "audio": False})
        for options, code, text in (((*("--mmproj", MODEL),), 6, "projector"),
                                    (("--mmproj", self.projector + ".gone"), 3, "No such file"),
                                    (("--mmproj", self.projector, "--engine", "own"), 8, "libllama")):
            with self.subTest(options=options):
                done = subprocess.run([PROGRAM, "serve", "-m", MODEL, "--state-dir", self.folder, "--port",
                                       "0", "--dram", "0", *options], capture_output=True, text=True,
                                      timeout=300)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(text, done.stderr)


@unittest.skipUnless(PEER, "needs llama-server")
class LikeLlamaServer(Case):
    def test_answers(self):
        with serving.LlamaServer(PEER, MODEL, "--mmproj", self.projector, "-t", "2", "-c", "4096",
                                 "-np", "1") as theirs, self.start() as server:
            for seed in range(4):
                messages = [*ask(seed), {"role": "assistant", "content": "A ship."},
                            *ask(seed + 10, "And here?")]
                ours, other = (s.chat(messages, max_tokens=16) for s in (server, theirs))
                self.assertEqual(ours["usage"]["prompt_tokens"], other["usage"]["prompt_tokens"])
                self.assertEqual(ours["choices"][0]["message"]["content"],
                                 other["choices"][0]["message"]["content"])


if __name__ == "__main__":
    unittest.main()
