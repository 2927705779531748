#!/usr/bin/env python3
"""Clients that hang up, lie and talk nonsense, many at a time: the polite ones among them get their
very answers, and nothing stays behind.

    hostile_test.py HCACHE [-v] [name]

HCACHE_TEST_SEED chooses what the clients do; it is printed.
"""

import os
import sys
import tempfile
import unittest

import hostile
import serving

PROGRAM = sys.argv.pop(1)
SEED = int(os.environ.get("HCACHE_TEST_SEED", "1"))
REQUESTS = 200
CONNECTIONS = 32


class Hostile(unittest.TestCase):
    def test_a_crowd_leaves_nothing_behind(self):
        print(f"seed {SEED}", flush=True)
        # The arena is smaller than what is said, so conversations are evicted and restored too.
        with tempfile.TemporaryDirectory() as folder, \
                serving.Server(PROGRAM, "-m", serving.default_model(), "--state-dir", folder,
                               "-t", "2", "--ctx", "768", "--parallel", "4") as server:
            def answer(subject):
                body = hostile.question(subject)
                return server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]

            answers = {subject: answer(subject) for subject in hostile.SUBJECTS}
            self.assertEqual(len(set(answers.values())), len(answers))
            crowd = hostile.Crowd(server.url, SEED, answers)
            crowd.run(REQUESTS, CONNECTIONS)
            self.assertEqual(crowd.failures, [])
            self.assertEqual(sum(crowd.done.values()), REQUESTS)
            self.assertEqual(set(crowd.done), {act.__name__ for act in crowd.ACTS})

            serving.wait_until(lambda: not hostile.busy(hostile.metrics(server.url)),
                               "the server to have nothing to do")
            figures = hostile.metrics(server.url)
            self.assertGreater(figures['hcache_requests_total{result="cancelled"}'], 0)
            self.assertNotIn('hcache_requests_total{result="failed"}', figures)
            for subject, text in answers.items():
                self.assertEqual(answer(subject), text)
            self.assertEqual(server.stop(), 0, server.errors())


if __name__ == "__main__":
    unittest.main(verbosity=2)
