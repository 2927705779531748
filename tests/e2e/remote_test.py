#!/usr/bin/env python3
"""Two `hcache serve` on one Redis cluster: conversations move between them, a master dies; and on one
S3 store, where HCACHE_TEST_MOTO names moto's server.

    remote_test.py HCACHE [-v] [name]
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import unittest
import urllib.request

import serving
from serving import (STATE_COMES_BACK, TEXT, Cluster, Conversation, Redis, Server, free_port, remote_of,
                     settle, wait_until)

PROGRAM = sys.argv.pop(1)
MODEL = serving.default_model()


def state_folder() -> tempfile.TemporaryDirectory:
    return serving.state_folder(PROGRAM, MODEL)


def start(folder: str, url: str, *options: str, timeout: str = "60s") -> Server:
    # Nobody here races with the machine: what is there is to be found.
    return Server(PROGRAM, "-m", MODEL, "--state-dir", folder, "-t", "1", "--remote", url,
                  "--remote-timeout", timeout, *STATE_COMES_BACK, *options)


class Shared(unittest.TestCase):
    def test_a_conversation_goes_on_at_another_server(self):
        alone = Conversation(1)
        with state_folder() as folder, \
                Server(PROGRAM, "-m", MODEL, "--state-dir", folder, "-t", "1") as server:
            while not alone.done():
                alone.step(server)
        moved = Conversation(1)
        with Cluster(replicas=1) as cluster, state_folder() as a, \
                state_folder() as b, \
                start(a, cluster.url, "--flush-interval", "100ms") as first, \
                start(b, cluster.url, "--flush-interval", "100ms") as second:
            moved.step(first)
            settle(first)
            moved.step(second)
            settle(second)
            moved.step(first)
            self.assertEqual(moved.answers, alone.answers)
            self.assertGreaterEqual(moved.cached / moved.returned, 0.95)
            self.assertGreater(remote_of(second)["read_bytes"], 0)
            self.assertGreater(remote_of(first)["read_bytes"], 0)
            answer = second.chat(moved.messages + [{"role": "user", "content": "Go on."}],
                                 max_tokens=2)
            self.assertGreater(answer["hcache"]["bytes"]["remote"] +
                               answer["hcache"]["tokens"]["resident"], 0)
            metrics = second.call("GET", "/metrics")[1]
            self.assertIn('hcache_remote_up 1', metrics)
            self.assertIn('tier="remote"', metrics)
            # Deleted here, it is nowhere.
            keys = sum(int(node.ask("DBSIZE")) for node in cluster.nodes)
            self.assertGreater(keys, 0)
            for server in (first, second):
                for session in server.call("GET", "/v1/sessions")[1]["data"]:
                    self.assertEqual(server.call("DELETE", f"/v1/sessions/{session['id']}")[0], 200)
            wait_until(lambda: sum(int(n.ask("DBSIZE")) for n in cluster.nodes) == 0,
                       "an empty cluster")
            self.assertEqual(first.stop(), 0, first.errors())
            self.assertEqual(second.stop(), 0, second.errors())

    def test_a_master_dies_under_load_and_no_request_fails(self):
        undisturbed = [Conversation(n, rounds=4) for n in range(3)]
        with state_folder() as folder, \
                Server(PROGRAM, "-m", MODEL, "--state-dir", folder, "-t", "1") as server:
            for conversation in undisturbed:
                while not conversation.done():
                    conversation.step(server)
        talks = [Conversation(n, rounds=4) for n in range(3)]
        errors = []
        with Cluster(replicas=1) as cluster, state_folder() as a, \
                state_folder() as b, \
                start(a, cluster.url, "--flush-interval", "100ms") as first, \
                start(b, cluster.url, "--flush-interval", "100ms") as second:
            killed = threading.Event()

            def talk(number: int) -> None:
                try:
                    for turn in range(4):
                        if turn == 2:
                            killed.wait(120)
                        talks[number].step((first, second)[(number + turn) % 2])
                except Exception as error:  # pylint: disable=broad-except
                    errors.append(error)

            threads = [threading.Thread(target=talk, args=(n,)) for n in range(3)]
            for thread in threads:
                thread.start()
            wait_until(lambda: errors or remote_of(first)["written_bytes"] > 0, "something saved")
            cluster.nodes[0].kill()
            killed.set()
            for thread in threads:
                thread.join()
            self.assertEqual(errors, [])
            for mine, theirs in zip(talks, undisturbed, strict=True):
                self.assertEqual(mine.answers, theirs.answers)
            self.assertEqual(first.stop(), 0, first.errors())
            self.assertEqual(second.stop(), 0, second.errors())

    def test_a_truncated_conversation_goes_on_at_another_server(self):
        options = ("-c", "512", "--context-overflow", "truncate", "--flush-interval", "100ms")
        messages = [{"role": "system", "content": "You are brief."}]

        def say(server: Server, turn: int) -> dict:
            messages.append({"role": "user", "content": TEXT[500 * turn:500 * turn + 500]})
            answer = server.chat(messages, max_tokens=20)
            messages.append(answer["choices"][0]["message"])
            return answer

        redis = Redis()
        self.addCleanup(redis.close)
        with state_folder() as a, start(a, redis.url, *options) as first:
            for turn in range(7):
                answer = say(first, turn)
            self.assertGreater(answer["hcache"]["dropped_tokens"], 512)
            held = answer["usage"]["total_tokens"] - answer["hcache"]["dropped_tokens"]
            settle(first)
        with state_folder() as b, start(b, redis.url, *options) as second:
            answer = say(second, 7)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            self.assertGreaterEqual(cached, 0.9 * held - 2, answer["hcache"])
            self.assertGreater(answer["hcache"]["bytes"]["remote"], 0)

    def test_without_the_remote_store_it_serves_on(self):
        redis = Redis()
        with state_folder() as folder, \
                start(folder, redis.url, timeout="1s") as server:
            talk = Conversation(2)
            talk.step(server)
            redis.process.send_signal(signal.SIGSTOP)
            talk.step(server)
            redis.kill()
            talk.step(server)
            self.assertGreaterEqual(talk.cached / talk.returned, 0.95)
            self.assertEqual(server.stop(), 0, server.errors())
        redis.close()
        bad = subprocess.run([PROGRAM, "serve", "-m", MODEL, "--remote", "ftp://x"],
                             capture_output=True, text=True, check=False)
        self.assertEqual(bad.returncode, 2)
        self.assertIn("redis://", bad.stderr)


@unittest.skipUnless(os.environ.get("HCACHE_TEST_MOTO"), "HCACHE_TEST_MOTO names no S3 server")
class ObjectStore(unittest.TestCase):
    def test_a_conversation_goes_on_at_another_server(self):
        port = free_port()
        moto = subprocess.Popen([os.environ["HCACHE_TEST_MOTO"], "-H", "127.0.0.1", "-p", str(port)],
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.environ.update(AWS_ACCESS_KEY_ID="AKIDEXAMPLE", AWS_SECRET_ACCESS_KEY="not a secret")
        try:
            bucket = f"http://127.0.0.1:{port}/state"

            def made() -> bool:
                try:
                    with urllib.request.urlopen(urllib.request.Request(bucket, method="PUT")):
                        return True
                except OSError:
                    return False
            wait_until(made, "the S3 server")
            url = f"s3://state/hcache?endpoint=http://127.0.0.1:{port}"
            with state_folder() as folder, \
                    Server(PROGRAM, "-m", MODEL, "--state-dir", folder, "-t", "1") as server:
                alone = Conversation(3)
                while not alone.done():
                    alone.step(server)
            with state_folder() as a, state_folder() as b, \
                    start(a, url, "--flush-interval", "100ms") as first, \
                    start(b, url, "--flush-interval", "100ms") as second:
                moved = Conversation(3)
                for server in (first, second, first):
                    moved.step(server)
                    settle(server)
                self.assertEqual(moved.answers, alone.answers)
                self.assertGreaterEqual(moved.cached / moved.returned, 0.95)
                self.assertGreater(remote_of(second)["read_bytes"], 0)
                self.assertGreater(remote_of(first)["read_bytes"], 0)
                self.assertEqual(first.stop(), 0, first.errors())
                self.assertEqual(second.stop(), 0, second.errors())
        finally:
            moto.kill()
            moto.wait()


if __name__ == "__main__":
    if not shutil.which("redis-server"):
        print("redis-server is missing: run make deps", file=sys.stderr)
        sys.exit(1)
    os.environ.pop("HCACHE_REMOTE", None)
    unittest.main()
