#!/usr/bin/env python3
"""hcache eval: what it counts, what a restore changes of it (nothing, where that is exact), and how it
refuses.

    eval_test.py HCACHE MODEL [-v] [name]
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

PROGRAM, MODEL = sys.argv[1], sys.argv[2]
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROSE = (ROOT / "README.md").read_text(encoding="utf-8")


class Eval(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="hcache-eval-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.text = self.write("text.txt", PROSE)

    def write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    def hcache(self, *args, code=0) -> str:
        done = subprocess.run([PROGRAM, "eval", *args, "-m", MODEL, "-t", "2", "--state-dir",
                               str(self.folder / "state")], capture_output=True, text=True, timeout=600)
        self.assertEqual(done.returncode, code, f"{args}\n{done.stdout}\n{done.stderr}")
        return done.stdout if code == 0 else done.stderr

    def json(self, *args) -> dict:
        return json.loads(self.hcache(*args, "--json", "-"))

    def test_perplexity_is_the_same_after_every_exact_restore(self):
        out = self.json("ppl", self.text, "--window", "256", "--windows", "3", "--methods",
                        "computed,kv,hidden,plan")
        self.assertEqual(out["text"]["windows"], 3)
        self.assertEqual(out["text"]["from"], 128)
        rows = {row["method"]: row for row in out["rows"]}
        computed = rows["computed"]
        self.assertEqual(computed["scored"], 3 * (256 - 128 - 1))
        self.assertGreater(computed["perplexity"]["value"], 2)
        self.assertLess(computed["perplexity"]["value"], 1000)
        self.assertLessEqual(computed["perplexity"]["low"], computed["perplexity"]["value"])
        self.assertEqual(computed["source"], {"computed": 3 * 128, "hidden": 0, "kv": 0,
                                              "recomputed": 0, "bytes_read": 0})
        for name in ("kv", "hidden"):
            self.assertEqual(rows[name]["perplexity"], computed["perplexity"], name)
            # The last token before what is scored is computed: its logits are wanted.
            self.assertGreaterEqual(rows[name]["source"][name], 3 * 127, rows[name])
            self.assertGreater(rows[name]["source"]["bytes_read"], 0)
        self.assertEqual(rows["plan"]["perplexity"], computed["perplexity"])
        left = list((self.folder / "state").glob("**/bench-*"))
        self.assertEqual(left, [], "a store is left over")

    def test_kl_is_zero_where_nothing_differs_and_above_where_something_does(self):
        exact = self.json("kl", self.text, "--window", "128", "--windows", "3", "--methods",
                          "computed,kv")
        for row in exact["rows"]:
            self.assertEqual(row["mean_kl"]["value"], 0)
            self.assertEqual(row["same_top"]["value"], 1)
            self.assertEqual(row["perplexity_ratio"]["value"], 1)
            self.assertEqual(row["perplexity"], exact["base_perplexity"])
        lossy = self.json("kl", self.text, "--window", "128", "--windows", "3", "--methods",
                          "computed", "--kv-type", "q8_0", "--base-kv-type", "f16")
        [row] = lossy["rows"]
        self.assertEqual(row["scored"], 3 * 63)
        self.assertEqual(lossy["base_perplexity"], exact["base_perplexity"])
        self.assertGreater(row["mean_kl"]["value"], 0)
        self.assertLess(row["mean_kl"]["value"], 0.05)
        self.assertLess(row["mean_kl"]["low"], row["mean_kl"]["high"])
        quantiles = [row["kl_quantiles"][name] for name in ("p50", "p90", "p99", "max")]
        self.assertEqual(quantiles, sorted(quantiles))
        self.assertGreater(row["same_top"]["value"], 0.8)
        self.assertNotEqual(row["perplexity"], lossy["base_perplexity"])

    def test_questions_of_a_file(self):
        questions = [
            ("The capital of France is", [" Paris", " a banana"], 0),
            ("One, two, three, four,", [" zebra", " five"], 1),
            # Right by the file, and not by any sense.
            ("The sun rises in the", [" east", " spoon"], 1),
        ]
        file = self.write("questions.jsonl", "".join(
            json.dumps({"prompt": p, "choices": c, "answer": a}) + "\n" for p, c, a in questions))
        out = self.json("tasks", file, "--methods", "computed,hidden")
        self.assertEqual(out["questions"], 3)
        self.assertEqual(out["chance"], 0.5)
        self.assertEqual([row["method"] for row in out["rows"]], ["base", "computed", "hidden"])
        for row in out["rows"]:
            self.assertAlmostEqual(row["accuracy"]["value"], 2 / 3)
            self.assertEqual(row["same_as_base"]["value"], 1)
            self.assertEqual(row["accuracy_minus_base"], {"value": 0, "low": 0, "high": 0})

    def test_made_up_questions_after_a_restore(self):
        out = self.json("tasks", "--lines", "8", "--questions", "4", "--methods", "kv")
        base, kv = out["rows"]
        self.assertEqual(kv["accuracy"], base["accuracy"])
        self.assertEqual(kv["same_as_base"]["value"], 1)
        self.assertGreater(kv["source"]["kv"], 0)
        table = self.hcache("tasks", "--lines", "8", "--questions", "2")
        self.assertIn("25.0 % are right by chance", table)

    def test_rounded_state_is_smaller_and_nearly_the_same(self):
        rows = {}
        for pack in ("off", "on", "q8_0", "q4_0"):
            out = self.json("kl", self.text, "--window", "256", "--windows", "2", "--methods", "kv", "--pack",
                            pack)
            [rows[pack]] = out["rows"]
            self.assertGreaterEqual(rows[pack]["source"]["kv"], 2 * 127, "restored, not computed")
        for pack in ("off", "on"):
            self.assertEqual(rows[pack]["mean_kl"]["value"], 0, pack)
        self.assertGreater(rows["q8_0"]["mean_kl"]["value"], 0)
        self.assertLess(rows["q8_0"]["mean_kl"]["value"], 0.01)
        self.assertGreater(rows["q4_0"]["mean_kl"]["value"], rows["q8_0"]["mean_kl"]["value"])
        self.assertLess(rows["q4_0"]["mean_kl"]["value"], 1)
        read = {pack: row["source"]["bytes_read"] / rows["off"]["source"]["bytes_read"]
                for pack, row in rows.items()}
        self.assertLess(read["on"], 0.9)
        self.assertAlmostEqual(read["q8_0"], 34 / 64, delta=0.02)
        self.assertAlmostEqual(read["q4_0"], 18 / 64, delta=0.02)

    def test_what_is_lost_grows_with_what_is_left_out(self):
        out = self.json("compression", self.text, "--context", "384", "--tokens", "48", "--pieces", "2",
                        "--budgets", "1,0.5,0.15", "--policies", "none,recent,random,car,snap,self")
        self.assertEqual(out["text"]["pieces"], 2)
        rows = {(row["policy"], row["budget"]): row for row in out["rows"]}
        self.assertEqual(len(rows), 1 + 5 * 3)
        base = rows["none", 1]["perplexity"]
        for policy in ("recent", "random", "car", "snap", "self"):
            whole, half, few = (rows[policy, budget] for budget in (1, 0.5, 0.15))
            self.assertEqual(whole["perplexity"], base, "all rows are kept")
            self.assertEqual(whole["mean_kl"]["value"], 0)
            self.assertEqual(whole["same_top"]["value"], 1)
            self.assertEqual([row["kept"] for row in (whole, half)], [1, 0.5])
            self.assertAlmostEqual(few["kept"], 0.15, delta=0.005)
            self.assertGreater(half["mean_kl"]["value"], 0, policy)
            self.assertGreater(few["mean_kl"]["value"], half["mean_kl"]["value"], policy)
            self.assertLess(few["mean_kl"]["value"], 3, policy)
        self.assertLess(rows["snap", 0.15]["mean_kl"]["value"],
                        rows["random", 0.15]["mean_kl"]["value"])
        uneven = self.json("compression", self.text, "--context", "384", "--tokens", "16", "--pieces",
                           "1", "--budgets", "0.5", "--policies", "snap", "--layers", "profile")
        self.assertAlmostEqual(uneven["rows"][1]["kept"], 0.5, delta=0.01)

    def test_later_questions_behind_fewer_rows(self):
        out = self.json("compression", "--lines", "8", "--questions", "3", "--budgets", "1,0.5",
                        "--policies", "snap")
        self.assertEqual(out["questions"]["questions"], 3)
        self.assertEqual(out["questions"]["chance"], 0.25)
        rows = {row["budget"]: row for row in out["rows"] if row["policy"] == "snap"}
        self.assertEqual(rows[1]["accuracy"], out["rows"][0]["accuracy"])
        self.assertAlmostEqual(rows[0.5]["kept"], 0.5, delta=0.01)

    def test_compression_refuses_what_it_cannot_do(self):
        for args, what in ((["--budgets", "0"], "(0, 1]"), (["--policies", "best"], "none|recent"),
                           (["--context", "1000000"], "less than a context"),
                           (["--layers", "fair"], "uniform"), (["--lines", "9"], "--lines")):
            said = self.hcache("compression", self.text, *args, code=2)
            self.assertIn(what, said)

    def test_truncation_against_another_computed_anew(self):
        command = ["truncation", self.text, "--context", "256", "--keep-first", "64", "--overflows", "2-3",
                   "--pieces", "1", "--compare", "anew"]
        as_many = self.json(*command)
        same = self.json(*command, "--anew-share", str(as_many["share"]))
        self.assertEqual(same["anew_share"], as_many["anew_share"])
        self.assertEqual(same["rows"], as_many["rows"])
        halved = self.json(*command, "--anew-share", "0.5")
        self.assertEqual(halved["anew_share"], 0.5)
        [held], [fewer] = as_many["rows"], halved["rows"]
        self.assertEqual((fewer["perplexity"], fewer["scored"]), (held["perplexity"], held["scored"]))
        self.assertNotEqual(fewer["perplexity_anew"], held["perplexity_anew"])

    def test_a_base_with_another_vocabulary_is_refused(self):
        other = str(self.folder / "other.gguf")
        subprocess.run([PROGRAM, "model", "synth", "--shape", "smollm2-135m", "--layers", "1", "-o",
                        other], check=True, capture_output=True)
        said = self.hcache("kl", self.text, "--base-model", other, code=4)
        self.assertIn(other, said)

    def test_bad_input(self):
        empty = self.write("empty.txt", "")
        self.assertIn("is empty", self.hcache("ppl", empty, code=2))
        short = self.write("short.txt", "Too short.")
        self.assertIn("less than a window", self.hcache("ppl", short, code=2))
        self.assertIn("--from 511", self.hcache("ppl", self.text, "--from", "511", code=2))
        self.hcache("ppl", os.path.join(self.folder, "none.txt"), code=3)
        self.hcache("kl", code=2)
        self.assertIn("--methods", self.hcache("kl", self.text, "--methods", "magic", code=2))
        bad = self.write("bad.jsonl", '{"prompt": "x", "choices": ["a"], "answer": 0}\n')
        self.assertIn("bad.jsonl, line 1", self.hcache("tasks", bad, code=2))
        for wrong in ("4-1", "1-", "0-2", "1-2-3"):
            self.assertIn(f"'{wrong}'", self.hcache("truncation", self.text, "--overflows", wrong, code=2))
        self.assertIn("--base-model", self.hcache("ppl", self.text, "--base-model", MODEL, code=2))
        self.assertIn("cpu", self.hcache("ppl", self.text, "--device", "list"))


if __name__ == "__main__":
    del sys.argv[1:3]
    unittest.main()
