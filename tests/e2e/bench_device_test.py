#!/usr/bin/env python3
"""The bars of a GPU (bench/bars.py) with tiny settings on HCACHE_TEST_DEVICE: they come to their end,
and what they restore is right. Bar 2 is left out, which needs llama.cpp's programs for that device.

    bench_device_test.py HCACHE [-v] [name]
"""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import serving

PROGRAM = sys.argv.pop(1)


@unittest.skipIf(serving.DEVICE == "cpu", "bench_scripts_test.py runs them on the CPU")
class Bars(unittest.TestCase):
    def test_every_method_restores_and_both_reach_their_end(self):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "bars.json"
            done = subprocess.run(
                [sys.executable, serving.ROOT / "bench/bars.py", "--quick", "--gpu", "--bars", "1,3",
                 "--device", serving.DEVICE, "--program", PROGRAM, "--work", folder, "--json", out],
                capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stderr[-4000:])
            rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
        self.assertEqual({row["bar"] for row in rows}, {1, 3})
        self.assertEqual([row["what"] for row in rows if "failed" in row["what"]], [])
        fidelity = {row["what"].split(",")[1].split(":")[0].strip(): row for row in rows
                    if row["bar"] == 1}
        self.assertEqual(set(fidelity), {"plan", "hidden", "kv", "recompute"})
        for what, row in fidelity.items():
            self.assertTrue(row["pass"], f"{what}: {row}")


if __name__ == "__main__":
    unittest.main()
