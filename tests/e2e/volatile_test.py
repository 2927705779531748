#!/usr/bin/env python3
"""Text that requests mark as volatile, on the real default model: the model reads it, and it keeps
nothing of a conversation from coming back.

    volatile_test.py HCACHE [-v] [name]
"""

import sys
import unittest

import serving
from serving import Server

PROGRAM = sys.argv.pop(1)


class Volatile(serving.OneServer):
    @classmethod
    def start(cls, folder: str) -> Server:
        return Server(PROGRAM, "-m", serving.default_model(), "--state-dir", folder, "-t", "2", "--ctx",
                      "2048", *serving.STATE_COMES_BACK)

    def test_what_stands_before_the_last_turn_comes_back(self):
        def turns(time_of_day: str, kind: str, salt: str) -> tuple:
            """The marked block early in a system prompt, and the conversation behind it."""
            block = {"type": kind, "text": f"It is {time_of_day}.", "cache_control": {"type": "volatile"}}
            return ([{"type": kind, "text": "Be brief. " + salt}, block,
                     {"type": kind, "text": serving.TEXT[5000:6200]}],
                    [{"role": "user", "content": "Who waved?"}, {"role": "assistant", "content": "A man."},
                     {"role": "user", "content": "When?"}])

        def chat(*what: str) -> tuple:
            system, messages = turns(*what, "text", "chat")
            body = {"messages": [{"role": "system", "content": system}, *messages]}
            usage = self.server.post("/v1/chat/completions", {**body, "max_tokens": 2})["usage"]
            return body, usage["prompt_tokens_details"]["cached_tokens"]

        def anthropic(*what: str) -> tuple:
            system, messages = turns(*what, "text", "anthropic")
            usage = self.server.post("/v1/messages", {"system": system, "messages": messages,
                                                      "max_tokens": 2})["usage"]
            return {"messages": [{"role": "system", "content": system}, *messages]}, \
                usage["cache_read_input_tokens"]

        def response(*what: str) -> tuple:
            system, messages = turns(*what, "input_text", "response")
            body = {"input": [{"role": "system", "content": system}, *messages], "max_output_tokens": 2}
            usage = self.server.post("/v1/responses", body)["usage"]
            as_chat = [{**part, "type": "text"} for part in system]
            return {"messages": [{"role": "system", "content": as_chat}, *messages]}, \
                usage["input_tokens_details"]["cached_tokens"]

        for ask in (chat, anthropic, response):
            ask("noon")
            body, cached = ask("midnight")
            prompt = self.server.post("/apply-template", body)["prompt"]
            self.assertIn("When?\n\nIt is midnight.", prompt)
            self.assertEqual(prompt.count("midnight"), 1)
            before = self.server.post("/tokenize", {"content": prompt[:prompt.index("When?")]})["tokens"]
            self.assertGreater(len(before), 250)
            self.assertGreaterEqual(cached, len(before), ask.__name__)

    def test_without_a_turn_to_read_it_in_it_stays(self):
        mark = {"type": "text", "text": "It is noon.", "cache_control": {"type": "volatile"}}
        prompt = self.server.post("/apply-template", {"messages": [
            {"role": "system", "content": [mark, {"type": "text", "text": "Be brief."}]}]})["prompt"]
        self.assertIn("It is noon.\nBe brief.", prompt)


if __name__ == "__main__":
    unittest.main(verbosity=2)
