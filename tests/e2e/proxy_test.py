#!/usr/bin/env python3
"""Several `hcache serve` behind HAProxy with packaging/haproxy/haproxy.cfg, and a Redis cluster.

    proxy_test.py HCACHE [-v] [name]

Needs Debian's haproxy and tests/e2e/requirements.txt; `make test-proxy` installs both.
"""

import concurrent.futures
import http.server
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import unittest
import urllib.request
from pathlib import Path

import yaml

import serving
from serving import LOST, STATE_COMES_BACK, Cluster, Conversation, Server, free_port, settle, wait_until

PROGRAM = sys.argv.pop(1)
MODEL = serving.default_model()
PACKAGING = serving.ROOT / "packaging"
CHAT = "/v1/chat/completions"
KEY = "X-HCache-Conversation"
TALKS = 9
QUIET_ROUNDS = 4  # before anything happens
ROUNDS = QUIET_ROUNDS + 3
LEAST_RESIDENT = 0.95
LEAST_CACHED = 0.95


class Proxy(Server):
    """HAProxy as it is packaged, before these servers (name: port)."""

    def __init__(self, servers: dict[str, int]):
        self.folder = tempfile.TemporaryDirectory()
        listed = Path(self.folder.name) / "servers.cfg"
        listed.write_text("backend hcache\n" + "".join(
            f"  server {name} 127.0.0.1:{port}\n" for name, port in servers.items()), encoding="utf-8")
        ports = [free_port(), free_port()]
        self.url, self.metrics_url = (f"http://127.0.0.1:{port}" for port in ports)
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        self.process = subprocess.Popen(
            ["haproxy", "-db", "-f", str(PACKAGING / "haproxy/haproxy.cfg"), "-f", str(listed)],
            stdout=subprocess.PIPE, stderr=self.log, text=True,
            env={**os.environ, "HCACHE_PROXY_BIND": f"127.0.0.1:{ports[0]}",
                 "HCACHE_PROXY_METRICS": f"127.0.0.1:{ports[1]}"})
        for name in servers:
            wait_until(lambda name=name: self.is_up(name), f"server {name} at the proxy")

    def is_up(self, name: str) -> bool:
        try:
            with urllib.request.urlopen(self.metrics_url + "/metrics", timeout=60) as reply:
                text = reply.read().decode()
        except OSError:
            return False
        return bool(re.search(rf'^haproxy_server_status{{[^}}]*server="{name}",state="UP"}} 1', text, re.M))

    def __exit__(self, *args):
        super().__exit__(*args)
        self.folder.cleanup()


# ---- The proxy alone ----------------------------------------------------------------------------


class Stand(http.server.ThreadingHTTPServer):
    """Stands for a server: tells the key that it got, or fails as it is told to."""

    daemon_threads = True

    def __init__(self, name: str):
        super().__init__(("127.0.0.1", 0), StandHandler)
        self.name = name
        self.fails = ""
        self.asked = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_):
        pass  # a health check hangs up once it knows the status


class StandHandler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):  # pylint: disable=invalid-name
        self.answer(200, {"status": "ok"})

    def do_POST(self):  # pylint: disable=invalid-name
        self.server.asked += 1
        if self.server.fails == "reset":  # with a part of the request unread
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return self.connection.close()
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if self.server.fails == "end":
            return self.connection.shutdown(socket.SHUT_RDWR)
        if self.server.fails == "busy":
            return self.answer(503, {})
        return self.answer(200, {"key": self.headers.get(KEY)})

    def answer(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def said(role: str, text: str, parts: bool = False) -> dict:
    return {"role": role, "content": [{"type": "text", "text": text}] if parts else text}


class Routing(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.stands = {name: Stand(name) for name in "abc"}
        cls.proxy = Proxy({name: stand.server_address[1] for name, stand in cls.stands.items()})

    @classmethod
    def tearDownClass(cls):
        with cls.proxy:
            pass
        for stand in cls.stands.values():
            stand.shutdown()
            stand.server_close()

    def tearDown(self):
        for stand in self.stands.values():
            stand.fails = ""

    def ask(self, path: str, body: object, **headers: str) -> tuple[int, str | None, str]:
        """(status, the key that the server got, the server)"""
        status, answer, told = self.proxy.call("POST", path, body, headers)
        return status, answer.get("key"), told.get("X-HCache-Server", "")

    def keys(self, *requests: tuple) -> set:
        return {self.ask(*request)[1] for request in requests}

    def test_the_turns_of_a_conversation_have_one_key(self):
        system, answer, more = said("system", "Be brief."), said("assistant", "Hm."), said("user", "Go on.")
        for parts in (False, True):
            first = said("user", "What is a lighthouse?", parts)
            requests = [(CHAT, {"messages": [first]}), (CHAT, {"messages": [first, answer, more]}),
                        (CHAT, {"model": "m", "messages": [system, first, answer, more]}),
                        ("/v1/messages", {"system": "Be brief.", "messages": [first, answer, more]}),
                        ("/api/chat", {"messages": [first, answer]}),
                        ("/v1/responses", {"input": "What is a lighthouse?"}),
                        ("/v1/responses", {"input": [first, answer, more]}),
                        ("/v1/responses", {"input": [said("developer", "Be brief."), first, answer]})]
            found = self.keys(*requests)
            self.assertEqual(len(found), 1, found)
            self.assertRegex(found.pop(), "^[0-9a-f]{16}$")
        prompt = "It was a dark night. " * 60
        self.assertEqual(len(self.keys(("/completion", {"prompt": prompt}),
                                       ("/v1/completions", {"prompt": prompt + "And then"}))), 1)
        others = self.keys(*((CHAT, {"messages": [system, said("user", f"Question {n}")]}) for n in range(9)))
        self.assertEqual(len(others), 9)

    def test_every_text_makes_a_key(self):
        texts = ["", "caf\u00e9 \u2019 \u4e2d\u6587 \U0001f600", 'a "quoted" \\u2019 back\\slash\n\t',
                 "ends with \\"]
        found = set()
        for text in texts:
            first = said("user", text)
            keys = self.keys((CHAT, {"messages": [first]}),
                             (CHAT, {"messages": [first, said("user", "\u2019")]}))
            self.assertEqual(len(keys), 1, text)
            found |= keys
        self.assertEqual(len(found - {None}), len(texts))
        slashes = b'{"messages": [{"role": "user", "content": "http:\\/\\/host"}]}'  # as PHP writes it
        request = urllib.request.Request(self.proxy.url + CHAT, slashes, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            self.assertRegex(json.load(reply)["key"], "^[0-9a-f]{16}$")

    def test_a_name_comes_before_the_text(self):
        hello = {"messages": [said("user", "Hello")]}
        key = self.ask(CHAT, {**hello, "prompt_cache_key": "talk 7"})[1]
        self.assertEqual({key}, self.keys((CHAT, {"prompt_cache_key": "talk 7"}),
                                          (CHAT, {"session_id": "talk 7"}), ("/v1/sessions/talk%207", {})))
        self.assertEqual(self.ask(CHAT, hello, **{KEY: "talk 7"})[1], key)
        # What an answer told is used as it is, and a response's id begins with it.
        self.assertEqual(self.ask(CHAT, {"session_id": "other"}, **{KEY: key})[1], key)
        self.assertEqual(self.ask("/v1/responses", {"input": "Go on.", "previous_response_id": "resp_" + key +
                                                    "0123456789abcdef"})[1], key)

    def test_a_conversation_leads_to_its_server_whatever_else_is_said(self):
        key = "0123456789abcdef"
        conversation = "conv_" + key + key
        self.assertEqual({key}, self.keys(
            (f"/v1/conversations/{conversation}", {}), (f"/v1/conversations/{conversation}/items", {}),
            ("/v1/responses", {"input": "Go on.", "conversation": conversation, "prompt_cache_key": "x"}),
            ("/v1/responses", {"conversation": {"id": conversation}, "input": [said("user", "Go on.")]})))
        # New ones are spread.
        found = self.keys(*(("/v1/conversations", {"metadata": {}}) for _ in range(9)))
        self.assertEqual(len(found - {None}), 9)
        self.assertTrue(all(re.fullmatch("[0-9a-f]{16}", one) for one in found))

    def test_a_long_body_is_known_by_its_beginning(self):
        long = [said("user", "Hello"), said("user", "x" * (2 << 20))]
        self.assertEqual(len(self.keys((CHAT, {"messages": long}), (CHAT, {"messages": long[:1]}))), 1)

    def test_files_of_a_key_are_on_one_server(self):
        servers = {self.ask(path, {}, Authorization="Bearer one")[2]
                   for path in ("/v1/files", "/v1/batches", "/v1/messages/batches")}
        self.assertEqual(len(servers), 1)

    def test_what_fails_before_it_streams_is_asked_elsewhere(self):
        bodies = [{"messages": [said("user", f"Question {n}")]} for n in range(24)]
        before = [self.ask(CHAT, body)[2] for body in bodies]
        self.assertEqual(set(before), set("abc"))
        for fails in ("busy", "end", "reset"):
            self.stands["a"].fails = fails
            after = [self.ask(CHAT, body) for body in bodies]
            self.assertEqual({status for status, _, _ in after}, {200}, fails)
            self.assertNotIn("a", {server for _, _, server in after})
            # Those of the other servers stay where they were.
            for was, (_, _, now) in zip(before, after, strict=True):
                self.assertIn(now, {was} if was != "a" else {"b", "c"})

    def test_what_changes_something_is_not_asked_twice(self):
        for stand in self.stands.values():
            stand.fails = "end"
        asked = sum(stand.asked for stand in self.stands.values())
        status, answer, _ = self.proxy.call("POST", "/v1/batches", {})
        self.assertEqual(status, 502, answer)
        self.assertEqual(sum(stand.asked for stand in self.stands.values()), asked + 1)


# ---- Servers behind it --------------------------------------------------------------------------


class Talk:
    """A conversation through the proxy, and what it was answered."""

    def __init__(self, number: int, proxy: Proxy):
        self.conversation = Conversation(number, ROUNDS)
        self.proxy = proxy
        self.server = ""  # that answered last
        self.key = ""
        self.turns: list = []  # of later rounds: how each was answered

    def chat(self, messages: list, **fields) -> dict:
        status, answer, headers = self.proxy.call("POST", CHAT, {
            "messages": messages, "temperature": 0, **fields})
        if status != 200:
            raise RuntimeError(f"{status} {answer}")
        if self.server:
            held = self.conversation.completed
            self.turns.append({
                "at_home": headers["X-HCache-Server"] == self.server and
                           answer["hcache"]["tokens"]["resident"] >= LEAST_CACHED * held,
                "ms": answer["hcache"]["first_token_ms"], "held": held})
        self.server, self.key = headers["X-HCache-Server"], headers[KEY]
        return answer

    def step(self) -> None:
        self.conversation.step(self)


def steps(talks: list[Talk]) -> None:
    """A round of all of them at once; raises what any of them met."""
    with concurrent.futures.ThreadPoolExecutor(len(talks)) as pool:
        for done in [pool.submit(talk.step) for talk in talks]:
            done.result()


def cached_share(talks: list[Talk], before: list[tuple[int, int]]) -> float:
    cached = sum(t.conversation.cached - b[0] for t, b in zip(talks, before, strict=True))
    return cached / sum(t.conversation.returned - b[1] for t, b in zip(talks, before, strict=True))


def counts(talks: list[Talk]) -> list[tuple[int, int]]:
    return [(t.conversation.cached, t.conversation.returned) for t in talks]


def running(server: Server) -> int:
    text = server.call("GET", "/metrics")[1]
    return int(sum(float(n) for n in re.findall(r'^hcache_requests{state="\w+"} (\S+)', text, re.M)))


class LongStream(threading.Thread):
    """A reply that is still under way when its server dies."""

    def __init__(self, talk: Talk):
        super().__init__()
        self.begun = threading.Event()
        self.cut = False
        c = talk.conversation
        body = {"messages": c.messages + [{"role": "user", "content": c.questions[len(c.answers)]}],
                "stream": True, "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
        self.request = urllib.request.Request(talk.proxy.url + CHAT, json.dumps(body).encode(),
                                              {"Content-Type": "application/json"})

    def run(self):
        last = b""
        try:
            with urllib.request.urlopen(self.request, timeout=300) as reply:
                for line in reply:
                    last = line.strip() or last
                    self.begun.set()
        except LOST:
            pass
        self.cut = self.begun.is_set() and last != b"data: [DONE]"


class Servers(unittest.TestCase):
    """Three servers, the proxy and a Redis cluster of three masters."""

    def setUp(self):
        cluster = self.enterContext(Cluster(replicas=0))
        self.servers = {name: self.start(cluster.url) for name in "abc"}
        self.proxy = self.enterContext(Proxy(
            {name: int(server.url.rpartition(":")[2]) for name, server in self.servers.items()}))
        self.talks = [Talk(number, self.proxy) for number in range(TALKS)]

    def start(self, url: str) -> Server:
        folder = serving.state_folder(PROGRAM, MODEL)
        self.addCleanup(folder.cleanup)
        # Nobody here races with the machine: what is there is to be found, and draining ends when told.
        return self.enterContext(Server(
            PROGRAM, "-m", MODEL, "--state-dir", folder.name, "-t", "1", "--ctx", "16384", "--remote", url,
            "--remote-timeout", "60s", "--flush-interval", "100ms", "--drain", "10m", *STATE_COMES_BACK))

    def answers_alone(self) -> list:
        """Of the same conversations on one server that nothing happens to."""
        alone = [Conversation(number, ROUNDS) for number in range(TALKS)]
        with serving.state_folder(PROGRAM, MODEL) as folder, \
                Server(PROGRAM, "-m", MODEL, "--state-dir", folder, "-t", "1") as server:
            for conversation in alone:
                while not conversation.done():
                    conversation.step(server)
        return [conversation.answers for conversation in alone]

    def of(self, name: str) -> list[Talk]:
        return [talk for talk in self.talks if talk.server == name]

    def test_conversations_stay_at_their_server_and_outlive_it(self):
        for _ in range(QUIET_ROUNDS):
            steps(self.talks)
        self.assertEqual({talk.server for talk in self.talks}, set("abc"))
        turns = [turn for talk in self.talks for turn in talk.turns]
        at_home = sum(turn["at_home"] for turn in turns) / len(turns)
        for server in self.servers.values():
            settle(server)
        victim = max(self.servers, key=lambda name: len(self.of(name)))
        moved = self.of(victim)
        before = counts(moved)
        self.kill(victim, moved)
        steps([talk for talk in self.talks if len(talk.conversation.answers) == QUIET_ROUNDS])
        after = cached_share(moved, before)
        self.assertNotIn(victim, {talk.server for talk in self.talks})
        steps(self.talks)
        self.stop_gently(next(name for name in self.servers if name != victim))
        for talk, answers in zip(self.talks, self.answers_alone(), strict=True):
            self.assertEqual(talk.conversation.answers, answers)
        print(f"\nturns answered by the server that holds the state resident: {at_home:.1%} of "
              f"{len(turns)}, nobody killed\ncached tokens of {len(moved)} conversations whose server "
              f"was killed, in the turn after: {after:.1%}")
        self.assertGreaterEqual(at_home, LEAST_RESIDENT)
        self.assertGreaterEqual(after, LEAST_CACHED)

    def kill(self, name: str, talks: list[Talk]) -> None:
        """With a stream under way and requests that have not begun to stream; those must not fail, and
        neither those that come before the proxy has noticed."""
        self.assertGreaterEqual(len(talks), 3)
        stream = LongStream(talks[0])
        stream.start()
        self.assertTrue(stream.begun.wait(300))
        half = talks[1:1 + len(talks) // 2]
        with concurrent.futures.ThreadPoolExecutor(len(half)) as pool:
            asked = [pool.submit(talk.step) for talk in half]
            wait_until(lambda: running(self.servers[name]) > len(half) or any(a.done() for a in asked),
                       "requests at the server")
            self.servers[name].kill()
            steps([talk for talk in talks if talk not in half])
            for one in asked:
                one.result()
        stream.join()
        self.assertTrue(stream.cut)

    def stop_gently(self, name: str) -> None:
        """SIGTERM: its conversations go on elsewhere while it still answers."""
        server, moved = self.servers[name], self.of(name)
        self.assertGreater(len(moved), 0)
        settle(server)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.call("GET", "/health")[0] == 503, "/health to say so")
        self.assertEqual(server.call("POST", "/v1/completions", {"prompt": "One", "max_tokens": 1})[0], 200)
        wait_until(lambda: not self.proxy.is_up(name), "the proxy to notice")
        before = counts(moved)
        steps(self.talks)
        self.assertNotIn(name, {talk.server for talk in self.talks})
        self.assertGreaterEqual(cached_share(moved, before), LEAST_CACHED)
        server.process.send_signal(signal.SIGTERM)  # a second one ends it at once
        server.process.wait(timeout=120)

    def test_the_key_of_an_answer_leads_back(self):
        talk = self.talks[0]
        talk.step()
        self.assertRegex(talk.key, "^[0-9a-f]{16}$")
        hello = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        status, _, headers = self.proxy.call("POST", CHAT, hello, {KEY: talk.key})
        self.assertEqual((status, headers["X-HCache-Server"], headers[KEY]), (200, talk.server, talk.key))
        # A response is known to one server alone, and its id leads there.
        for n in range(4):
            first = self.proxy.post("/v1/responses", {"input": f"Say {n}.", "max_output_tokens": 4})
            then = self.proxy.post("/v1/responses", {"input": "Again.", "max_output_tokens": 4,
                                                     "previous_response_id": first["id"]})
            self.assertEqual(then["id"][:21], first["id"][:21])
        # So is a conversation.
        for n in range(4):
            conversation = self.proxy.post("/v1/conversations", {"metadata": {"n": str(n)}})["id"]
            for _ in range(2):
                self.proxy.post("/v1/responses", {"input": f"Say {n}.", "conversation": conversation,
                                                  "max_output_tokens": 4, "prompt_cache_key": "one"})
            items = self.proxy.call("GET", f"/v1/conversations/{conversation}/items")[1]
            self.assertEqual(len(items["data"]), 4)
        # Without a proxy the server tells a key of its own, the same for all turns.
        direct = self.servers["a"]
        keys = [direct.call("POST", CHAT, {"messages": messages, "max_tokens": 1})[2][KEY] for messages in (
            [said("user", "Hi")], [said("system", "Be brief."), said("user", "Hi"), said("assistant", "Hi"),
                                   said("user", "Go on.")], [said("user", "Ho")])]
        self.assertEqual(keys[0], keys[1])
        self.assertNotEqual(keys[0], keys[2])
        told = direct.call("POST", "/completion", {"prompt": "Hi", "n_predict": 1}, {KEY: keys[0]})[2]
        self.assertEqual(told[KEY], keys[0])


# ---- What is packaged ---------------------------------------------------------------------------


class Packaged(unittest.TestCase):
    def test_haproxy_takes_every_list_of_servers(self):
        for servers in ("haproxy/servers.cfg", "haproxy/servers-compose.cfg", "kubernetes/servers.cfg"):
            done = subprocess.run(
                ["haproxy", "-c", "-f", "haproxy/haproxy.cfg", "-f", servers], cwd=PACKAGING,
                capture_output=True, text=True, check=False, env={**os.environ, "NAMESPACE": "default"})
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_compose_names_the_servers_of_the_proxy(self):
        compose = yaml.safe_load((PACKAGING / "compose.yaml").read_text(encoding="utf-8"))
        listed = (PACKAGING / "haproxy/servers-compose.cfg").read_text(encoding="utf-8")
        servers = re.findall(r"^  server \S+ (\S+):8080$", listed, re.M)
        self.assertEqual(set(servers) | {"proxy", "store"}, set(compose["services"]))
        for name in servers:
            self.assertIn("HCACHE_REMOTE", compose["services"][name]["environment"])
            self.check_options(compose["services"][name]["command"].split())
            self.assertIn(compose["services"][name]["volumes"][0].partition(":")[0], compose["volumes"])

    def test_the_manifests_fit_together(self):
        kustomization = yaml.safe_load((PACKAGING / "kustomization.yaml").read_text(encoding="utf-8"))
        found = {}
        for name in kustomization["resources"]:
            for one in yaml.safe_load_all((PACKAGING / name).read_text(encoding="utf-8")):
                self.assertEqual(set(one) - {"spec"}, {"apiVersion", "kind", "metadata"})
                found[one["kind"], one["metadata"]["name"]] = one["spec"]
        for config in kustomization["configMapGenerator"][0]["files"]:
            self.assertTrue((PACKAGING / config).is_file(), config)
        servers = found["StatefulSet", "hcache"]
        pod = servers["template"]["spec"]
        [container] = pod["containers"]
        self.check_options(container["args"])
        self.assertIn(("Service", servers["serviceName"]), found)
        for probe in ("startupProbe", "readinessProbe"):
            self.assertEqual(container[probe]["httpGet"]["path"], "/health")
        options = dict(zip(container["args"][::2], container["args"][1::2], strict=True))
        slack = pod["terminationGracePeriodSeconds"] - sum(
            int(options[name].removesuffix("s")) for name in ("--drain", "--grace"))
        self.assertGreaterEqual(slack, 20)
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        claimed = {claim["metadata"]["name"] for claim in servers["volumeClaimTemplates"]}
        self.assertEqual(mounted, claimed | {volume["name"] for volume in pod["volumes"]})
        scaler = found["HorizontalPodAutoscaler", "hcache"]
        self.assertIn((scaler["scaleTargetRef"]["kind"], scaler["scaleTargetRef"]["name"]), found)
        listed = (PACKAGING / "kubernetes/servers.cfg").read_text(encoding="utf-8")
        names = re.findall(r"^  server (\S+) ", listed, re.M)
        self.assertEqual(names, [f"hcache-{n}" for n in range(scaler["maxReplicas"])])

    def check_options(self, options: list[str]) -> None:
        known = subprocess.run([PROGRAM, "serve", "--help"], capture_output=True, text=True,
                               check=True).stdout
        for option in options:
            if option.startswith("--"):
                self.assertIn(option + " ", known)


if __name__ == "__main__":
    os.environ.pop("HCACHE_REMOTE", None)
    unittest.main()
