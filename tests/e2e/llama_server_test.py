#!/usr/bin/env python3
"""llama-server's own tests (tools/server/tests of the pinned llama.cpp) against `hcache serve`.

    llama_server_test.py HCACHE             those that llama-server passes with the default model
    llama_server_test.py HCACHE -k NAME     of those, whose name has NAME
    llama_server_test.py --peer SERVER      all, against llama-server: writes what passes to suite.json

tests/e2e/llama_server/suite.json has the tests that llama-server passes, and of those the ones that
are left out here, with the reason. Any other that fails, and any of those that passes, is a failure.
Needs tests/e2e/requirements.txt; `make test-llama-server` installs it into build/clients.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import serving

HERE = Path(__file__).resolve().parent
SUITE = HERE / "llama_server" / "suite.json"
# The others need models of other kinds, or parts of llama-server that have no model (its router).
FILES = ["basic", "chat_completion", "compat_anthropic", "compat_oai_responses", "completion",
         "ctx_shift", "ignore_eos", "infill", "kv_keep_only_active", "lora", "metrics", "security",
         "slot_save", "template", "tokenize", "tool_call"]
LEAST = 0.95  # of what llama-server passes


def source() -> Path:
    """The pinned llama.cpp's tree."""
    sys.path.insert(0, str(HERE.parent.parent / "scripts"))
    import third_party

    return third_party.Build.source(third_party.Progress("fetching llama.cpp (once)"))


def tree(folder: Path) -> Path:
    """The tests with what they find beside themselves, in a folder that they may write to."""
    origin = source()
    tests = folder / "tools" / "server" / "tests"
    shutil.copytree(origin / "tools" / "server" / "tests", tests)
    (folder / "models").symlink_to(origin / "models")
    return tests


def wrapper(folder: Path, program: str) -> Path:
    """`hcache serve` as a program of its own, with a state folder for each start."""
    path = folder / "hcache-serve"
    path.write_text("#!/bin/sh\n"
                    f'exec "{program}" serve --state-dir "$(mktemp -d "{folder}/state.XXXXXX")" '
                    '"$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(server: Path, tests: Path, names: list[str], log: Path) -> dict[str, str]:
    """Outcomes by test. What a test can't be started for counts as a failure."""
    results = tests / "results.jsonl"
    results.unlink(missing_ok=True)
    env = {**os.environ, "LLAMA_SERVER_BIN_PATH": str(server), "SUITE_RESULTS": str(results),
           "SUITE_MODEL": serving.default_model(), "PORT": str(free_port()),
           "PYTHONPATH": f"{tests}:{HERE / 'llama_server'}"}
    command = [sys.executable, "-m", "pytest", "-p", "plugin", "-q", "-m", "not slow", "--tb=short",
               "-p", "no:cacheprovider", *names]
    with open(log, "a", encoding="utf-8") as sink:
        subprocess.run(command, cwd=tests, env=env, stdout=sink, stderr=subprocess.STDOUT, check=False)
    outcomes: dict[str, str] = {}
    if results.exists():
        for line in results.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            worst = outcomes.get(row["test"]) == "failed"
            outcomes[row["test"]] = "failed" if worst else row["outcome"]
    return outcomes


def record(outcomes: dict[str, str]) -> int:
    suite = json.loads(SUITE.read_text(encoding="utf-8")) if SUITE.exists() else {"left": {}}
    passed = sorted(name for name, outcome in outcomes.items() if outcome == "passed")
    suite = {"passed": passed, "left": {k: v for k, v in suite["left"].items() if k in passed}}
    SUITE.write_text(json.dumps(suite, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(passed)} of {len(outcomes)} tests pass")
    return 0 if passed else 1


def judge(outcomes: dict[str, str], wanted: list[str], left: dict[str, str]) -> int:
    passed = [name for name in wanted if outcomes.get(name) == "passed"]
    wrong = [name for name in wanted if name not in left and name not in passed]
    better = [name for name in wanted if name in left and name in passed]
    for name in wrong:
        print(f"FAILED {name}")
    for name in better:
        print(f"PASSED, though suite.json leaves it out: {name}")
    share = len(passed) / len(wanted)
    print(f"llama-server's tests: {len(passed)} of {len(wanted)} pass ({100 * share:.1f} %), "
          f"{len(left.keys() & set(wanted))} are left out")
    return 1 if wrong or better or share < LEAST else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path)
    parser.add_argument("--peer", action="store_true", help="the program is llama-server")
    parser.add_argument("-k", metavar="NAME", default="", help="only tests whose name has NAME")
    parser.add_argument("--log", type=Path, help="keep what pytest prints here")
    args = parser.parse_args()
    program = args.program.resolve()
    with tempfile.TemporaryDirectory() as folder:
        log = (args.log or Path(folder) / "log").resolve()
        tests = tree(Path(folder))
        if args.peer:
            files = [f"unit/test_{name}.py" for name in FILES]
            return record(run(program, tests, files, log))
        suite = json.loads(SUITE.read_text(encoding="utf-8"))
        wanted = [name for name in suite["passed"] if args.k in name]
        if not wanted:
            print(f"no test's name has '{args.k}'", file=sys.stderr)
            return 2
        server = wrapper(Path(folder), str(program))
        outcomes = run(server, tests, wanted, log)
        # Some of them sleep for what they wait for: a busy machine gets a second chance.
        again = [name for name in wanted
                 if outcomes.get(name) != "passed" and name not in suite["left"]]
        if again:
            print(f"once more: {' '.join(again)}", flush=True)
            outcomes |= run(server, tests, again, log)
        code = judge(outcomes, wanted, suite["left"]) if not args.k else 0
        if args.k:
            for name in wanted:
                print(f"{outcomes.get(name, 'missing'):8} {name}")
            code = 0 if all(outcomes.get(name) == "passed" for name in wanted) else 1
        if code != 0 and args.log is None:
            print(log.read_text(encoding="utf-8")[-20000:])
        return code


if __name__ == "__main__":
    sys.exit(main())
