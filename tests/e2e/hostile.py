"""A crowd of clients, most of them rude: they hang up, announce more than they send, talk nonsense.

Shared by hostile_test.py and bench/serve_bars.py. What each client does follows from the seed; how
they meet at the server does not.
"""

import collections
import concurrent.futures
import http.client
import json
import random
import re
import socket
import struct
import threading
import urllib.request

PATIENCE = 300  # seconds until a request is stuck rather than slow
MAX_TOKENS = 8
SUBJECTS = ("a lighthouse", "the tide", "a green book", "nine boats", "the harbour", "old maps",
            "a long winter", "the night watch", "a broken lamp", "the north wind", "salt", "ropes")

# What is no request for an answer. The server says 400 to each.
WRONG_FIELDS = (
    {}, [], 5, None, {"messages": []}, {"messages": "hi"}, {"messages": [5]},
    {"messages": [{"role": "user", "content": {"text": 1}}]},
    {"messages": [{"role": "user", "content": "x"}], "temperature": "hot"},
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1e300},
    {"messages": [{"role": "user", "content": "x"}], "stop": [1]},
    {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"x": "1"}},
    {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "poem"}},
    {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
)
WRONG_HTTP = (
    b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET /\r\n\r\n",
    b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
)


def question(subject: str) -> dict:
    """The body of a request with one right answer."""
    return {"messages": [{"role": "user", "content": f"Write a sentence about {subject}."}],
            "max_tokens": MAX_TOKENS, "temperature": 0}


class Crowd:
    """Clients of one server. `answers`, if given, are the right ones by subject; else the first
    answer to each question is held to be right."""

    def __init__(self, url: str, seed: int, answers: dict | None = None):
        self.host, port = re.fullmatch(r"http://([\d.]+):(\d+)", url).groups()
        self.port = int(port)
        self.seed = seed
        self.answers = dict(answers or {})
        self.lock = threading.Lock()
        self.done: collections.Counter = collections.Counter()
        self.failures: list[str] = []

    def run(self, requests: int, connections: int) -> None:
        """Sends them all; what went wrong is in `failures`."""
        with concurrent.futures.ThreadPoolExecutor(connections) as pool:
            for number in range(requests):
                pool.submit(self._one, number)

    def _one(self, number: int) -> None:
        dice = random.Random(self.seed * 1_000_003 + number)
        acts = list(self.ACTS)
        # Each comes at least once, whatever the seed.
        act = (acts[number] if number < len(acts)
               else dice.choices(acts, list(self.ACTS.values()))[0])
        name = act.__name__
        try:
            act(self, dice)
        except Exception as error:  # every one of them is a finding
            with self.lock:
                self.failures.append(f"{number}, {name}: {type(error).__name__}: {error}")
        with self.lock:
            self.done[name] += 1

    # ---- Tools

    def _connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=PATIENCE)

    def _post(self, body: bytes, path: str = "/v1/chat/completions",
              content_type: str = "application/json") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)
        try:
            connection.request("POST", path, body, {"Content-Type": content_type})
            with connection.getresponse() as reply:
                return reply.status, reply.read()
        finally:
            connection.close()

    def _send_raw(self, sock: socket.socket, body: bytes, length: int | None = None) -> None:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                     b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" %
                     (len(body) if length is None else length) + body)

    @staticmethod
    def _status_of(sock: socket.socket) -> int | None:
        """The answer's status; None where the server just closed. Reads to the end of the line."""
        line = b""
        try:
            while b"\r\n" not in line:
                piece = sock.recv(256)
                if not piece:
                    break
                line += piece
        except ConnectionResetError:
            pass
        found = re.match(rb"HTTP/1\.1 (\d{3}) ", line)
        return int(found.group(1)) if found else None

    @staticmethod
    def _hang_up(sock: socket.socket, dice: random.Random) -> None:
        if dice.random() < 0.5:  # a reset instead of an orderly end
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()

    def _expect(self, what: str, got: object, *wanted: object) -> None:
        if got not in wanted:
            raise AssertionError(f"{what}: got {got!r}, expected one of {wanted!r}")

    def _right(self, subject: str, text: str) -> None:
        with self.lock:
            right = self.answers.setdefault(subject, text)
        self._expect(subject, text, right)

    # ---- Clients who behave

    def ask(self, dice: random.Random) -> None:
        subject = dice.choice(SUBJECTS)
        status, body = self._post(json.dumps(question(subject)).encode())
        self._expect("status", status, 200)
        self._right(subject, json.loads(body)["choices"][0]["message"]["content"])

    def ask_for_a_stream(self, dice: random.Random) -> None:
        subject = dice.choice(SUBJECTS)
        status, body = self._post(json.dumps({**question(subject), "stream": True}).encode())
        self._expect("status", status, 200)
        events = [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]
        self._expect("last event", events.pop(), "[DONE]")
        self._right(subject, "".join(choice["delta"].get("content") or ""
                                     for event in events
                                     for choice in json.loads(event)["choices"]))

    def ask_slowly(self, dice: random.Random) -> None:
        """The body comes in pieces, and in a chunked coding."""
        subject = dice.choice(SUBJECTS)
        body = json.dumps(question(subject)).encode()
        size = dice.randint(1, 60)
        pieces = (body[i:i + size] for i in range(0, len(body), size))
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)
        connection.request("POST", "/v1/chat/completions", pieces,
                           {"Content-Type": "application/json"}, encode_chunked=True)
        with connection.getresponse() as reply:
            self._expect("status", reply.status, 200)
            self._right(subject,
                        json.loads(reply.read())["choices"][0]["message"]["content"])
        connection.close()

    # ---- Clients who leave

    def leave_a_stream(self, dice: random.Random) -> None:
        body = {**question(dice.choice(SUBJECTS)), "stream": True, "max_tokens": 400,
                "ignore_eos": True}
        sock = self._connect()
        self._send_raw(sock, json.dumps(body).encode())
        wanted = dice.randint(1, 3000)
        while wanted > 0:
            piece = sock.recv(wanted)
            if not piece:
                raise AssertionError("the stream ended before the client left")
            wanted -= len(piece)
        self._hang_up(sock, dice)

    def leave_at_once(self, dice: random.Random) -> None:
        sock = self._connect()
        self._send_raw(sock, json.dumps({**question(dice.choice(SUBJECTS)), "max_tokens": 400,
                                         "n": dice.randint(1, 3)}).encode())
        self._hang_up(sock, dice)

    def leave_within_the_body(self, dice: random.Random) -> None:
        body = json.dumps(question(dice.choice(SUBJECTS))).encode()
        sock = self._connect()
        self._send_raw(sock, body[:dice.randrange(len(body))], len(body))
        self._hang_up(sock, dice)

    # ---- Clients who talk nonsense

    def send_broken_json(self, dice: random.Random) -> None:
        body = json.dumps(question(dice.choice(SUBJECTS))).encode()
        broken = dice.choice((body[:dice.randrange(len(body))], body + b"}", b"\xff\xfe" + body,
                              b"[" * dice.randint(1, 100_000), dice.randbytes(200)))
        self._expect("status", self._post(broken)[0], 400)

    def send_wrong_fields(self, dice: random.Random) -> None:
        status, body = self._post(json.dumps(dice.choice(WRONG_FIELDS)).encode())
        self._expect("status", status, 400)
        if not json.loads(body)["error"]["message"]:
            raise AssertionError("the error says nothing")

    def send_broken_form(self, dice: random.Random) -> None:
        """An upload that is torn, has another boundary, or is for no batch."""
        good = (b"--b\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--b\r\n"
                b"Content-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\nx\r\n--b--")
        broken = dice.choice((good[:dice.randrange(len(good))], good.replace(b"--b", b"--c"),
                              good.replace(b"name=", b"nome="), good.replace(b"batch", b"vision"),
                              dice.randbytes(300)))
        self._expect("status", self._post(broken, "/v1/files",
                                          "multipart/form-data; boundary=b")[0], 400)

    def send_broken_http(self, dice: random.Random) -> None:
        with self._connect() as sock:
            sock.sendall(dice.choice(WRONG_HTTP))
            sock.shutdown(socket.SHUT_WR)
            self._expect("status", self._status_of(sock), 400, 505, None)

    def announce_too_much(self, dice: random.Random) -> None:
        with self._connect() as sock:
            self._send_raw(sock, b"{", 10 ** dice.randint(10, 15))
            self._expect("status", self._status_of(sock), 413)

    def ask_too_much(self, dice: random.Random) -> None:
        body = question("boats " * 20_000)
        self._expect("status", self._post(json.dumps(body).encode())[0], 400)

    def ask_for_nothing_there_is(self, dice: random.Random) -> None:
        path = dice.choice(("/nothing", "/v1/chat", "/../x", "/%2e%2e/x", "/" + "a" * 3000))
        self._expect("status", self._post(b"{}", path)[0], 400, 404)
        self._expect("status", self._post(b"{}", "/v1/models")[0], 405)

    ACTS = {ask: 12, ask_for_a_stream: 10, ask_slowly: 6, leave_a_stream: 14, leave_at_once: 12,
            leave_within_the_body: 8, send_broken_json: 10, send_wrong_fields: 10,
            send_broken_form: 4, send_broken_http: 8, announce_too_much: 4, ask_too_much: 2,
            ask_for_nothing_there_is: 4}


def metrics(url: str) -> dict[str, float]:
    """What /metrics says, by the name with its labels."""
    with urllib.request.urlopen(url + "/metrics", timeout=PATIENCE) as reply:
        lines = [line for line in reply.read().decode().splitlines() if line[:1] not in ("", "#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def busy(figures: dict[str, float]) -> dict[str, float]:
    """Of these metrics: what is above 0 although the server has nothing to do."""
    return {name: value for name, value in figures.items()
            if value > 0 and (name.startswith("hcache_requests{") or
                              name == 'hcache_arena_cells{use="active"}')}
