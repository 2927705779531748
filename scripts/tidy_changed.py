#!/usr/bin/env python3
"""clang-tidy on what changed since a base, within so many minutes; its warnings are errors.

Each file is compiled by itself as well, without writing anything: builds that compile files in groups
(HCACHE_UNITY) do not notice what one lacks.

    tidy_changed.py BUILD_DIR [--base REVISION] [--minutes N] [--list]

Changed sources come first, then one file for each changed header, then all other files that include
one. What the time does not allow is named. Without a base: where the default branch of `origin` has
commits that this checkout lacks or the other way round, their common ancestor; on that very branch the
last few commits. What is not committed counts as changed.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Collection

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAST_COMMITS = 5  # of a checkout that is the default branch itself
FOLDERS = ("src", "apps", "tests", "bench")
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


def git(*args: str) -> str:
    """A command's output; empty where it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True,
                          check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def find_base() -> str:
    """What to compare with when nobody says."""
    head = git("rev-parse", "HEAD")
    for branch in ("origin/HEAD", "origin/main", "origin/master"):
        ancestor = git("merge-base", "HEAD", branch)
        if ancestor and ancestor != head:
            return ancestor
    for n in range(LAST_COMMITS, 0, -1):
        if git("rev-parse", "--verify", "--quiet", f"HEAD~{n}"):
            return f"HEAD~{n}"
    return EMPTY_TREE  # no history: all of it is new


def changed_since(base: str) -> set[pathlib.Path]:
    """Files that differ from the base, those that are not committed included."""
    names = git("diff", "--name-only", "--diff-filter=d", base).splitlines()
    names += git("ls-files", "--others", "--exclude-standard").splitlines()
    return {ROOT / name for name in names}


def sources_of(build: pathlib.Path) -> dict[pathlib.Path, list[str]]:
    """The project's compiled files, and how each is checked by its compiler."""
    out = {}
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        path = pathlib.Path(entry["directory"], entry["file"]).resolve()
        if not path.is_relative_to(ROOT) or "build" in path.relative_to(ROOT).parts:
            continue
        words = shlex.split(entry["command"])
        output = words.index("-o")
        out[path] = [*words[:output], *words[output + 2:], "-fsyntax-only"]
    return out


class Includes:
    """Which of the project's headers a file includes, those included by its headers too.

    A name may stand for every header whose path ends with it: too many rather than too few.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, list[pathlib.Path]] = {}
        for folder in FOLDERS:
            for path in (ROOT / folder).rglob("*.h"):
                self.by_name.setdefault(path.name, []).append(path)
        self.direct: dict[pathlib.Path, set[pathlib.Path]] = {}

    def named_in(self, path: pathlib.Path) -> set[pathlib.Path]:
        if path not in self.direct:
            names = INCLUDE.findall(path.read_text(encoding="utf-8"))
            self.direct[path] = {header for name in names
                                 for header in self.by_name.get(name.rsplit("/", 1)[-1], [])
                                 if header.as_posix().endswith("/" + name.removeprefix("../"))}
        return self.direct[path]

    def of(self, path: pathlib.Path) -> set[pathlib.Path]:
        found: set[pathlib.Path] = set()
        waiting = [path]
        while waiting:
            new = self.named_in(waiting.pop()) - found
            found |= new
            waiting += new
        return found


def in_order(changed: set[pathlib.Path], sources: Collection[pathlib.Path]) -> list[pathlib.Path]:
    """Files to check, the most telling first."""
    order = sorted(path for path in sources if path in changed)
    headers = {path for path in changed if path.suffix == ".h"}
    if not headers:
        return order
    includes = Includes()
    users = {path: includes.of(path) & headers for path in sources}
    covered = set().union(*(users[path] for path in order)) if order else set()
    rest = sorted(path for path, used in users.items() if used and path not in order)
    for header in sorted(headers - covered):
        if header in covered:
            continue
        using = [path for path in rest if header in users[path]]
        if not using:
            continue
        # A file of the header's own name, or the one that covers most of what is missing.
        best = max(using, key=lambda p: (p.stem == header.stem, len(users[p] - covered)))
        order.append(best)
        covered |= users[best]
        rest.remove(best)
    return order + rest


def check(path: pathlib.Path, build: pathlib.Path, compiler: list[str]) -> tuple[bool, str]:
    done = subprocess.run(compiler, cwd=build, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          check=False)
    if done.returncode != 0:
        return False, done.stdout
    done = subprocess.run(["clang-tidy", "--quiet", "--extra-arg=-Wno-unknown-warning-option",
                           "-p", str(build), str(path)], capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--base", default="")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--list", action="store_true", help="only say what would be checked")
    args = parser.parse_args()
    base = args.base or find_base()
    if base != EMPTY_TREE and not git("rev-parse", "--verify", "--quiet", base + "^{commit}"):
        print(f"tidy: there is no revision '{base}': name one with BASE=", file=sys.stderr)
        return 2
    build = args.build.resolve()
    sources = sources_of(build)
    files = in_order(changed_since(base), sources)
    if args.list:
        for path in files:
            print(path.relative_to(ROOT))
        return 0
    print(f"tidy: {len(files)} files changed since {base}, or include what did")
    end = time.monotonic() + 60 * args.minutes
    left_out = []
    failed = []
    lock = threading.Lock()

    def run(path: pathlib.Path) -> None:
        name = str(path.relative_to(ROOT))
        if time.monotonic() > end:
            with lock:
                left_out.append(name)
            return
        ok, report = check(path, build, sources[path])
        with lock:
            print(f"tidy: {name}", flush=True)
            if not ok:
                failed.append(name)
                print(report, flush=True)

    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("JOBS", os.cpu_count() or 1))) \
            as pool:
        list(pool.map(run, files))
    if left_out:
        print(f"tidy: left out after {args.minutes:g} minutes (make tidy-changed MINUTES=N for more): "
              f"{len(left_out)} files: {' '.join(sorted(left_out))}")
    if failed:
        print(f"tidy: {len(failed)} files fail: {' '.join(failed)}")
        return 1
    print(f"tidy: ok ({len(files) - len(left_out)} files)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
