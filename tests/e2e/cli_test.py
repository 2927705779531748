#!/usr/bin/env python3
"""The program from outside: verbs, exit codes, conversations that survive their process.

cli_test.py PROGRAM MODEL. Plain unittest; nothing here depends on the machine's speed.
"""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

import serving

PROGRAM, MODEL = sys.argv[1], sys.argv[2]


class Cli(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="hcache-cli-")
        self.addCleanup(self.folder.cleanup)
        self.state = os.path.join(self.folder.name, "state")
        serving.lend_profiles(self.state)
        self.addCleanup(serving.keep_profiles, self.state)
        self.rpc_ports = set()  # of its servers, which may share one without an error

    def hcache(self, *args, code=0, stdin="", **environment):
        done = subprocess.run([PROGRAM, *args], input=stdin, capture_output=True, text=True,
                              timeout=300, env={**os.environ, **environment})
        self.assertEqual(done.returncode, code, f"{args}\n{done.stdout}\n{done.stderr}")
        return done.stdout if code == 0 else done.stderr

    def talk(self, verb, *args, **kwargs):
        return self.hcache(verb, "-m", MODEL, "--state-dir", self.state, "--ctx", "2304",
                           "--temperature", "0", "--max-tokens", "12", "--json", *args, **kwargs)

    def test_help_and_bad_input(self):
        self.assertIn("chat", self.hcache("--help"))
        for verb in (["run"], ["bench", "restore"], ["plan"], ["store", "rm"], ["model", "synth"]):
            self.assertIn("--", self.hcache(*verb, "--help"))
        self.hcache(code=2)
        self.hcache("fly", code=2)
        self.assertIn("--top-p", self.hcache("run", "--top-p", "2", "-p", "x", code=2))
        self.assertIn("nothing to say", self.hcache("run", "-m", MODEL, code=2))
        self.hcache("run", "-m", "/nonexistent.gguf", "-p", "x", "--state-dir", self.state, code=3)

    def test_reading_into_a_gpu_needs_one(self):
        said = self.hcache("run", "-m", MODEL, "-p", "x", "--gpu-direct", "--device", "cpu",
                           "--state-dir", self.state, code=2)
        self.assertIn("--device cuda:0", said)
        for other in (["--no-store"], ["--link", "19MB/s"]):
            said = self.hcache("run", "-m", MODEL, "-p", "x", "--gpu-direct", *other,
                               "--state-dir", self.state, code=2)
            self.assertIn("--gpu-direct", said)

    def test_model_and_devices(self):
        info = json.loads(self.hcache("model", "info", MODEL, "--json"))
        self.assertTrue(info)
        self.assertIn("cpu", self.hcache("run", "--device", "list"))
        small = os.path.join(self.folder.name, "small.gguf")
        self.hcache("model", "synth", "--shape", "nonsense", "-o", small, code=3)
        self.assertFalse(os.path.exists(small))

    def test_plan_for_the_papers_hardware(self):
        rows = json.loads(self.hcache("plan", "--hardware", "a100", "--ssd", "4", "--model",
                                      "llama2-7b", "--json"))
        self.assertEqual(rows[0]["paper"]["schedule"], "31H+1KV")
        self.hcache("plan", "--hardware", "abacus", "--model", "llama2-7b", code=3)

    def test_a_plan_says_what_it_assumes(self):
        state = ["--state-dir", os.path.join(self.folder.name, "unmeasured")]
        plan = ["plan", "-m", MODEL, *state, "--ctx", "256"]
        self.assertIn("1.0 GB/s, assumed", self.hcache(*plan))
        self.assertTrue(json.loads(self.hcache(*plan, "--json"))["rows"][0]["link_assumed"])
        self.assertIn("19.0 MB/s\n", self.hcache(*plan, "--link", "19MB/s"))
        self.hcache("profile", "-m", MODEL, *state, "--ctx", "256")
        self.assertNotIn("assumed", self.hcache(*plan))

    def test_how_much_of_attention_counts(self):
        profile = ["profile", "--sparsity", "-m", MODEL, "--state-dir", self.state, "--ctx", "256"]
        layers = json.loads(self.hcache(*profile, "--json"))["layers"]
        info = json.loads(self.hcache("model", "info", MODEL, "--json"))
        self.assertEqual(len(layers), info["n_layer"])
        for layer in layers:
            self.assertEqual(len(layer["small_of_heads"]), info["n_head_kv"])
            for share in layer["small_of_heads"] + layer["spread_of_heads"]:
                self.assertTrue(0 < share < 1, layer)
        # CaR's Fig. 4: what counts becomes less from the first layer on.
        self.assertGreater(layers[-1]["small"], layers[0]["small"])
        self.assertIn("small weights", self.hcache(*profile))
        self.assertIn("--kv-type f16", self.hcache(*profile, "--kv-type", "q8_0", code=8))

    def test_options_that_would_do_nothing_are_refused(self):
        hardware = ["plan", "--hardware", "a100", "--model", "llama2-7b"]
        lines = [
            ["plan", "--gpus", "2"], ["plan", "--ssd", "2"], ["plan", "--quota", "1GiB"],
            ["plan", "--snapshot-quota", "1GiB"],
            ["plan", "--store", "x"],
            [*hardware, "--threads", "2"], [*hardware, "--link", "1GB/s"], [*hardware, "--timeline"],
            [*hardware, "--state-dir", "x"], [*hardware, "--kv-type", "f32"],
            ["profile", "--sparsity", "--refresh"],
            ["profile", "--salt", "x"], ["profile", "--save", "kv"], ["profile", "--no-save"],
            ["profile", "--remote", "redis://localhost"], ["profile", "--quota", "1GiB"],
            ["run", "-p", "x", "--remote-ttl", "1h"], ["run", "-p", "x", "--raw", "--system", "y"],
            ["chat", "--remote-write", "back"],
            ["serve", "--token-rounding", "64"], ["serve", "--dram-place", "node:0", "--dram", "0"],
            ["bench", "restore", "--quota", "1GiB"], ["bench", "throughput", "--ctx", "64"],
            ["bench", "serve", "--dry-run", "--time-scale", "2"],
            ["bench", "serve", "--dry-run", "--trace", "x.jsonl", "--rounds", "2"],
            ["rpc-serve", "--model", "x"],
        ]
        lines += [["store", verb, "--quota", "1GiB"]
                  for verb in ("ls", "stat", "verify", "gc", "export", "rm")]
        for line in lines:
            with self.subTest(line=line):
                said = self.hcache(*line, code=2)
                self.assertTrue(any(word in said for word in line if word.startswith("--")), said)

    def test_a_conversation_survives_its_process(self):
        words = "The harbour master wrote the names of nine boats into a green book. " * 12
        first = json.loads(self.talk("run", "--session", "s", "--save", "all", "-p", words))
        self.assertEqual(first["restore"]["restored_tokens"], 0)
        whole = self.talk("chat", "--no-store", stdin=f"{words}\nHow many boats?\n").splitlines()
        expected = json.loads(whole[1])
        self.assertEqual(json.loads(whole[0])["reply_tokens"], first["reply_tokens"])
        for method in ("plan", "hidden", "kv"):
            turn = json.loads(self.talk("run", "--session", "s", "--no-save", "--restore-method",
                                        method, "-p", "How many boats?"))
            self.assertEqual(turn["history_tokens"], expected["history_tokens"])
            if method == "plan":  # may find that recomputing so little is faster
                continue
            self.assertGreater(turn["restore"]["restored_tokens"], 128, method)
            # Q4_1 weights consume Q8_1: what is restored is what was there, bit for bit.
            self.assertEqual(turn["reply_tokens"], expected["reply_tokens"], method)

        store = ["--state-dir", self.state, "--json"]
        stat = json.loads(self.hcache("store", "stat", *store))
        self.assertEqual(stat["sessions"], 1)
        self.assertGreater(stat["tokens"], 128)
        self.assertTrue(json.loads(self.hcache("store", "verify", *store))["ok"])
        self.assertEqual(json.loads(self.hcache("store", "ls", *store))[0]["name"], "s")
        file = f"{self.state}/session.hcache"
        self.hcache("store", "export", "--session", "nobody", "-o", file, *store, code=3)
        self.hcache("store", "export", "--session", "s", "-o", file, *store)
        self.hcache("store", "import", "-f", file, *store, code=4)
        other = ["--state-dir", f"{self.state}/other", "--json"]
        moved = json.loads(self.hcache("store", "import", "-f", file, *other))
        self.assertEqual(moved["name"], "s")
        there = json.loads(self.hcache("store", "stat", *other))
        self.assertEqual((there["sessions"], there["chunks"]), (1, moved["chunks"]))
        self.assertTrue(json.loads(self.hcache("store", "verify", *other))["ok"])
        self.hcache("store", "rm", "--session", "nobody", *store, code=3)
        self.hcache("store", "rm", *store, code=2)
        self.hcache("store", "rm", "--session", "s", *store)
        self.hcache("store", "gc", *store)
        self.assertEqual(json.loads(self.hcache("store", "stat", *store))["chunks"], 0)

    def test_rounded_state_is_a_state_of_its_own(self):
        words = "The harbour master wrote the names of nine boats into a green book. " * 12
        rounded = ["run", "--save", "kv", "--restore-method", "kv", "--pack", "q8_0", "-p", words]
        self.assertEqual(json.loads(self.talk(*rounded))["restore"]["restored_tokens"], 0)
        self.assertGreater(json.loads(self.talk(*rounded))["restore"]["restored_tokens"], 128)
        exact = [word if word != "q8_0" else "on" for word in rounded]
        self.assertEqual(json.loads(self.talk(*exact))["restore"]["restored_tokens"], 0)
        self.assertGreater(json.loads(self.talk(*exact))["restore"]["restored_tokens"], 128)

        # What is allowed decides, and is remembered.
        def allowed(link: str, quality: str) -> int:
            turn = self.talk("run", "--save", "kv", "--restore-method", "kv", "--link", link, "-p", words,
                             "--quality", quality)
            return json.loads(turn)["restore"]["restored_tokens"]

        # By which link rounding pays depends on how fast this machine computes and unpacks.
        for link in ("2MB/s", "8MB/s", "20MB/s", "60MB/s"):
            self.assertGreater(allowed(link, "0.0000001"), 128, "the exact state, or packed")
            if allowed(link, "10") == 0:  # another state
                break
        else:
            self.fail("four bits pay by no link")
        self.assertGreater(allowed(link, "10"), 128)
        self.assertIn("--quality", self.talk(*rounded, "--quality", "1", code=2))
        stat = json.loads(self.hcache("store", "stat", "--state-dir", self.state, "--json"))
        self.assertGreater(stat["tokens"], 3 * 128, "each has its own")
        self.assertTrue(json.loads(self.hcache("store", "verify", "--state-dir", self.state,
                                               "--json"))["ok"])

    def test_state_of_other_products_counts_unless_it_is_not_wanted(self):
        if "avx2" not in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8"):
            self.skipTest("ggml's products serve best on this processor")
        words = "The harbour master wrote the names of nine boats into a green book. " * 12
        talk = ["run", "--save", "kv", "--restore-method", "kv", "-p", words]
        self.assertIn("this processor has ggml, ", self.talk(*talk, code=2, HCACHE_PRODUCTS="sse9"))
        ggmls = json.loads(self.talk(*talk, HCACHE_PRODUCTS="ggml"))
        self.assertEqual(ggmls["restore"]["restored_tokens"], 0)
        self.assertGreater(json.loads(self.talk(*talk))["restore"]["restored_tokens"], 128)
        strict = [*talk, "--state-kernels", "same"]
        self.assertEqual(json.loads(self.talk(*strict))["restore"]["restored_tokens"], 0)
        self.assertGreater(json.loads(self.talk(*strict))["restore"]["restored_tokens"], 128)

    def test_an_interrupt_ends_the_reply_and_keeps_it(self):
        chat = subprocess.Popen(
            [PROGRAM, "chat", "-m", MODEL, "--state-dir", self.state, "--ctx", "4096",
             "--session", "s", "--temperature", "0", "--max-tokens", "3000", "--grammar",
             'root ::= [a-z ]+'],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        chat.stdin.write(b"Tell me everything.\n")
        chat.stdin.flush()
        self.assertTrue(chat.stdout.read(1))  # it speaks
        chat.send_signal(signal.SIGINT)
        chat.stdin.close()
        self.assertEqual(chat.wait(timeout=120), 130)
        chat.stdout.close()
        chat.stderr.close()
        sessions = json.loads(self.hcache("store", "ls", "--state-dir", self.state, "--json"))
        self.assertGreater(sessions[0]["tokens"], 5)

    def test_rpc_serve_lends_the_device(self):
        turn = json.loads(self.talk("run", "--device", f"rpc:127.0.0.1:{self.rpc_server()}",
                                    "--no-store", "-p", "Hello"))
        self.assertTrue(turn["reply_tokens"])

    def test_conversations_come_back_on_two_devices(self):
        """The first twelve layers on the CPU, the others on a server."""
        place = ["--device", f"rpc:127.0.0.1:{self.rpc_server()}", "--gpu-layers", "18"]
        self.comes_back(place)
        self.assertIn("a layer is computed on one device",
                      self.hcache("run", "-m", MODEL, "--state-dir", self.state, *place,
                                  "--override-tensor", "ffn_=cpu", "-p", "x", code=8))

    def test_packed_state_is_an_eighth_smaller_and_the_same(self):
        shares = {}
        for pack in ("off", "on"):
            out = json.loads(self.hcache(
                "bench", "restore", "-m", MODEL, "--state-dir", self.state, "--history", "256", "--save",
                "kv", "--methods", "kv", "--pack", pack, "--greedy", "8", "--reps", "1", "--json", "-"))
            store, fidelity = out["store"], out["rows"][0]["fidelity"]
            self.assertEqual(store["packed"], pack == "on")
            self.assertTrue(fidelity["kv_identical"])
            self.assertEqual(fidelity["greedy_agree"], fidelity["greedy_total"])
            shares[pack] = store["page_bytes"] / (store["tokens"] * store["kv_f16_bytes_per_token"])
        self.assertEqual(shares["off"], 1)
        self.assertLess(shares["on"], 0.88)

    def test_several_devices_are_measured_once_they_agree(self):
        out = json.loads(self.hcache("bench", "pipeline", "-m", MODEL, "--quick", "--slow", "0",
                                     "--state-dir", self.state, "--json", "-"))
        self.assertEqual(out["stages"], 2)
        self.assertTrue(out["tokens_equal"])
        restore = out["restore"]
        self.assertEqual(restore["tokens"], 128)
        self.assertTrue(restore["kv_identical"])
        for row in restore["rows"]:
            first, second = row["devices"]
            self.assertGreater(first["bytes"], 0)
            self.assertEqual(first["bytes"], second["bytes"])
        self.assertEqual([str(left) for left in pathlib.Path(self.state).glob("store/bench-*")], [])

    def test_conversations_come_back_where_two_devices_share_every_layer(self):
        """Two of the three KV heads and their query heads on one server, the last on the other."""
        devices = ",".join(f"rpc:127.0.0.1:{self.rpc_server()}" for _ in range(2))
        place = ["--device", devices, "--split-mode", "tensor"]
        self.comes_back(place)
        for arguments, message in ((["--weights", "disk"], "shares each layer"),
                                   (["--gpu-layers", "3"], "--gpu-layers 3"),
                                   (["--tensor-split", "1,2,3"], "3 parts for 2 devices")):
            code = 2 if "--tensor-split" in arguments else 8
            self.assertIn(message, self.hcache("run", "-m", MODEL, "--state-dir", self.state,
                                               *place, *arguments, "-p", "x", code=code))

    def test_a_server_whose_devices_share_every_layer_keeps_conversations(self):
        devices = ",".join(f"rpc:127.0.0.1:{self.rpc_server()}" for _ in range(2))
        options = ["-m", MODEL, "--state-dir", self.state, "--ctx", "2304", "--save", "all",
                   "--device", devices, "--split-mode", "tensor", "--tensor-split", "1,2"]
        messages = [{"role": "user", "content": " ".join(f"boat {i}" for i in range(60))}]
        answers = []
        for run in range(2):
            with serving.Server(PROGRAM, *options) as server:
                answer = server.chat(messages, max_tokens=12)
                answers.append(answer["choices"][0]["message"]["content"])
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                self.assertEqual(run == 1, cached > 128, answer)
                self.assertEqual(server.stop(), 0, server.errors())
        self.assertEqual(answers[0], answers[1])

    def comes_back(self, place: list):
        """A conversation on these devices goes on from hidden states, from KV, and on the CPU alone."""
        words = " ".join(f"boat {i}" for i in range(60))
        whole = self.talk("chat", "--no-store", *place, stdin=f"{words}\nHow many boats?\n")
        expected = [json.loads(line) for line in whole.splitlines()]
        first = json.loads(self.talk("run", "--session", "s", "--save", "all", *place, "-p", words))
        self.assertEqual(first["reply_tokens"], expected[0]["reply_tokens"])
        for method in ("hidden", "kv"):
            turn = json.loads(self.talk("run", "--session", "s", "--no-save", "--restore-method",
                                        method, *place, "-p", "How many boats?"))
            self.assertGreater(turn["restore"]["restored_tokens"], 128, method)
            if method == "kv":  # is exact on every device
                self.assertEqual(turn["reply_tokens"], expected[1]["reply_tokens"])
        # What was saved on both is of use to the CPU alone.
        turn = json.loads(self.talk("run", "--session", "s", "--no-save", "--restore-method", "kv",
                                    "-p", "How many boats?"))
        self.assertGreater(turn["restore"]["restored_tokens"], 128)

    def rpc_server(self) -> int:
        """The port of an `rpc-serve`, which is stopped after the test."""
        # Below those that the system gives to outgoing connections: another program may have one
        # of those, and a connection to one that nobody listens on can end at its own beginning.
        for port in (20000 + (os.getpid() + 997 * attempt) % 12000 for attempt in range(20)):
            if port in self.rpc_ports:
                continue
            self.rpc_ports.add(port)
            server = subprocess.Popen([PROGRAM, "rpc-serve", "--port", str(port), "--threads", "1"],
                                      stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            self.addCleanup(server.stdout.close)
            self.addCleanup(server.wait)
            self.addCleanup(server.kill)
            self.assertIn(b"serving", server.stdout.readline())
            for _ in range(1200):  # it listens a moment after it says so
                if server.poll() is not None:
                    break  # somebody else has the port
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    return port
                except ConnectionRefusedError:
                    time.sleep(0.1)
        self.fail("no port was free for rpc-serve")


class Reference(unittest.TestCase):
    def test_the_reference_page_is_up_to_date(self):
        script = pathlib.Path(__file__).parent.parent.parent / "scripts" / "cli_reference.py"
        subprocess.run([sys.executable, script, PROGRAM, "--check"], check=True)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
