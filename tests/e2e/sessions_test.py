#!/usr/bin/env python3
"""Sessions that travel, on the real default model: export, import, and llama-server's slots.

    sessions_test.py HCACHE [-v] [name]
"""

import http.client
import json
import sys
import tempfile
import unittest
import urllib.error
import urllib.request

import serving
from serving import STATE_COMES_BACK, Conversation, Server, wait_until

PROGRAM = sys.argv.pop(1)
MODEL = serving.default_model()
KEY_A, KEY_B = "key-of-a", "key-of-b"


def start(folder: str, *options: str) -> Server:
    return Server(PROGRAM, "-m", MODEL, "--state-dir", folder, "-t", "2", "--ctx", "2048",
                  *STATE_COMES_BACK, *options)


def bearer(key: str) -> dict:
    return {"Authorization": f"Bearer {key}"}


def transfer(server: Server, method: str, path: str, data: bytes | None = None,
             headers: dict | None = None) -> tuple:
    """(status, bytes)"""
    request = urllib.request.Request(server.url + path, data, method=method, headers={
        "Content-Type": "application/octet-stream", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def export(server: Server, name: str, headers: dict | None = None) -> bytes:
    def is_saved() -> bool:
        session = server.call("GET", f"/v1/sessions/{name}", headers=headers)[1]
        return session["saved_tokens"] + 1 >= session["tokens"]

    wait_until(is_saved, f"the state of {name} on disk")
    status, file = transfer(server, "GET", f"/v1/sessions/{name}/export", headers=headers)
    assert status == 200, file
    return file


def upload(server: Server, file: bytes, query: str = "", headers: dict | None = None) -> tuple:
    status, answer = transfer(server, "POST", "/v1/sessions/import" + query, file, headers)
    return status, json.loads(answer)


class Travelling(unittest.TestCase):
    def test_a_session_goes_on_elsewhere(self):
        with tempfile.TemporaryDirectory() as here, tempfile.TemporaryDirectory() as there:
            # Two servers with the same text: one goes on by itself, one lets the session travel.
            talk, uninterrupted = Conversation(1), Conversation(1)
            with start(here) as first:
                talk.step(first, session_id="talk")
                talk.step(first, session_id="talk")
                uninterrupted.messages = list(talk.messages)
                uninterrupted.answers = list(talk.answers)
                file = export(first, "talk")
                uninterrupted.step(first)
                self.assertEqual(first.call("DELETE", "/v1/sessions/talk")[0], 200)
                # The same file comes back home.
                status, session = upload(first, file)
                self.assertEqual(status, 200, session)
                self.assertEqual(session["id"], "talk")
                self.assertEqual(first.stop(), 0)
            with start(there) as second:
                status, session = upload(second, file, "?id=moved")
                self.assertEqual(status, 200, session)
                self.assertEqual(session["id"], "moved")
                self.assertTrue(session["named"])
                self.assertGreaterEqual(session["saved_tokens"], session["tokens"] - 1)
                self.assertGreater(session["saved_bytes"], 0)
                talk.cached = talk.returned = 0
                talk.step(second, session_id="moved")
                self.assertEqual(talk.answers[-1], uninterrupted.answers[-1])
                self.assertGreaterEqual(talk.cached, talk.returned)
                self.assertGreater(talk.cached, 100)
                self.assertTrue(second.call("POST", "/v1/store/verify")[1]["ok"])
                # What is here goes out again as it came in, with what was said since.
                again = export(second, "moved")
                self.assertGreater(len(again), len(file))
                self.assertEqual(second.stop(), 0)

    def test_damaged_files_leave_nothing(self):
        with tempfile.TemporaryDirectory() as here, tempfile.TemporaryDirectory() as there:
            with start(here) as first:
                Conversation(2).step(first, session_id="talk")
                file = export(first, "talk")
                status, answer = upload(first, file)
                self.assertEqual(status, 409, answer)
                self.assertIn("talk", answer["error"]["message"])
                self.assertEqual(transfer(first, "GET", "/v1/sessions/none/export")[0], 404)
            # Another KV type makes another state, as another model would.
            with start(there, "--kv-type", "bf16") as other:
                status, answer = upload(other, file)
                self.assertEqual(status, 409, answer)
                own = other.chat([{"role": "user", "content": "Hi."}], max_tokens=1)
                self.assertIn(own["system_fingerprint"].removeprefix("b"), answer["error"]["message"])
                self.assertIn(file[24:40].hex(), answer["error"]["message"])
                self.assertEqual(other.stop(), 0)
            with tempfile.TemporaryDirectory() as empty, start(empty) as second:
                flipped = bytearray(file)
                flipped[len(file) // 2] ^= 1
                for bad in (file[:-1], file[:100], b"x" * 1000, bytes(flipped), file + b"x"):
                    status, answer = upload(second, bad)
                    self.assertEqual(status, 400, answer)
                    self.assertIn("session file", answer["error"]["message"])
                self.assertEqual(upload(second, b"")[0], 400)
                self.assertEqual(upload(second, file, "?id=")[0], 400)
                self.assertEqual(second.call("GET", "/v1/sessions")[1]["data"], [])
                self.assertEqual(second.call("GET", "/v1/store")[1]["chunks"], 0)
                host = second.url.removeprefix("http://")
                connection = http.client.HTTPConnection(host, timeout=60)
                connection.putrequest("POST", "/v1/sessions/import")
                connection.putheader("Content-Length", str(1 << 30))
                connection.endheaders()
                with connection.getresponse() as reply:
                    self.assertEqual(reply.status, 413)
                connection.close()
                self.assertEqual(upload(second, file)[0], 200)

    def test_keys_stay_apart(self):
        with tempfile.TemporaryDirectory() as folder:
            with start(folder, "--api-key", KEY_A, "--api-key", KEY_B) as server:
                a, b = bearer(KEY_A), bearer(KEY_B)
                messages = [{"role": "user", "content": serving.TEXT[:800]}]
                body = {"messages": messages, "temperature": 0, "max_tokens": 8,
                        "session_id": "talk"}
                answer = server.post("/v1/chat/completions", body, a)
                self.assertEqual(transfer(server, "GET", "/v1/sessions/talk/export")[0], 401)
                self.assertEqual(
                    transfer(server, "GET", "/v1/sessions/talk/export", headers=b)[0], 404)
                file = export(server, "talk", a)
                self.assertEqual(upload(server, file, "", b)[0], 200)
                messages = messages + [answer["choices"][0]["message"],
                                       {"role": "user", "content": "And then?"}]
                moved = server.post("/v1/chat/completions", {**body, "messages": messages}, b)
                self.assertGreater(moved["usage"]["prompt_tokens_details"]["cached_tokens"], 100)


class Slots(unittest.TestCase):
    def slots(self, server: Server, headers: dict | None = None) -> list:
        slots = server.call("GET", "/slots", headers=headers or {})[1]
        return [slot["id"] for slot in slots
                if slot["n_prompt_tokens"] > 0 and not slot["is_processing"]]

    def act(self, server: Server, slot: int, action: str, name: str | None = None) -> tuple:
        return server.call("POST", f"/slots/{slot}?action={action}",
                           None if name is None else {"filename": name})[:2]

    def test_save_erase_restore(self):
        with tempfile.TemporaryDirectory() as folder:
            with start(folder, "--slot-save-path", folder) as server:
                talk = Conversation(3)
                talk.step(server)
                wait_until(lambda: self.slots(server) == [0], "an idle slot")
                status, saved = self.act(server, 0, "save", "talk.bin")
                self.assertEqual(status, 200, saved)
                self.assertEqual((saved["id_slot"], saved["filename"]), (0, "talk.bin"))
                self.assertEqual(saved["n_saved"], talk.completed)
                self.assertGreater(saved["n_written"], 0)
                self.assertGreater(saved["timings"]["save_ms"], 0)
                # Numbers stay while another conversation comes.
                server.chat([{"role": "user", "content": "Something else."}], max_tokens=2)
                wait_until(lambda: self.slots(server) == [0, 1], "two idle slots")
                self.assertEqual(self.act(server, 0, "erase"),
                                 (200, {"id_slot": 0, "n_erased": talk.completed}))
                wait_until(lambda: self.slots(server) == [1], "one idle slot")
                status, restored = self.act(server, 0, "restore", "talk.bin")
                self.assertEqual(status, 200, restored)
                self.assertEqual(restored["n_restored"], saved["n_saved"])
                self.assertEqual(restored["n_read"], saved["n_written"])
                self.assertGreater(restored["timings"]["restore_ms"], 0)
                talk.step(server)
                self.assertGreaterEqual(talk.cached, talk.returned)
                self.assertGreater(talk.cached, 64)
                self.assertEqual(server.stop(), 0)
            # What was saved outlives the process, and stays as it was.
            with start(folder, "--slot-save-path", folder) as server:
                status, restored = self.act(server, 3, "restore", "talk.bin")
                self.assertEqual(status, 200, restored)
                self.assertEqual((restored["id_slot"], restored["n_restored"]),
                                 (3, saved["n_saved"]))

    def test_what_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            with start(folder, "--slot-save-path", folder, "--api-key", KEY_A,
                       "--api-key", KEY_B) as server:
                a, b = bearer(KEY_A), bearer(KEY_B)
                server.post("/v1/chat/completions", {
                    "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2}, a)
                wait_until(lambda: self.slots(server, a) == [0], "an idle slot")

                def status(path: str, body: object = None, key: dict = a) -> int:
                    return server.call("POST", path, body, key)[0]

                good = {"filename": "x.bin"}
                for name in ("", "../x", "a/b", "..", "a\\b", "x" * 256):
                    self.assertEqual(status("/slots/0?action=save", {"filename": name}), 400)
                self.assertEqual(status("/slots/0?action=save", {}), 400)
                self.assertEqual(status("/slots/0?action=fly", good), 400)
                self.assertEqual(status("/slots/0", good), 400)
                self.assertEqual(status("/slots/x?action=save", good), 400)
                self.assertEqual(status("/slots/9?action=save", good), 400)
                self.assertEqual(status("/slots/-1?action=restore", good), 400)
                self.assertEqual(status("/slots/0?action=restore", good), 400)
                # Another key's slot is none.
                for action in ("save", "erase"):
                    self.assertEqual(status(f"/slots/0?action={action}", good, b), 400)
                self.assertEqual(status("/slots/0?action=save", good), 200)
                self.assertEqual(status("/slots/0?action=restore", good, b), 400)
                self.assertEqual(status("/slots/0?action=restore", good), 200)

    def test_actions_must_be_allowed(self):
        with tempfile.TemporaryDirectory() as folder, start(folder) as server:
            status, answer = self.act(server, 0, "save", "x.bin")
            self.assertEqual(status, 501)
            self.assertIn("--slot-save-path", answer["error"]["message"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
