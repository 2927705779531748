"""The cache of what is built or fetched once: its folder, its locks, and runs of long commands."""

import contextlib
import fcntl
import hashlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path


class Failure(Exception):
    """What the user is told; the message names the remedy where there is one."""


def say(text):
    print(text, file=sys.stderr, flush=True)


class Progress:
    """One line on stderr: rewritten on a terminal, printed every ten seconds elsewhere."""

    def __init__(self, title):
        self.title = title
        self.start = time.monotonic()
        self.printed = self.start - 10
        self.tty = sys.stderr.isatty()

    def update(self, text):
        now = time.monotonic()
        line = f"{self.title}: {text} ({now - self.start:.0f} s)"
        if self.tty and now - self.printed >= 0.1:
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
            self.printed = now
        elif not self.tty and now - self.printed >= 10:
            say(line)
            self.printed = now

    def done(self):
        if self.tty:
            print("\r\033[K", end="", file=sys.stderr)
        say(f"{self.title}: done in {time.monotonic() - self.start:.0f} s")


def cache_dir():
    chosen = os.environ.get("HCACHE_CACHE_DIR")
    if not chosen:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        chosen = Path(base) / "hcache"
    path = Path(chosen).expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def locked(name):
    """Holds the cache's lock of that name; waits, and says so, while another build holds it."""
    with open(cache_dir() / f".{name}.lock", "w", encoding="ascii") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{name}: waiting for another build that holds the cache")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def run_logged(command, log, progress, env=None, cwd=None):
    """Runs a command into the log; ninja's [done/total] becomes the progress line."""
    with open(log, "ab") as sink:
        sink.write(("$ " + " ".join(map(str, command)) + "\n").encode())
        sink.flush()
        begin = sink.tell()
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=env,
                                   cwd=cwd)
        state = "working"
        try:
            while process.poll() is None:
                time.sleep(0.2)
                with open(log, "rb") as source:
                    source.seek(max(begin, os.path.getsize(log) - 4096))
                    if steps := re.findall(rb"\[(\d+/\d+)\]", source.read()):
                        state = steps[-1].decode()
                progress.update(state)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode != 0:
        lines = Path(log).read_text(encoding="utf-8", errors="replace").splitlines()
        shown = "\n".join("  " + line for line in lines[-40:])
        raise Failure(f"{progress.title} failed; the end of {log}:\n{shown}")
