#!/usr/bin/env python3
"""`hcache sim`: scenarios in, figures out, and what it says to a scenario that is wrong.

sim_test.py PROGRAM
"""

import csv
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

PROGRAM = sys.argv[1]

SERVING = {
    "kind": "serving",
    "model": "llama2-7b",
    "hardware": {"ssds": 4},
    "scheduler": {"restore_exclusive": True},
    "state": {"keep_resident": False},
    "workload": {"sessions": 8, "rounds": 3, "seed": 5},
    "methods": ["ideal", "plan", "recompute"],
    "rates": [0.5, 1],
    "cases": [{"name": "small"}, {"name": "large", "model": "llama2-13b"}],
}
PREFIX_CACHE = {
    "kind": "prefix-cache",
    "trace": "trace.jsonl",
    "capacities": [0.5, 1],
    "policies": ["lru", "optimal"],
}


class Sim(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_sim(self, scenario, *options):
        file = self.folder / "scenario.json"
        file.write_text(scenario if isinstance(scenario, str) else json.dumps(scenario))
        return subprocess.run([PROGRAM, "sim", "--scenario", file, *options], text=True,
                              capture_output=True)

    def figures(self, scenario, *options):
        done = self.run_sim(scenario, "--json", "-", *options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def assert_refused(self, scenario, *words):
        done = self.run_sim(scenario)
        self.assertEqual(done.returncode, 2, done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)
        self.assertEqual(done.stdout, "")

    def test_a_server_under_load(self):
        rows = self.figures(SERVING)["rows"]
        self.assertEqual([(r["case"], r["rate"], r["method"]) for r in rows],
                         [(c, r, m) for c in ("small", "large") for r in (0.5, 1)
                          for m in SERVING["methods"]])
        for row in rows:
            self.assertEqual(row["requests"], 24)
            self.assertEqual(row["ttft_ms"]["returning"]["n"], 16)
            self.assertEqual(row["restored_share"] > 0, row["method"] != "recompute")
        for ideal, plan, recompute in zip(*[iter(rows)] * 3, strict=True):
            means = [r["ttft_ms"]["returning"]["mean"] for r in (ideal, plan, recompute)]
            self.assertEqual(means, sorted(means))
        self.assertEqual(rows, self.figures(SERVING)["rows"])  # the same every time

    def test_csv_has_the_same_figures(self):
        file = self.folder / "out.csv"
        rows = self.figures(SERVING, "--csv", file)["rows"]
        with open(file, encoding="utf-8") as text:
            lines = list(csv.DictReader(text))
        self.assertEqual(len(lines), len(rows))
        for line, row in zip(lines, rows, strict=True):
            self.assertEqual(line["method"], row["method"])
            self.assertEqual(float(line["ttft_ms.returning.p50"]),
                             row["ttft_ms"]["returning"]["p50"])

    def test_a_prefix_cache_under_a_trace(self):
        requests = [{"timestamp": 1000 * i, "input_length": 1024, "output_length": 1,
                     "hash_ids": [0, 1 + i % 3]} for i in range(30)]
        (self.folder / "trace.jsonl").write_text("\n".join(map(json.dumps, requests)))
        rows = self.figures(PREFIX_CACHE)["rows"]
        hits = {(r["policy"], r["capacity"]): r["hits"] for r in rows}
        self.assertEqual(hits["lru", 1], 60 - 4)
        self.assertEqual(hits["optimal", 1], 60 - 4)
        self.assertLess(hits["lru", 0.5], hits["optimal", 0.5])
        rows = self.figures({**PREFIX_CACHE, "model": "llama2-7b", "device": "a100"})["rows"]
        for row in rows:
            self.assertLess(0, row["saved_s"])
            self.assertLess(row["saved_s"], row["prefill_s"])
        self.assert_refused({**PREFIX_CACHE, "model": "llama2-8b"}, "model")
        self.assert_refused({**PREFIX_CACHE, "costs_known": True}, "costs_known")

    def test_a_batch_that_loads_and_saves_while_it_computes(self):
        scenario = {"kind": "overlap", "model": "llama2-13b", "batch": 16, "decode_steps": 20,
                    "history": 1000, "new_tokens": 100, "buffered_layers": [0, 10, 40],
                    "cases": [{"name": "load"}, {"name": "more to prefill", "new_tokens": 2000}]}
        load, prefill = self.figures(scenario)["rows"]
        times = load["preloading_ms"]
        self.assertLess(times["0"], load["no_preloading_ms"])
        self.assertLess(times["10"], times["0"])
        self.assertAlmostEqual(times["40"], load["prefill_ms"])
        self.assertAlmostEqual(load["no_preloading_ms"], load["load_ms"] + load["prefill_ms"])
        self.assertGreater(load["read_buffer_layers"], 10)
        self.assertEqual(prefill["read_buffer_layers"], 0)
        self.assertGreater(prefill["recompute_ms"], prefill["prefill_ms"])
        self.assertLess(prefill["unsaved_ms"], prefill["save_ms"])
        self.assert_refused({**scenario, "buffered_layers": [-1]}, "buffered_layers")
        self.assert_refused({**scenario, "cases": 1}, "cases")
        self.assert_refused({**scenario, "rates": [1]}, "rates")

    def test_a_batch_with_its_context_in_host_memory(self):
        scenario = {"kind": "batch", "model": "opt-30b", "batches": [32], "prompts": [512],
                    "output": 8, "hardware": {"gemm_efficiency": 0.45},
                    "systems": [{"mode": "kv"}, {"mode": "act"}, {"name": "best", "mode": "search"},
                                {"mode": "fixed", "share": 0.5}],
                    "cases": [{"name": "30B"}, {"name": "13B", "model": "opt-13b"}]}
        rows = self.figures(scenario)["rows"]
        self.assertEqual([(r["case"], r["system"]) for r in rows],
                         [(c, s) for c in ("30B", "13B") for s in ("kv", "act", "best", "fixed")])
        for kv, act, best, fixed in zip(*[iter(rows)] * 4, strict=True):
            self.assertGreaterEqual(best["tokens_per_s"], kv["tokens_per_s"])
            self.assertGreaterEqual(best["tokens_per_s"] * 1.001, act["tokens_per_s"])
            self.assertEqual((kv["act_share"], act["act_share"], fixed["act_share"]), (0, 1, 0.5))
            self.assertEqual((kv["act_gb"], act["kv_gb"]), (0, 0))
        self.assertEqual(rows, self.figures(scenario)["rows"])
        self.assert_refused({**scenario, "systems": [{"mode": "magic"}]}, "systems", "unmanaged")
        self.assert_refused({**scenario, "systems": [{"mode": "kv", "share": 1}]}, "'share'")
        self.assert_refused({**scenario, "prompts": [0]}, "'prompts' holds 0")
        done = self.run_sim({**scenario, "hardware": {"host_gib": 40}})
        self.assertEqual(done.returncode, 5, done.stderr)
        self.assertIn("30B kv, batch 32", done.stderr)

    def test_a_machine_that_was_measured(self):
        curve = [[1, 1e-4], [512, 2e-2]]
        costs = {"layers": 2, "project": curve, "load_kv": {"base_s": 0, "per_row_s": 1e-8},
                 "dense": curve, "dense_of_last_layer": curve, "attn_per_key": curve,
                 "hidden_bytes": 100, "kv_bytes": 300, "link_bytes_per_s": 1e9,
                 "link_start_s": 0, "slice_rows": 512, "batch_rows": 512, "finish_s": 1e-3,
                 "step_finish_s": 1e-3}
        profile = self.folder / "profile.json"
        scenario = {**SERVING, "hardware": {"profile": "profile.json"}, "arena_tokens": 20000}
        del scenario["cases"], scenario["model"]
        profile.write_text(json.dumps({"costs": costs}))
        rows = self.figures(scenario)["rows"]
        self.assertEqual({row["arena_tokens"] for row in rows}, {20000})
        self.assertEqual({row["requests"] for row in rows}, {24})
        self.assert_refused({**scenario, "arena_tokens": 0}, "arena_tokens")
        profile.write_text(json.dumps({"costs": {**costs, "dense": [[2, 1], [1, 1]]}}))
        self.assert_refused(scenario, "profile.json: costs", "'dense'", "rise")
        profile.write_text("{}")
        self.assert_refused(scenario, "profile.json", "hcache profile --json")

    def test_wrong_scenarios_are_named(self):
        self.assert_refused("{", "scenario.json", "JSON")
        self.assert_refused({"kind": "magic"}, "kind", "prefix-cache", "serving")
        self.assert_refused({**SERVING, "colour": 1}, "no setting 'colour'")
        self.assert_refused({**SERVING, "hardware": {"device": "abacus"}}, "hardware", "abacus",
                            "a100")
        self.assert_refused({**SERVING, "workload": {"rounds": "many"}}, "workload", "'rounds'")
        self.assert_refused({**SERVING, "hardware": {"ssds": 2000}}, "'ssds' is 2000", "1024")
        self.assert_refused({**SERVING, "methods": ["magic"]}, "methods", "recompute")
        self.assert_refused({**SERVING, "state": {"tiers": [{"name": "disk"}]}}, "gb_per_s")
        room = {"name": "disk", "gb_per_s": 1, "conversation_tokens": 4096}
        self.assert_refused({**SERVING, "state": {"tiers": [room]}}, "tiers", "'evict_whole'")
        self.assert_refused({**SERVING, "cases": [{"model": "opt-30b"}]}, "no memory for KV")
        self.assert_refused({k: v for k, v in PREFIX_CACHE.items() if k != "trace"}, "--trace")
        self.assert_refused({**PREFIX_CACHE, "capacities": [2]}, "capacities")
        done = self.run_sim(PREFIX_CACHE)  # no such trace
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("trace.jsonl", done.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
