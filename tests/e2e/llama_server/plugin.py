"""What llama-server's own tests need to run here: another model, and no downloads.

Loaded into pytest by llama_server_test.py. The tests name models of the internet; those that ask for
a model of text get the one of SUITE_MODEL. Results go to SUITE_RESULTS, a JSON line for each test.
"""

import contextlib
import json
import os
import sys
import types

# Used for downloads alone.
sys.modules.setdefault("wget", types.ModuleType("wget"))
_locks = types.ModuleType("filelock")
_locks.FileLock = lambda _path: contextlib.nullcontext()
sys.modules.setdefault("filelock", _locks)

import utils  # noqa: E402  (llama-server's)

utils.ServerPreset.load_all = staticmethod(lambda: None)
_start = utils.ServerProcess.start


def start(self, timeout_seconds=utils.DEFAULT_HTTP_TIMEOUT):
    if self.model_hf_repo:
        self.model_hf_repo = self.model_hf_file = None
        self.offline = False
        self.model_file = os.environ["SUITE_MODEL"]
    return _start(self, timeout_seconds)


utils.ServerProcess.start = start


def pytest_runtest_logreport(report):
    """A test's worst phase comes last: set-up, call and tear-down each write a line."""
    if report.when != "call" and report.outcome == "passed":
        return
    with open(os.environ["SUITE_RESULTS"], "a", encoding="utf-8") as out:
        out.write(json.dumps({"test": report.nodeid, "outcome": report.outcome,
                              "seconds": round(report.duration, 2)}) + "\n")
