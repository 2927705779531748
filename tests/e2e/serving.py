"""What the server's tests share: a server process, plain requests, and conversations."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "demo/lighthouse.txt").read_text(encoding="utf-8")


def default_model() -> str:
    out = subprocess.run([sys.executable, str(ROOT / "scripts/third_party.py"), "model"],
                         check=True, stdout=subprocess.PIPE, text=True)
    return out.stdout.strip()


# As --device takes it; another one than the CPU may be a slow one.
DEVICE = os.environ.get("HCACHE_TEST_DEVICE") or "cpu"

# A device in software (scripts/run_on_lavapipe.sh) takes minutes for what others take seconds: it
# shows what depends on the device.
not_in_software = unittest.skipIf("HCACHE_TEST_IN_SOFTWARE" in os.environ,
                                  "depends on no device, and takes minutes on one in software")


def model_for_device(program: str, folder: str) -> str:
    """The default model; off the CPU a small one."""
    return default_model() if DEVICE == "cpu" else two_layers(program, folder)


def two_layers(program: str, folder: str) -> str:
    """Random layers of the default model's shape, with its vocabulary."""
    path = str(Path(folder) / "two-layers.gguf")
    subprocess.run([program, "model", "synth", "--shape", "smollm2-135m", "--layers", "2", "--type",
                    "q8_0", "--vocab-from", default_model(), "-o", path], check=True,
                   stderr=subprocess.DEVNULL)
    return path


# What programs of this process have measured of the machine: measuring takes longer than the rest of
# a start.
_profiles = tempfile.TemporaryDirectory()


def _add_profiles(source: str, target: str) -> None:
    for profile in Path(source).glob("*"):
        if not os.path.exists(os.path.join(target, profile.name)):
            os.makedirs(target, exist_ok=True)
            shutil.copy(profile, target)


def lend_profiles(state_dir: str) -> None:
    """Before a program starts on that folder."""
    _add_profiles(_profiles.name, os.path.join(state_dir, "profiles"))


def keep_profiles(state_dir: str) -> None:
    """After it has ended."""
    _add_profiles(os.path.join(state_dir, "profiles"), _profiles.name)


class Server:
    """`hcache serve` on a port of its own."""

    state_dir: str | None = None

    def __init__(self, program: str, *options: str, env: dict | None = None):
        if "--state-dir" in options:
            self.state_dir = options[options.index("--state-dir") + 1]
            lend_profiles(self.state_dir)
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        self.process = subprocess.Popen(
            [program, "serve", "--port", "0", *options], stdout=subprocess.PIPE, stderr=self.log,
            text=True, env={**os.environ, **(env or {})})
        line = self.process.stdout.readline()
        found = re.search(r"serving on (http://\S+)", line)
        if not found:
            self.process.wait(timeout=120)
            raise RuntimeError(f"the server did not start: {line}\n{self.errors()}")
        self.url = found.group(1)

    def errors(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def call(self, method: str, path: str, body: object = None, headers: dict | None = None):
        """(status, parsed JSON or text, headers by names in any case)."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, method=method, headers={
            "Content-Type": "application/json", **(headers or {})})
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                return self._answer(reply.status, reply)
        except urllib.error.HTTPError as error:
            return self._answer(error.code, error)

    @staticmethod
    def _answer(status: int, reply) -> tuple:
        text = reply.read().decode()
        is_json = reply.headers.get("Content-Type", "").startswith("application/json")
        return status, json.loads(text) if is_json and text else text, reply.headers

    def post(self, path: str, body: object, headers: dict | None = None) -> dict:
        status, answer, _ = self.call("POST", path, body, headers)
        if status != 200:
            raise RuntimeError(f"{path}: {status} {answer}")
        return answer

    def chat(self, messages: list, **fields) -> dict:
        return self.post("/v1/chat/completions",
                         {"messages": messages, "temperature": 0, **fields})

    def stream(self, path: str, body: object) -> list:
        """The events of a stream: (name, data) with data parsed where it is JSON."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        events = []
        with urllib.request.urlopen(request, timeout=300) as reply:
            for block in reply.read().decode().split("\n\n"):
                fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
                if "data" in fields:
                    data = fields["data"]
                    events.append((fields.get("event", ""),
                                   json.loads(data) if data.startswith("{") else data))
        return events

    def lines(self, path: str, body: object) -> list:
        """The lines of a stream of JSON."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as reply:
            if reply.headers["Content-Type"] != "application/x-ndjson":
                raise RuntimeError(f"{path}: no stream of lines: {reply.read().decode()}")
            return [json.loads(line) for line in reply]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._close()

    def _close(self) -> None:
        self.process.stdout.close()
        if self.state_dir:
            keep_profiles(self.state_dir)

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=120)
        self._close()
        return code

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.kill()
        self._close()
        self.log.close()


class OneServer(unittest.TestCase):
    """One server for all cases: they leave nothing behind that another one could see."""

    @classmethod
    def start(cls, folder: str) -> Server:
        raise NotImplementedError

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.server = cls.start(cls.folder.name)

    @classmethod
    def tearDownClass(cls):
        with cls.server:
            code = cls.server.stop()
        cls.folder.cleanup()
        assert code == 0


class Conversation:
    """A client that resends everything that was said, as chat clients do."""

    def __init__(self, number: int, rounds: int = 3):
        start = 700 * number % (len(TEXT) - 4000)
        self.questions = [TEXT[start + 350 * r:start + 350 * (r + 1)].strip() +
                          "\nSay in one sentence what this is about." for r in range(rounds)]
        self.messages: list = []
        self.answers: list = []
        self.completed = 0  # tokens of the chain when the last answer was complete
        self.cached = 0     # of what returned, how many came from saved or resident state
        self.returned = 0   # tokens that had been computed before and came back

    def done(self) -> bool:
        return len(self.answers) == len(self.questions)

    def step(self, server: Server, **fields) -> None:
        """The next round; an exception leaves everything as it was."""
        messages = self.messages + [{"role": "user", "content": self.questions[len(self.answers)]}]
        answer = server.chat(messages, max_tokens=20, **fields)
        reply = answer["choices"][0]["message"]["content"]
        usage = answer["usage"]
        self.returned += self.completed
        self.cached += min(usage["prompt_tokens_details"]["cached_tokens"], self.completed)
        self.completed = usage["prompt_tokens"] + usage["completion_tokens"] - 1
        self.messages = messages + [{"role": "assistant", "content": reply}]
        self.answers.append(reply)


def weather_questions() -> list:
    """A conversation in Ollama's words whose last question, about Bergen, even a small model answers
    with a call of the tool `weather`, as it was done before."""
    messages = []
    for city in ("Oslo", "Paris", "Rome"):
        messages += [{"role": "user", "content": f"How is the weather in {city}?"},
                     {"role": "assistant", "content": "", "tool_calls": [
                         {"function": {"name": "weather", "arguments": {"city": city}}}]}]
    return [*messages, {"role": "user", "content": "How is the weather in Bergen?"}]


# For tests that count what came back: on a fast machine or a slow disk the planner may find that
# computing so little again is faster, and then nothing comes back.
STATE_COMES_BACK = ("--save", "kv", "--restore-method", "kv")

# What a client sees when its server dies.
LOST = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


def wait_until(condition, what: str) -> None:
    """Looks so often that no machine is too slow for it; fails naming what did not come."""
    for _ in range(2400):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(f"waited in vain for {what}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class LlamaServer(Server):
    """llama-server with a model, to be asked as ours is."""

    def __init__(self, program: str, model: str | Path, *options: str, env: dict | None = None):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        self.process = subprocess.Popen([program, "-m", str(model), "--port", str(port), *options],
                                        stdout=self.log, stderr=self.log, env={**os.environ, **(env or {})})
        try:
            wait_until(self.ready, "llama-server")
        except BaseException:
            self.kill()
            raise

    def ready(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"it did not start: {last_words(self)}")
        with contextlib.suppress(OSError):
            return self.call("GET", "/health")[0] == 200
        return False

    def _close(self) -> None:
        pass


def last_words(server: Server) -> str:
    """The last telling line of what it logged."""
    lines = [line for line in server.errors().splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"GGML_ASSERT|abort|error|fail", line, re.IGNORECASE)]
    return (telling or lines or ["nothing was logged"])[-1].strip()


class Redis:
    """One redis-server, all in memory."""

    def __init__(self, *options: str):
        self.port = free_port()
        self.folder = tempfile.TemporaryDirectory()
        self.process = subprocess.Popen(
            ["redis-server", "--bind", "127.0.0.1", "--port", str(self.port), "--save", "",
             "--appendonly", "no", "--dir", self.folder.name, *options],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: self.ask("PING") == "PONG", "redis-server")

    def ask(self, *command: str) -> str:
        done = subprocess.run(["redis-cli", "-p", str(self.port), *command],
                              capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.kill()
        self.folder.cleanup()


class Cluster:
    """A Redis cluster of three masters."""

    def __init__(self, replicas: int):  # of each
        self.nodes = [Redis("--cluster-enabled", "yes", "--cluster-node-timeout", "1000",
                            "--cluster-port", str(free_port()), "--repl-diskless-sync-delay", "0")
                      for _ in range(3 * (1 + replicas))]
        subprocess.run(
            ["redis-cli", "--cluster", "create", *(f"127.0.0.1:{n.port}" for n in self.nodes),
             "--cluster-replicas", str(replicas), "--cluster-yes"],
            check=True, stdout=subprocess.DEVNULL)
        for node in self.nodes:
            wait_until(lambda node=node: "cluster_state:ok" in node.ask("CLUSTER", "INFO"), "the cluster")
        self.url = f"redis://127.0.0.1:{self.nodes[0].port},127.0.0.1:{self.nodes[1].port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for node in self.nodes:
            node.close()


def remote_of(server: Server) -> dict:
    return server.call("GET", "/v1/store")[1]["tiers"]["remote"]


def settle(server: Server) -> None:
    """Waits until all that is finished is where others see it."""
    seen = []

    def quiet() -> bool:
        seen.append(remote_of(server))
        return (len(seen) > 3 and seen[-1] == seen[-4] and seen[-1]["written_bytes"] > 0 and
                seen[-1]["backlog_requests"] == 0 and
                "\nhcache_saver_backlog_bytes 0\n" in server.call("GET", "/metrics")[1])
    wait_until(quiet, "the remote store")


def state_folder(program: str, model: str) -> tempfile.TemporaryDirectory:
    """A fresh one, with the profile for one thread, for servers that start at the same time."""
    folder = tempfile.TemporaryDirectory()
    lend_profiles(folder.name)
    if not os.listdir(_profiles.name):
        subprocess.run([program, "profile", "-m", model, "-t", "1", "--state-dir", folder.name],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        keep_profiles(folder.name)
    return folder
