"""What the benchmark scripts share: finding programs, running them, and honest statistics."""

import argparse
import contextlib
import json
import mmap
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--model", help="GGUF model (default: the one `make` fetches)")
    parser.add_argument("--program", default=ROOT / "build/release/bin/hcache", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", default=ROOT / "build/bench", type=Path,
                        help="folder for models, stores and logs (default: build/bench)")
    parser.add_argument("--json", dest="json_file", type=Path, help="write the results here")
    parser.add_argument("--quick", action="store_true",
                        help="tiny settings: proves that the script works, measures nothing")


QUICK_SHAPE = "smollm2-135m"  # of the random-weight models of --quick; llama.cpp must read it too
QUICK_LAYERS = 2


def default_model() -> str:
    return third_party("model")[0]


def third_party(*args: str) -> list[str]:
    out = subprocess.run([sys.executable, str(ROOT / "scripts/third_party.py"), *args],
                         check=True, stdout=subprocess.PIPE, text=True)
    return out.stdout.split()


def peer_programs(device: str) -> dict[str, Path]:
    """llama.cpp's programs by their names, built for this kind of device: those in HCACHE_PEER_DIR, where
    they were built on another machine, or else of `make peer`."""
    if folder := os.environ.get("HCACHE_PEER_DIR"):
        return {path.name: path for path in Path(folder).iterdir()}
    options = []
    if device.startswith("cuda"):
        options = ["--cuda", os.environ.get("HCACHE_CUDA_ARCHS", "90")]
    elif device.startswith("vulkan"):
        options = ["--vulkan"]
    return {path.name: path for path in map(Path, third_party("peer", *options))}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Hcache:
    """Runs our program with the options that all of its benchmarks have in common."""

    def __init__(self, args: argparse.Namespace):
        self.program = str(args.program)
        self.common = ["--device", args.device, "--state-dir", str(args.work / "state")]
        self.threads = ["--threads", str(args.threads)]
        args.work.mkdir(parents=True, exist_ok=True)

    def command(self, verb: list[str], options: list[str]) -> list[str]:
        return [self.program, *verb, *self.common, *self.threads, *options]

    def bench(self, what: str, *options: object) -> dict:
        """`hcache bench WHAT`; its results."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "results.json"
            command = self.command(["bench", what], [*map(str, options), "--json", str(out)])
            say("+ " + " ".join(command))
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            return json.loads(out.read_text())

    def measure_costs(self, model: object) -> None:
        """Measures the machine's costs anew: what was measured when it was busy stays wrong."""
        command = self.command(["profile"], ["-m", str(model), "--refresh"])
        say("+ " + " ".join(command))
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def run(self, *command: object) -> str:
        """Any other verb; what it prints."""
        full = [self.program, *map(str, command)]
        say("+ " + " ".join(full))
        return subprocess.run(full, check=True, stdout=subprocess.PIPE, text=True).stdout


class Paced:
    """A benchmark of ours that does one repetition at a time, when told to."""

    def __init__(self, hcache: Hcache, what: str, *options: object):
        self._folder = tempfile.TemporaryDirectory()  # gone with this object
        self._out = Path(self._folder.name) / "results.json"
        command = hcache.command(["bench", what],
                                 [*map(str, options), "--paced", "--json", str(self._out)])
        say("+ " + " ".join(command))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         text=True)
        self._wait()

    def _wait(self) -> None:
        for line in self._process.stdout:
            if line.strip() == "ready":
                return

    def turn(self) -> None:
        """Lets one repetition run and waits for its end."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._wait()
        if self._process.poll() not in (None, 0):
            raise RuntimeError("hcache failed; its message stands above")

    def results(self) -> dict:
        self._process.stdin.close()
        self._process.stdout.read()
        if self._process.wait() != 0:
            raise RuntimeError("hcache failed; its message stands above")
        return json.loads(self._out.read_text())


def median(values: list[float]) -> float:
    return statistics.median(values)


def percentile(values: list[float], p: float) -> float:
    """The p-th percentile (0 to 100), interpolated between neighbours as `hcache bench serve` does."""
    ordered = sorted(values)
    at = p / 100 * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


PERCENTILES = (50, 90, 99)


def percentiles(values: list[float], prefix: str) -> dict[str, float]:
    """{"<prefix>_p50_ms", "<prefix>_p90_ms", "<prefix>_p99_ms"} of milliseconds."""
    return {f"{prefix}_p{p}_ms": percentile(values, p) for p in PERCENTILES}


def lower_bound(values: list[float], confidence: float = 0.95, draws: int = 10000) -> float:
    """One-sided lower confidence bound of the median, by bootstrap (seeded: reproducible)."""
    if len(values) < 2:
        return values[0]
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(draws))
    return medians[int((1 - confidence) * draws)]


def compare(name: str, ours: list[float], theirs: list[float]) -> dict:
    """Ratio ours / theirs of paired samples."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {"name": name, "ours": median(ours), "theirs": median(theirs),
            "ratio": median(ratios), "lower_bound": lower_bound(ratios), "pairs": len(ratios)}


CGROUPS = Path("/sys/fs/cgroup/memory")
READ_BYTES = 1 << 20
READ_DEPTH = 6  # as the reader of weights has it


def disk_rate(path: Path) -> float:
    """Bytes/s of direct reads of the whole file, as many at a time as streamed weights have."""
    size = path.stat().st_size // READ_BYTES * READ_BYTES
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffers = [mmap.mmap(-1, READ_BYTES) for _ in range(READ_DEPTH)]

    def lane(index: int) -> None:
        for at in range(index * READ_BYTES, size, READ_DEPTH * READ_BYTES):
            os.preadv(fd, [buffers[index]], at)

    start = time.monotonic()
    with ThreadPoolExecutor(READ_DEPTH) as pool:
        list(pool.map(lane, range(READ_DEPTH)))
    seconds = time.monotonic() - start
    os.close(fd)
    return size / seconds


@contextlib.contextmanager
def memory_group(limit_gib: str | None, model: Path):
    """A command's prefix that puts it into a control group (version 1) of so much memory, page cache
    counted. The model leaves the page cache first: the group does not pay for pages that others
    brought there."""
    if limit_gib is None:
        yield []
        return
    drop_from_cache(model)
    group = CGROUPS / f"hcache-bench-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(int(float(limit_gib) * (1 << 30))))
    try:
        yield ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', group]
    finally:
        for _ in range(100):  # until the last process has left it
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def drop_from_cache(path: Path) -> None:
    """Throws a file out of the page cache, so that the next read comes from the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def write_results(path: Path | None, results: dict) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    say(f"written: {path}")


def table(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, ["-" * w for w in widths], *rows]:
        cells = [str(row[0]).ljust(widths[0])]
        cells += [str(cell).rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def slug(machine: dict) -> str:
    device = machine["cpu"] if machine["device"] == machine["cpu"] else machine["device"]
    text = f"{device} {machine['threads']} threads"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def conclude(args: argparse.Namespace, bars, suffix: str = "") -> None:
    """Writes what was measured, and ends the program: 1 if a bar was missed, or, with --quick, which
    measures nothing, if one could not be measured."""
    folder = args.work if args.quick else ROOT / "bench/results"
    out = args.json_file or folder / f"{slug(bars.machine)}{suffix}.json"
    write_results(out, {"machine": bars.machine, "quick": args.quick, "rows": bars.rows,
                        "details": bars.details})
    missed = [r for r in bars.rows if r["pass"] is False]
    sys.exit(1 if any(r["measured"] is None or not args.quick for r in missed) else 0)


class Text:
    """Messages of about so many tokens each, all different."""

    def __init__(self):
        self.text = Path(third_party("texts")[0]).read_text(encoding="utf-8")
        self.at = 0

    def take(self, tokens: int) -> str:
        n = int(4.2 * tokens)  # bytes of a token of this text and vocabulary, about
        self.at = (self.at + n) % (len(self.text) - n)
        return self.text[self.at:self.at + n]
