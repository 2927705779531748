"""Servers under load, ours and llama-server: started, watched, killed and started again."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import benchlib as lib

START_S = 600  # a first start loads the model


class Server:
    """A server process on a port that stays its own over restarts."""

    def __init__(self, name: str, command: list, log: Path):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._command = [*map(str, command), "--host", "127.0.0.1", "--port", str(port)]
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        lib.say("+ " + " ".join(self._command))
        with open(self.log, "a", encoding="utf-8") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended; see {self.log}")
            with contextlib.suppress(OSError):
                self.text("/health")
                return
            time.sleep(0.05)
        raise RuntimeError(f"{self.name} does not answer; see {self.log}")

    def kill(self) -> None:
        """As a crash would; nothing can be written any more."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def text(self, path: str) -> str:
        """The body of a GET. OSError: no answer, or none with status 200."""
        with urllib.request.urlopen(self.url + path, timeout=60) as reply:
            return reply.read().decode()

    def post(self, path: str, body: dict, timeout_s: float = 60) -> dict:
        """The JSON that answers a POST of some. OSError: no answer, or none with status 200."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            return json.load(reply)

    def resident_bytes(self) -> int:
        fields = Path(f"/proc/{self._process.pid}/statm").read_text(encoding="utf-8").split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()


def hcache(args, folder: Path, ctx: int, slots: int, dram_mib: int, *options) -> Server:
    """Ours, with its state in `folder`: new but for the costs that Hcache.measure_costs() found."""
    for known in ("profiles", "digests"):
        if (args.work / "state" / known).exists():
            shutil.copytree(args.work / "state" / known, folder / known, dirs_exist_ok=True)
    return Server("hcache", [args.program, "serve", "-m", args.model, "--device", args.device,
                             "-t", args.threads, "--ctx", ctx, "--parallel", slots, "--dram",
                             f"{dram_mib}MiB", "--state-dir", folder, *options],
                  args.work / "hcache.log")


def llama_server(args, ctx: int, slots: int, cache_mib: int) -> Server:
    return Server("llama-server", [args.llama_server, "-m", args.model, "-t", args.threads, "-c",
                                   ctx, "-np", slots, "--cache-ram", cache_mib],
                  args.work / "llama-server.log")
