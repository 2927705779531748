#!/usr/bin/env python3
"""Runs the demo and every script of bench/ once, as its documentation writes it, with tiny settings.

What is measured does not matter here, but every script must come to its end. They run the program
in build/release, the demo's in build/demo, and llama.cpp's from `make peer`.
"""

import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


class BenchScripts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = Path(folder.name)

    def run_script(self, *command, **environment):
        done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True,
                              check=False, env={**os.environ, **environment})
        self.assertEqual(done.returncode, 0, f"{command}\n{done.stderr[-4000:]}")
        self.assertNotIn("Traceback", done.stderr)
        return done.stdout

    def results(self, pattern):
        """Figures that a script has written into its folder without being told where."""
        [file] = self.work.glob(pattern)
        return json.loads(file.read_text(encoding="utf-8"))

    def test_every_script_is_here(self):
        scripts = {path.relative_to(ROOT).as_posix() for path in (ROOT / "bench").rglob("*")
                   if path.suffix in (".py", ".sh") and os.access(path, os.X_OK)}
        text = Path(__file__).read_text(encoding="utf-8")
        self.assertEqual([name for name in sorted(scripts) if f'"{name}"' not in text], [])

    def test_bars(self):
        self.run_script("bench/bars.py", "--quick", "--work", self.work)
        found = self.results("*-threads.json")
        self.assertTrue(found["quick"])
        self.assertEqual({row["bar"] for row in found["rows"]}, {1, 2, 3, 4, 5, 6, 7})

    def test_gpu(self):
        self.run_script("bench/gpu.sh", "--quick", "--work", self.work, PRESET="release",
                        DEVICE="cpu")
        self.assertEqual({row["bar"] for row in self.results("*-threads.json")["rows"]}, {1, 2, 3, 5})
        self.run_script("bench/gpu.sh", "--batch", "--quick", "--weights", "disk", "--work", self.work,
                        PRESET="release", DEVICE="cpu")
        self.assertEqual(self.results("batch_bar.json")["same_answers"], 4)

    def test_products(self):
        limits = self.work / "limits"  # of a machine that reads 1 GB/s and computes at once
        limits.write_text('#!/bin/sh\necho \'{"int8_ops_per_s": 1e18, "read_bytes_per_s": 1e9}\'\n')
        limits.chmod(0o755)
        self.run_script("bench/products.py", "--quick", "--kernels", ",ggml", "--limits", limits,
                        "--work", self.work)
        rows = self.results("*-products.json")["rows"]
        self.assertEqual(len(rows), 6)
        most = {row["what"].split(":")[1]: row["most"] for row in rows}
        self.assertAlmostEqual(most[" prefill 64 over llama-bench"] / 64,
                               most[" decode 4 over llama-bench"])

    def test_serve_bars(self):
        self.run_script("bench/serve_bars.py", "--quick", "--work", self.work)
        self.assertEqual({row["bar"] for row in self.results("*-serve.json")["rows"]}, {3, 4, 5, 6})

    def test_fetch_bar(self):
        for policy in ("scheduler-aware", "car-timer"):
            self.run_script("bench/fetch_bar.py", "--quick", "--policy", policy, "--work", self.work)

    def test_peer(self):
        measures = ["engine", "brief", "short", "stream", "restart"]
        self.run_script("bench/peer.py", "--quick", "--what", ",".join(measures), "--work", self.work,
                        "--json", self.work / "peer.json")
        self.assertEqual(set(measures) - set(self.results("peer.json")), set())

    def test_hybrid(self):
        self.run_script("bench/hybrid.py", "--quick", "--work", self.work)
        found = self.results("hybrid.json")
        self.assertTrue(found["hcache"][0]["same"])
        self.assertGreaterEqual(found["hcache"][0]["cached"], 256)

    def test_overflow(self):
        self.run_script("bench/overflow.py", "--quick", "--work", self.work)
        found = self.results("overflow.json")
        self.assertEqual(sum(turn["killed"] for turn in found["turns"]), 1)
        self.assertGreater(found["turns"][-1]["dropped"], 0)

    def test_proxy(self):
        self.run_script("bench/proxy.py", "--quick", "--work", self.work)
        [row] = self.results("proxy.json")["rows"]
        self.assertGreater(row["tokens"]["hidden"] + row["tokens"]["kv"] + row["tokens"]["recomputed"], 100)

    def test_drafting(self):
        self.run_script("bench/drafting.py", "--quick", "--work", self.work, "--json",
                        self.work / "drafting.json")
        found = self.results("drafting.json")
        self.assertEqual([bar["kind"] for bar in found["bars"]], ["editing", "new"])

    def test_compression(self):
        self.run_script("bench/compression.py", "--quick", "--work", self.work)
        found = self.results("compression.json")
        self.assertEqual({(m["policy"], m["budget"]) for m in found["means"]},
                         {("none", 1), ("recent", 0.5), ("car", 0.5)})
        self.assertGreater(found["texts"][0]["scoring"]["ratio"]["median"], 0)
        self.assertEqual(found["questions"][0]["questions"]["questions"], 2)

    def test_quality(self):
        self.run_script("bench/quality.py", "--quick", "--work", self.work)
        found = self.results("quality.json")
        [text] = found["texts"]
        self.assertTrue(text["agrees"], text)
        self.assertEqual([row["method"] for row in text["methods"]],
                         ["kv", "kv, q8_0", "kv, q4_0"])
        [truncated] = found["truncation"]
        one, both = truncated["rows"]
        self.assertEqual([(row["first_overflow"], row["overflows"]) for row in (one, both)],
                         [(1, 1), (1, 2)])
        self.assertEqual(both["scored"], 2 * one["scored"])
        self.assertIn("perplexity_last_rows", one)
        self.assertTrue(-0.9 < found["truncation_mean"] < 9, found["truncation_mean"])

    def test_quality_of_truncation_alone(self):
        self.run_script("bench/quality.py", "--quick", "--parts", "truncation", "--compare", "anew",
                        "--work", self.work)
        found = self.results("quality.json")
        [truncated] = found["truncation"]
        for row in truncated["rows"]:
            self.assertEqual({key for key in row if key.startswith("perplexity")},
                             {"perplexity", "perplexity_anew"})
        self.assertNotIn("truncation_mean_last_rows", found)

    def test_weights(self):
        self.run_script("bench/weights.py", "--quick", "--work", self.work)
        rows = self.results("weights.json")["rows"]
        self.assertEqual([row["batch"] for row in rows], [1, 2])
        self.assertTrue(all(row["bytes_read"] > 0 for row in rows))

    def test_batch_bar(self):
        self.run_script("bench/batch_bar.py", "--quick", "--work", self.work)
        found = self.results("batch_bar.json")
        self.assertEqual(found["same_answers"], 4)
        self.assertGreater(found["hcache"]["engine"]["streamed_bytes"], 0)
        done = [peer["options"] for peer in found["peers"] if "seconds" in peer]
        self.assertEqual(done, ["-np 1", "-np 2"])

    def test_sweep(self):
        self.run_script("bench/sweep.py", "--quick", "--work", self.work, "--json",
                        self.work / "sweep.json")
        self.assertEqual(self.results("sweep.json")["summary"]["links"], 3)

    def test_packing(self):
        self.run_script("bench/packing.py", "--quick", "--rounded", "--work", self.work)
        found = self.results("packing.json")
        self.assertEqual(len(found["rows"]), 2)
        for row in found["rows"]:
            self.assertLess(row["on"]["share_of_kv"], 0.88)
            self.assertEqual(row["off"]["share_of_kv"], 1)
            self.assertAlmostEqual(row["q8_0"]["share_of_kv"], 34 / 64, delta=0.01)

    def test_sim_check(self):
        self.run_script("bench/sim_check.py", "--quick", "--work", self.work, "--json",
                        self.work / "check.json")
        self.assertEqual({row["case"] for row in self.results("check.json")["rows"]},
                         {"memory", "arena"})

    def test_pair(self):
        self.assertIn("decode 8", self.run_script("bench/pair.py", "--quick", "--work", self.work))
        self.assertIn("128 kv none", self.run_script(
            "bench/pair.py", "--quick", "--restore", "1024", "--links", "none", "--encrypted", "--work",
            self.work))
        self.assertIn("128 plan paper", self.run_script("bench/pair.py", "--quick", "--restore", "512",
                                                        "--work", self.work))

    def test_figures(self):
        out = self.run_script("bench/paper/figures.py", "--quick", "--work", self.work)
        self.assertIn("hcache-fig9", out)
        self.assertIn("hybridserve-fig14", out)
        for name in ("attentionstore-fig13", "attentionstore-fig23"):
            self.assertIn(name, self.run_script("bench/paper/figures.py", "--quick", "--only", name,
                                                "--work", self.work))

    def test_demo(self):
        out = self.run_script("scripts/demo.py", "--turns", "1", "--program", "build/demo/bin/hcache")
        self.assertIn("(resident)", out)
        self.assertIn("identical", out)


if __name__ == "__main__":
    unittest.main(verbosity=2)
