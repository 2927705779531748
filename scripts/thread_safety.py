#!/usr/bin/env python3
"""Checks locks at compile time: clang with -Wthread-safety over src/ and apps/, warnings are errors.

    thread_safety.py BUILD_DIR [FILE...]

Takes each file's options from BUILD_DIR/compile_commands.json and only checks its syntax, so this
takes a fraction of a build; where the build compiles files in groups (cmake/Unity.cmake), so does
this. Mutexes and condition variables must be those of base/sync.h, which carry the annotations: clang
can't follow the standard library's, so those are refused.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("src", "apps")
SYNC = ROOT / "src/base/include/base/sync.h"
RAW = re.compile(r"\bstd::(?:recursive_|shared_|timed_|recursive_timed_|shared_timed_)?mutex\b|"
                 r"\bstd::condition_variable(?:_any)?\b|"
                 r"\bstd::(?:lock_guard|unique_lock|scoped_lock|shared_lock)\b")
CHECKS = ["-fsyntax-only", "-Wall", "-Wextra", "-Wthread-safety", "-Werror",
          "-Wno-unknown-warning-option", "-fcolor-diagnostics"]
# Parsed once for all files; most of them include most of these.
COMMON = """
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>
"""


def raw_locks() -> list[str]:
    """Every use of the standard library's locks outside of base/sync.h."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in (".cc", ".h") or path == SYNC:
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                for use in RAW.findall(line.split("//")[0]):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {use}: use the types of "
                                 "base/sync.h, whose locks clang can follow")
    return found


def options_of(entry: dict) -> list[str]:
    """The include paths, definitions and the standard of a command; what only gcc knows is left out."""
    words = entry.get("arguments") or shlex.split(entry["command"])
    out = []
    takes_value = False
    for word in words[1:]:
        if takes_value:
            out.append(word)
            takes_value = False
        elif word in ("-I", "-isystem", "-D", "-include"):
            out.append(word)
            takes_value = True
        elif word.startswith(("-I", "-D", "-std=", "-isystem", "-m")):
            out.append(word)
    return out


def check(entry: dict, parsed: list[str]) -> str:
    """What clang has to say about a file; `parsed` are the options that give it the common headers."""
    options = options_of(entry)
    if any(option.startswith("-m") for option in options):
        parsed = []  # clang refuses it for another instruction set
    command = ["clang++", *options, *CHECKS, *parsed, entry["file"]]
    done = subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True,
                          check=False)
    return done.stderr if done.returncode != 0 else ""


def main() -> int:
    build = pathlib.Path(sys.argv[1]).resolve()
    only = {str(pathlib.Path(name).resolve()) for name in sys.argv[2:]}
    problems = raw_locks()
    for problem in problems:
        print(problem)
    entries = {}
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        path = pathlib.Path(entry["directory"], entry["file"]).resolve()
        own = path.suffix == ".cc" and any(path.is_relative_to(ROOT / f) for f in FOLDERS)
        group = "Unity" in path.parts and any(path.is_relative_to(build / f) for f in FOLDERS)
        if (own or group) and (not only or str(path) in only):
            entries[path] = {**entry, "file": str(path)}
    if not entries:
        print(f"thread-safety: {build}/compile_commands.json names no source", file=sys.stderr)
        return 1
    begin = time.monotonic()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        header = pathlib.Path(folder, "common.h")
        header.write_text(COMMON, encoding="utf-8")
        parsed = f"{header}.pch"
        subprocess.run(["clang++", "-x", "c++-header", "-std=c++20", str(header), "-o", parsed],
                       check=True)
        jobs = int(os.environ.get("JOBS", os.cpu_count() or 1))
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for report in pool.map(lambda e: check(e, ["-include-pch", parsed]), entries.values()):
                if report:
                    failed += 1
                    print(report, end="")
    if problems or failed:
        print(f"thread-safety: {failed} files fail, {len(problems)} raw locks")
        return 1
    print(f"thread-safety: ok ({len(entries)} files or groups, {time.monotonic() - begin:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
