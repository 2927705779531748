#!/usr/bin/env python3
"""The web page in a real browser, against the real server: what people do with it, by mouse and by
keyboard, across reloads and restarts.

page_test.py PROGRAM MODEL. Drives Debian's chromium through playwright (PyPI). Where one of them is
missing the test is skipped (exit code 77), or fails with HCACHE_REQUIRE_BROWSER=1. Nothing here
depends on the machine's speed.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
import urllib.error
import urllib.request

PROGRAM, MODEL = sys.argv[1], sys.argv[2]
CHROMIUM = os.environ.get("HCACHE_CHROMIUM", "/usr/bin/chromium")
PATIENCE = 120  # seconds until something hangs rather than works
SKIPPED = 77


def skip(why):
    if os.environ.get("HCACHE_REQUIRE_BROWSER") == "1":
        sys.exit(f"page_test: {why}, and HCACHE_REQUIRE_BROWSER=1 asks for it")
    print(f"page_test: skipped, {why}")
    sys.exit(SKIPPED)


try:
    from playwright.sync_api import expect, sync_playwright
except ImportError:
    skip("the Python package playwright is missing (pip install playwright==1.55.0)")
if not os.access(CHROMIUM, os.X_OK):
    skip(f"there is no {CHROMIUM} (apt-get install chromium; or set HCACHE_CHROMIUM)")

LONG = "The harbour master wrote the names of nine boats into a green book. " * 12


class Server:
    """`hcache serve` on a state folder of its own; restarts keep folder and port."""

    def __init__(self, measured, context, *options):
        self.folder = tempfile.TemporaryDirectory(prefix="hcache-page-")
        shutil.copytree(measured, self.folder.name, dirs_exist_ok=True)
        self.context = context
        self.options = options
        self.port = 0
        self.process = None
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [PROGRAM, "serve", "-m", MODEL, "--state-dir", self.folder.name,
             "--port", str(self.port), "--ctx", str(self.context), "--temperature", "0",
             "--grace", "0s", *self.options],
            stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        self.port = int(re.search(r"http://127\.0\.0\.1:(\d+)", line).group(1))

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=PATIENCE)
        self.process.stdout.close()
        return code

    def close(self):
        if self.process.poll() is None:
            self.stop()
        self.folder.cleanup()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/"

    def sessions(self):
        with urllib.request.urlopen(f"{self.url}v1/sessions", timeout=PATIENCE) as answer:
            return json.load(answer)["data"]


class PageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # Measured once, and then part of every server's state folder.
        cls.measured = tempfile.TemporaryDirectory(prefix="hcache-page-")
        cls.addClassCleanup(cls.measured.cleanup)
        subprocess.run([PROGRAM, "profile", "-m", MODEL, "--state-dir", cls.measured.name,
                        "--json"], stdout=subprocess.DEVNULL, check=True, timeout=600)
        shutil.rmtree(os.path.join(cls.measured.name, "store"), ignore_errors=True)
        cls.playwright = sync_playwright().start()
        cls.addClassCleanup(cls.playwright.stop)
        # The page is our own; Chromium's sandbox does not start in every container.
        cls.browser = cls.playwright.chromium.launch(executable_path=CHROMIUM,
                                                     args=["--no-sandbox"])
        cls.addClassCleanup(cls.browser.close)
        expect.set_options(timeout=PATIENCE * 1000)

    def serve(self, *options, context=4096):
        # What is saved and how it is restored is fixed: a planner may find that computing so
        # little again is faster.
        server = Server(self.measured.name, context, "--save", "kv", "--restore-method", "kv", *options)
        self.addCleanup(server.close)
        return server

    def open(self, server, **context):
        context = self.browser.new_context(**context)
        context.set_default_timeout(PATIENCE * 1000)
        self.addCleanup(context.close)
        page = context.new_page()
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text)
                if "Content Security Policy" in message.text else None)
        self.addCleanup(lambda: self.assertEqual(errors, []))
        page.goto(server.url)
        expect(page.locator("#online")).to_have_text("Online")
        return page

    def limit_answers(self, page, tokens):
        page.locator("#options summary").click()
        page.get_by_label("Longest answer").fill(str(tokens))
        page.locator("#options summary").click()

    def say(self, page, text, answers):
        """Sends a message and waits until there are so many answers, all complete."""
        page.get_by_label("Message", exact=True).fill(text)
        page.keyboard.press("Enter")
        expect(page.locator(".assistant .origin details")).to_have_count(answers)
        expect(page.locator("#send")).to_have_text("Send")

    def origin(self, page):
        return page.locator(".assistant").last.locator(".origin > .legend").inner_text()

    # ---- Conversations

    def test_a_conversation_outlives_a_reload_and_a_restart(self):
        server = self.serve()
        page = self.open(server)
        self.limit_answers(page, 16)
        self.say(page, LONG, 1)
        self.assertIn("new", self.origin(page))
        self.assertNotIn("saved KV", self.origin(page))
        texts = page.locator(".message > .text").all_inner_texts()
        self.assertEqual(len(texts), 2)
        self.assertTrue(texts[1].strip())
        expect(page.locator("#session-list li")).to_have_count(1)
        expect(page.locator("#session-list .facts")).to_contain_text("saved,")

        page.reload()
        expect(page.locator(".message > .text")).to_have_text(texts)
        self.assertEqual(page.get_by_label("Longest answer").input_value(), "16")

        self.assertEqual(server.stop(), 0)
        expect(page.locator("#online")).to_have_text("Offline")
        server.start()
        expect(page.locator("#online")).to_have_text("Online")
        self.say(page, "How many boats?", 2)
        self.assertIn("from saved KV", self.origin(page))
        page.locator(".assistant").last.locator(".origin summary").click()
        expect(page.locator(".assistant .origin dl").last).to_contain_text("from disk")
        [session] = server.sessions()
        self.assertGreater(session["tokens"], 200)

    def test_deleting_a_conversation_deletes_its_session(self):
        server = self.serve()
        page = self.open(server)
        self.limit_answers(page, 4)
        self.say(page, "Good morning", 1)
        delete = page.get_by_role("button", name="Delete Good morning")
        delete.click()
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("#chat-list li")).to_have_count(1)
        delete.click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(page.locator("#chat-list li")).to_have_count(0)
        expect(page.locator(".message")).to_have_count(0)
        expect(page.locator("#session-list li")).to_have_count(0)
        self.assertEqual(server.sessions(), [])
        page.reload()
        expect(page.locator("#chat-list li")).to_have_count(0)

    def test_escape_stops_and_try_again_answers_anew(self):
        page = self.open(self.serve())
        page.keyboard.type("Write a very long story about the sea.")  # the field has the focus
        page.keyboard.press("Enter")
        expect(page.locator("#send")).to_have_text("Stop")
        expect(page.locator(".assistant .text").last).not_to_be_empty()
        page.keyboard.press("Escape")
        expect(page.locator(".assistant")).to_contain_text("You stopped this answer.")
        expect(page.locator("#send")).to_have_text("Send")

        self.limit_answers(page, 4)
        page.get_by_role("button", name="Try again").focus()
        page.keyboard.press("Enter")
        expect(page.locator(".assistant .origin details")).to_have_count(1)
        expect(page.locator(".message")).to_have_count(2)
        self.assertEqual(page.evaluate("document.activeElement.id"), "input")

    def test_two_conversations_are_kept_apart(self):
        page = self.open(self.serve())
        self.limit_answers(page, 4)
        self.say(page, "One", 1)
        page.get_by_role("button", name="New conversation").click()
        expect(page.locator(".message")).to_have_count(0)
        self.limit_answers(page, 4)
        self.say(page, "Two", 1)
        page.get_by_role("button", name="One", exact=True).click()
        expect(page.locator(".user .text")).to_have_text("One")
        expect(page.locator("#session-list li")).to_have_count(2)

    def test_shift_enter_begins_a_line(self):
        page = self.open(self.serve())
        self.limit_answers(page, 4)
        page.get_by_label("Message", exact=True).focus()
        page.keyboard.type("first")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("second")
        expect(page.locator(".message")).to_have_count(0)
        page.keyboard.press("Enter")
        expect(page.locator(".user .text")).to_have_text("first\nsecond")

    # ---- What is said is never markup

    def test_text_stays_text(self):
        server = self.serve()
        page = self.open(server)
        markup = "<img src=x onerror=alert(1)>"
        chat = {"id": "abc", "session": "s", "title": "t", "created": 1, "updated": 1,
                "options": {},
                "messages": [{"role": "user", "text": markup},
                             {"role": "assistant", "state": "done",
                              "text": f"# {markup}\n\n**bold** `{markup}`\n\n- {markup}\n2. two\n\n"
                                      f"```html\n{markup}\n```\nend"}]}
        page.evaluate("chat => { localStorage.setItem('hcache.chat.abc', JSON.stringify(chat));"
                      "localStorage.setItem('hcache.current', 'abc'); }", chat)
        page.reload()
        answer = page.locator(".assistant > .text")
        expect(page.locator(".user .text")).to_have_text(markup)
        expect(answer.locator("pre")).to_have_text(markup)
        expect(answer.locator("strong")).to_have_text("bold")
        expect(answer.locator("ul li")).to_have_text(markup)
        expect(answer.locator("ol li")).to_have_text("two")
        self.assertEqual(page.locator("#messages img").count(), 0)

    def test_the_policy_allows_this_script_and_style_alone(self):
        server = self.serve()
        with urllib.request.urlopen(server.url, timeout=PATIENCE) as answer:
            policy = answer.headers["Content-Security-Policy"]
            self.assertEqual(answer.headers.get_content_type(), "text/html")
        self.assertIn("default-src 'none'", policy)
        self.assertNotIn("unsafe", policy)
        page = self.browser.new_page()
        self.addCleanup(page.close)
        page.goto(server.url)
        expect(page.locator("#online")).to_have_text("Online")
        page.evaluate("document.body.insertAdjacentHTML('afterbegin', "
                      "'<b id=hit onclick=\"window.clicked = 1\" style=\"opacity: 0.5\">x</b>')")
        page.evaluate("document.getElementById('hit').click()")
        self.assertFalse(page.evaluate("'clicked' in window"))
        self.assertEqual(page.evaluate("getComputedStyle(document.getElementById('hit')).opacity"),
                         "1")

    # ---- Sessions

    def test_sessions_are_pinned_renamed_and_deleted(self):
        server = self.serve()
        page = self.open(server)
        self.limit_answers(page, 4)
        self.say(page, "Hello", 1)
        row = page.locator("#session-list li")
        pin = row.locator("button").first
        expect(pin).to_have_attribute("aria-pressed", "false")
        pin.click()
        expect(pin).to_have_attribute("aria-pressed", "true")
        self.assertTrue(server.sessions()[0]["pinned"])

        row.get_by_text("Rename").click()
        page.get_by_role("dialog").get_by_label("Name").fill("kept/1")
        page.keyboard.press("Enter")
        expect(row.locator(".name")).to_contain_text("kept/1")
        self.assertEqual([s["id"] for s in server.sessions()], ["kept/1"])
        self.say(page, "And again", 2)  # it goes on under its new name
        expect(row).to_have_count(1)

        row.get_by_text("Delete").click()
        page.keyboard.press("Escape")  # the dialog's own way out
        self.assertEqual(len(server.sessions()), 1)
        row.get_by_text("Delete").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(row).to_have_count(0)
        self.assertEqual(server.sessions(), [])

    # ---- Errors

    def test_a_server_that_wants_a_key(self):
        page = self.open(self.serve("--api-key", "sesame"))
        key = page.get_by_label("This server wants an API key")
        expect(key).to_be_focused()
        self.limit_answers(page, 4)
        page.get_by_label("Message", exact=True).fill("Hello")
        page.keyboard.press("Enter")
        expect(page.locator(".assistant .problem")).to_contain_text("Enter an API key above")
        key.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-hint")).to_contain_text("does not know the key")
        key.fill("sesame")
        page.keyboard.press("Enter")
        # The question that was refused is asked again.
        expect(page.locator(".assistant .origin details")).to_have_count(1)
        expect(page.locator("#session-list li")).to_have_count(1)
        page.reload()
        expect(page.locator("#session-list li")).to_have_count(1)
        expect(key).to_be_hidden()
        self.assertEqual(page.evaluate("JSON.stringify(localStorage).includes('sesame')"), False)

    def test_a_server_that_is_gone(self):
        server = self.serve()
        page = self.open(server)
        self.limit_answers(page, 4)
        server.stop()
        page.get_by_label("Message", exact=True).fill("Hello")
        page.keyboard.press("Enter")
        expect(page.locator(".assistant .problem")).to_contain_text("can’t be reached")
        server.start()
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".assistant .origin details")).to_have_count(1)
        expect(page.locator(".assistant .problem")).to_be_hidden()

    def test_a_conversation_that_outgrows_the_context(self):
        page = self.open(self.serve(context=512))
        self.limit_answers(page, 4)
        for turn in range(1, 4):
            self.say(page, LONG, turn)
        left = page.locator(".assistant .origin details", has_text="Left the context")
        expect(left).to_have_count(1)
        expect(page.locator(".assistant .problem:visible")).to_have_count(0)

    def test_a_prompt_that_does_not_fit(self):
        # So small a context can't be cut.
        page = self.open(self.serve(context=192))
        page.get_by_label("Message", exact=True).fill(LONG * 2)
        page.keyboard.press("Enter")
        expect(page.locator(".assistant .problem")).to_contain_text("Begin a new conversation")

    # ---- The page itself

    def test_a_phone(self):
        page = self.open(self.serve(), viewport={"width": 360, "height": 740})
        self.say_short(page)
        self.assertLessEqual(page.evaluate("document.documentElement.scrollWidth"), 360)
        for name, panel in (("Server", "#server"), ("Chats", "#chats")):
            button = page.get_by_role("button", name=name, exact=True)
            expect(page.locator(panel)).to_be_hidden()
            button.click()
            expect(page.locator(panel)).to_be_visible()
            self.assertEqual(button.get_attribute("aria-expanded"), "true")
            self.assertLessEqual(page.evaluate("document.documentElement.scrollWidth"), 360)
            page.keyboard.press("Escape")
            expect(page.locator(panel)).to_be_hidden()
            expect(button).to_be_focused()

    def say_short(self, page):
        self.limit_answers(page, 4)
        self.say(page, "Hello", 1)

    def test_the_order_of_focus(self):
        page = self.open(self.serve())
        self.say_short(page)
        expect(page.locator("#session-list li")).to_have_count(1)
        page.locator(".skip").focus()
        expect(page.locator(".skip")).to_be_in_viewport()
        seen = []
        for _ in range(20):
            page.keyboard.press("Tab")
            seen.append(page.evaluate(
                "document.activeElement.id || document.activeElement.textContent"))
        wanted = ["new-chat", "messages", "input", "send", "sessions-reload", "Pin"]
        self.assertEqual([name for name in seen if name in wanted][:len(wanted)], wanted)
        page.locator(".skip").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_label("Message", exact=True)).to_be_focused()

    def test_every_field_and_button_has_a_name(self):
        page = self.open(self.serve())
        self.say_short(page)
        nameless = page.evaluate("""() => [...document.querySelectorAll('button, input, textarea')]
            .filter(e => !e.labels?.length && !e.ariaLabel && !e.textContent.trim())
            .filter(e => e.checkVisibility()).map(e => e.outerHTML)""")
        self.assertEqual(nameless, [])

    def test_the_gauges_move(self):
        page = self.open(self.serve("--dram", "64MiB"))
        self.say_short(page)
        expect(page.locator("#gauge-arena .value")).to_have_text(
            re.compile(r"[1-9][\d,]* of 4,096 tokens"))
        expect(page.locator("#gauge-dram .value")).to_contain_text("of 64.0 MiB")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
