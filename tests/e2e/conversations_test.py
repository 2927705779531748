#!/usr/bin/env python3
"""OpenAI's conversations on the real default model: items that survive a restart, are apart by key,
and are added whole or not at all.

    conversations_test.py HCACHE [-v] [name]
"""

import http.client
import json
import sys
import tempfile
import threading
import unittest
import urllib.parse

import serving
from serving import Server, wait_until

PROGRAM = sys.argv.pop(1)
MODEL = serving.default_model()
PATH = "/v1/conversations"


def start(folder: str, *options: str) -> Server:
    return Server(PROGRAM, "-m", MODEL, "--state-dir", folder, "-t", "2", "--ctx", "2048",
                  *serving.STATE_COMES_BACK, *options)


def user(text: str) -> dict:
    return {"type": "message", "role": "user", "content": text}


def items_of(server: Server, conversation: str, headers: dict | None = None) -> list:
    """All of them, by pages of two."""
    out: list = []
    while True:
        after = f"&after={out[-1]['id']}" if out else ""
        status, page, _ = server.call("GET", f"{PATH}/{conversation}/items?order=asc&limit=2{after}",
                                      headers=headers)
        assert status == 200, page
        out += page["data"]
        if not page["has_more"]:
            return out


def texts(items: list) -> list:
    return [item["content"][0]["text"] for item in items]


def respond(server: Server, conversation: str | dict | None, text: str | list | None, **fields) -> dict:
    body = {"input": text, "conversation": conversation, "temperature": 0, "max_output_tokens": 8,
            **fields}
    return server.post("/v1/responses", {k: v for k, v in body.items() if v is not None})


class Requests(serving.OneServer):
    @classmethod
    def start(cls, folder: str) -> Server:
        return start(folder, "--parallel", "2")

    def refused(self, status: int, words: str, method: str, path: str, body: object = None) -> None:
        got, error, _ = self.server.call(method, path, body)
        self.assertEqual(got, status, error)
        self.assertIn(words, error["error"]["message"])

    def answers(self) -> bool:
        return any(slot["is_processing"] for slot in self.server.call("GET", "/slots")[1])

    def test_a_conversation_and_its_items(self):
        made = self.server.post(PATH, {"metadata": {"topic": "sea"}, "items": [user("One"), user("Two")]})
        name = made["id"]
        self.assertRegex(name, "^conv_[0-9a-f]{32}$")
        self.assertEqual((made["object"], made["metadata"]), ("conversation", {"topic": "sea"}))
        self.assertEqual(self.server.call("GET", f"{PATH}/{name}")[1], made)
        changed = self.server.post(f"{PATH}/{name}", {"metadata": {"topic": "land"}})
        self.assertEqual(changed, {**made, "metadata": {"topic": "land"}})

        added = self.server.post(f"{PATH}/{name}/items", {"items": [
            user("Three"), {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"}]})
        self.assertEqual((len(added["data"]), added["has_more"]), (3, False))
        self.assertEqual((added["first_id"], added["last_id"]),
                         (added["data"][0]["id"], added["data"][-1]["id"]))
        items = items_of(self.server, name)
        self.assertEqual(items[2:], added["data"])
        self.assertEqual(texts(items[:3]), ["One", "Two", "Three"])
        self.assertEqual({item["status"] for item in items}, {"completed"})
        newest = self.server.call("GET", f"{PATH}/{name}/items")[1]["data"]
        self.assertEqual(newest, items[::-1])
        item = f"{PATH}/{name}/items/{items[1]['id']}"
        self.assertEqual(self.server.call("GET", item)[1], items[1])
        self.assertEqual(self.server.call("DELETE", item)[1], changed)
        self.refused(404, items[1]["id"], "GET", item)
        self.assertEqual(items_of(self.server, name), [items[0], *items[2:]])

        self.assertEqual(self.server.call("DELETE", f"{PATH}/{name}")[1],
                         {"id": name, "object": "conversation.deleted", "deleted": True})
        for method in ("GET", "DELETE"):
            self.refused(404, name, method, f"{PATH}/{name}")
        self.refused(404, name, "GET", f"{PATH}/{name}/items")
        # A body is not needed to begin one.
        self.assertEqual(self.server.call("POST", PATH)[1]["metadata"], {})

    def test_what_is_wrong_is_named_and_changes_nothing(self):
        name = self.server.post(PATH, {"items": [user("One")]})["id"]
        items = f"{PATH}/{name}/items"
        self.refused(400, "items[1].role", "POST", items, {"items": [user("Two"), {"content": "x"}]})
        self.refused(400, "1 to 20", "POST", items, {"items": [user("x")] * 21})
        self.refused(400, "metadata", "POST", f"{PATH}/{name}", {"metadata": {"x": 1}})
        self.refused(400, "limit", "GET", items + "?limit=101")
        self.refused(400, "order", "GET", items + "?order=up")
        self.refused(400, "msg_none", "GET", items + "?after=msg_none")
        self.refused(400, "items", "POST", PATH, {"items": [user("x")] * 21})
        self.assertEqual(texts(items_of(self.server, name)), ["One"])
        # A session that no conversation was begun as is none, and what goes on by name stays what it is.
        self.server.chat([user("Hi") | {"type": None}], max_tokens=2, session_id="plain")
        self.refused(404, "plain", "GET", PATH + "/plain")
        self.server.chat([{"role": "user", "content": "Hi"}], max_tokens=2, session_id=name)
        self.assertEqual(texts(items_of(self.server, name)), ["One"])

    def test_responses_go_on_from_it_and_are_added(self):
        name = self.server.post(PATH, {"items": [
            {"role": "developer", "content": "Be brief. " + serving.TEXT[:800]}]})["id"]
        first = respond(self.server, name, "My name is Ada. Remember it.", instructions="Be kind.")
        self.assertEqual(first["conversation"], {"id": name})
        counted = self.server.post("/v1/responses/input_tokens", {
            "input": "What is my name?", "conversation": {"id": name}, "instructions": "Be kind."})
        second = respond(self.server, {"id": name}, "What is my name?", instructions="Be kind.")
        self.assertEqual(second["usage"]["input_tokens"], counted["input_tokens"])
        # All that was said is restored: the last question alone is new.
        known = first["usage"]["total_tokens"]
        self.assertGreaterEqual(second["usage"]["input_tokens_details"]["cached_tokens"], known - 1)
        items = items_of(self.server, name)
        self.assertEqual([item["role"] for item in items],
                         ["developer", "user", "assistant", "user", "assistant"])
        self.assertEqual(texts(items)[1:], [
            "My name is Ada. Remember it.", first["output"][0]["content"][0]["text"],
            "What is my name?", second["output"][0]["content"][0]["text"]])
        self.assertEqual([items[2]["id"], items[4]["id"]], [r["output"][0]["id"] for r in (first, second)])

        # The same text from the client gives the same answer.
        messages = [{"role": item["role"], "content": item["content"]} for item in items[:4]]
        again = respond(self.server, None, messages, instructions="Be kind.")
        self.assertIsNone(again["conversation"])
        self.assertEqual(again["output"][0]["content"][0]["text"], texts(items)[4])
        # What a conversation ends with may be the question.
        self.server.post(f"{PATH}/{name}/items", {"items": [user("Who are you?")]})
        respond(self.server, name, None)
        self.assertEqual(len(items_of(self.server, name)), 7)
        # It is a session: its state can be kept, and goes with it.
        session = self.server.call("GET", f"/v1/sessions/{name}")[1]
        self.assertGreater(session["tokens"], known)
        self.assertEqual(self.server.call("PATCH", f"/v1/sessions/{name}", {"pinned": True})[0], 200)
        self.assertEqual(self.server.call("DELETE", f"{PATH}/{name}")[0], 200)
        self.assertEqual(self.server.call("GET", f"/v1/sessions/{name}")[0], 404)

    def test_a_system_item_of_the_input_stands_behind_the_conversation(self):
        name = self.server.post(PATH, {})["id"]
        first = respond(self.server, name, [{"role": "system", "content": "Be brief."}, user("One?")],
                        instructions="Be kind.")
        second = respond(self.server, name, [{"role": "system", "content": "Be long."}, user("Two?")],
                         instructions="Be kind.")
        third = respond(self.server, name, user("Three?")["content"], instructions="Be kind.")
        for before, after in ((first, second), (second, third)):
            self.assertGreaterEqual(after["usage"]["input_tokens_details"]["cached_tokens"],
                                    before["usage"]["total_tokens"] - 1)

    def test_what_is_volatile_stays_where_it_was_read(self):
        name = self.server.post(PATH, {})["id"]
        known = 0
        for n, moment in enumerate(("noon", "midnight")):
            mark = {"type": "input_text", "text": f"It is {moment}.", "cache_control": {"type": "volatile"}}
            said = [{"role": "system", "content": [mark]}, user(f"Question {n}")]
            answer = respond(self.server, name, said)
            # All that was said comes back, the earlier time of day among it.
            self.assertGreaterEqual(answer["usage"]["input_tokens_details"]["cached_tokens"], known)
            known = answer["usage"]["total_tokens"] - 1
        said = texts(items_of(self.server, name))
        self.assertEqual(said[::2], ["Question 0\n\nIt is noon.", "Question 1\n\nIt is midnight."])

    def test_a_stream_is_added_before_it_ends(self):
        name = self.server.post(PATH, {})["id"]
        events = self.server.stream("/v1/responses", {"input": "Count.", "conversation": name,
                                                      "stream": True, "max_output_tokens": 6})
        self.assertEqual(events[0][1]["response"]["conversation"], {"id": name})
        answer = events[-1][1]["response"]
        self.assertEqual([item["id"] for item in items_of(self.server, name)][1:],
                         [item["id"] for item in answer["output"]])
        # Nothing that a request wants of the cache keeps its items away.
        respond(self.server, name, "More.", cache_prompt=False)
        respond(self.server, name, "More.", prompt_cache_retention="in_memory", store=False)
        self.assertEqual(len(items_of(self.server, name)), 6)

    def test_what_can_not_be_answered_adds_nothing(self):
        name = self.server.post(PATH, {})["id"]
        self.refused(400, "input: empty", "POST", "/v1/responses", {"conversation": name})
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            self.refused(404, "conv_none", "POST", path, {"input": "x", "conversation": "conv_none"})
            both = {"input": "x", "conversation": name, "previous_response_id": "resp_1"}
            status, error, _ = self.server.call("POST", path, both)
            self.assertEqual((status, error["error"]["param"]), (400, "conversation"))
            self.assertIn("previous_response_id", error["error"]["message"])
        self.refused(400, "session_id", "POST", "/v1/responses",
                     {"input": "x", "conversation": name, "session_id": "s"})
        self.refused(400, "shorter", "POST", "/v1/responses",
                     {"input": "word " * 3000, "conversation": name})
        # A client that hangs up in the middle.
        url = urllib.parse.urlsplit(self.server.url)
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=300)
        connection.request("POST", "/v1/responses", json.dumps({
            "input": "Tell a long story.", "conversation": name, "stream": True, "ignore_eos": True,
            "max_output_tokens": 1500}), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read(200)
        answer.close()
        connection.close()
        wait_until(lambda: not self.answers(), "the answer to be given up")
        self.assertEqual(items_of(self.server, name), [])
        # One that is deleted meanwhile does not come back.
        done = threading.Thread(target=respond, args=(self.server, name, "Count."),
                                kwargs={"max_output_tokens": 200, "ignore_eos": True})
        done.start()
        wait_until(self.answers, "the answer to begin")
        self.assertEqual(self.server.call("DELETE", f"{PATH}/{name}")[0], 200)
        done.join()
        self.refused(404, name, "GET", f"{PATH}/{name}")
        self.assertEqual(self.server.call("GET", f"/v1/sessions/{name}")[0], 404)

    def test_nothing_is_lost_where_many_add_at_once(self):
        name = self.server.post(PATH, {})["id"]
        failures: list = []

        def add(writer: int) -> None:
            try:
                for n in range(5):
                    self.server.post(f"{PATH}/{name}/items", {"items": [user(f"{writer} {n}")]})
                respond(self.server, name, f"{writer} 5", max_output_tokens=4)
            except RuntimeError as error:
                failures.append(error)

        writers = [threading.Thread(target=add, args=(writer,)) for writer in range(4)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        self.assertEqual(failures, [])
        items = items_of(self.server, name)
        self.assertEqual(len({item["id"] for item in items}), 4 * 7)
        said = [text for item, text in zip(items, texts(items), strict=True) if item["role"] == "user"]
        for writer in range(4):
            own = [text for text in said if text.startswith(f"{writer} ")]
            self.assertEqual(own, [f"{writer} {n}" for n in range(6)])


class Restarts(unittest.TestCase):
    def test_conversations_survive_and_keys_are_apart(self):
        keys = [{"Authorization": f"Bearer {key}"} for key in ("key-of-a", "key-of-b")]
        with tempfile.TemporaryDirectory() as folder:
            options = ("--api-key", "key-of-a", "--api-key", "key-of-b")
            with start(folder, *options) as server:
                made = server.post(PATH, {"metadata": {"a": "b"}, "items": [user("One")]}, keys[0])
                name = made["id"]
                body = {"input": serving.TEXT[:1200], "conversation": name, "max_output_tokens": 6,
                        "temperature": 0}
                first = server.post("/v1/responses", body, keys[0])
                salted = server.post(PATH + "?cache_salt=s", {"items": [user("Two")]}, keys[0])["id"]
                items = items_of(server, name, keys[0])
                self.assertEqual(server.stop(), 0)
            with start(folder, *options) as server:
                self.assertEqual(server.call("GET", f"{PATH}/{name}", headers=keys[0])[1], made)
                self.assertEqual(items_of(server, name, keys[0]), items)
                body["input"] = "And then?"
                then = server.post("/v1/responses", body, keys[0])
                self.assertGreaterEqual(then["usage"]["input_tokens_details"]["cached_tokens"],
                                        first["usage"]["input_tokens"])
                for path in (f"{PATH}/{name}", f"{PATH}/{name}/items", f"{PATH}/{salted}"):
                    self.assertEqual(server.call("GET", path, headers=keys[1])[0], 404)
                self.assertEqual(server.call("POST", "/v1/responses", body, keys[1])[0], 404)
                # A salt of the client's divides as everywhere.
                self.assertEqual(server.call("GET", f"{PATH}/{salted}", headers=keys[0])[0], 404)
                self.assertEqual(server.call("GET", f"{PATH}/{salted}?cache_salt=s", headers=keys[0])[0], 200)
                salted_body = {**body, "conversation": salted, "cache_salt": "s"}
                said = server.post("/v1/responses", salted_body, keys[0])
                self.assertEqual(said["conversation"], {"id": salted})
                # What was answered is there after a crash, too.
                added = server.post(f"{PATH}/{name}/items", {"items": [user("Three")]}, keys[0])["data"]
                server.kill()
            with start(folder, *options) as server:
                self.assertEqual(items_of(server, name, keys[0])[-1:], added)
                self.assertEqual(server.stop(), 0)

    def test_without_a_store_they_last_as_long_as_the_server(self):
        with tempfile.TemporaryDirectory() as folder, start(folder, "--no-store") as server:
            name = server.post(PATH, {"items": [user("One")]})["id"]
            respond(server, name, "Two")
            self.assertEqual(len(items_of(server, name)), 3)
            self.assertEqual(server.stop(), 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
