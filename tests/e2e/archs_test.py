#!/usr/bin/env python3
"""A tiny random model of every architecture that libllama can write: `hcache serve --engine llama` against
llama-server, and against itself after a kill.

    archs_test.py HCACHE LLAMA_SERVER ARCHS              ARCHS is what `third_party.py archs` prints
    archs_test.py HCACHE LLAMA_SERVER ARCHS --only REGEX     models whose name (mamba-dense) matches
    archs_test.py HCACHE LLAMA_SERVER ARCHS --snapshot-quota 1B     with so few snapshots, here none

Both servers answer the same prompt of token ids. Then the conversation goes on, once on a server that keeps
running and once on one that was killed and started again: with the same answer, and with all but the newest
chunk of the old tokens restored. Where as much was restored as the other server still had, the likelihoods
have to be the same, too, to the last bit.

Elsewhere an answer that leaves the other where two tokens are almost equally likely is a tie, no difference.
Models that llama-server itself fails on, the four for diffusion, are listed and left out. Fails if HCache
doesn't serve one of the others, if more than four answers differ from llama-server's, or if any differs after
a kill. With --snapshot-quota less may come back.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import serving

# Of the random weights, whose usual deviation is 0.1: there an answer hardly depends on what came before its
# last tokens, and a wrong state would go unnoticed.
DEVIATION = 1.0
TOKENS = 128           # every model's vocabulary has at least so many
PROMPT, REPLY, NEW = 144, 16, 30
CHUNK = 64
TIE = 1e-3             # nats between the two likeliest tokens
MOST_DIFFERENT = 4     # from llama-server
MOST_LEFT_OUT = 4
SAVED_S = 10           # a server gets so long to save what it computed
FLUSHED_S = 0.5        # and then so long to flush it, five times --flush-interval
LIMIT_S = 60           # for each of a model's two halves

OPTIONS = ["--engine", "llama", "--device", "cpu", "-t", "1", "--ctx", "512", "--flush-interval", "100ms",
           *serving.STATE_COMES_BACK]
PEER_OPTIONS = ["-t", "1", "-c", "512", "-np", "1", "--fit", "off"]
ENVIRONMENT = {"GGML_NO_BACKTRACE": "1"}


@dataclasses.dataclass
class Outcome:
    model: str
    peer_error: str = ""   # why llama-server doesn't serve it
    error: str = ""        # why HCache doesn't
    answer: str = ""       # against llama-server's: equal, tie or differs
    restart: str = ""      # after the kill, against no kill: the same words
    old: int = 0           # tokens that were computed before the kill
    restored: int = 0      # how many of them came back
    notes: list = dataclasses.field(default_factory=list)

    def too_little(self) -> bool:
        return self.restored < self.old // CHUNK * CHUNK

    def exceptions(self) -> list[str]:
        if self.peer_error:
            return [f"not served by llama-server: {self.peer_error}"]
        return ([f"not served: {self.error}"] if self.error else []) + self.notes


class Hcache(serving.Server):
    """`hcache serve` with a model and a state folder."""

    more_options: tuple[str, ...] = ()

    def __init__(self, program: str, model: Path, state: Path):
        try:
            super().__init__(program, "-m", str(model), "--state-dir", str(state), *OPTIONS,
                             *self.more_options, env=ENVIRONMENT)
        except BaseException:  # out of time, for one
            self.kill()
            raise


@contextlib.contextmanager
def explained(server: serving.Server):
    """Ends the server; where it was lost, the exception says what it logged last."""
    with server:
        try:
            yield server
        except serving.LOST as error:
            raise RuntimeError(f"{error}: {serving.last_words(server)}") from None


@contextlib.contextmanager
def time_limit():
    def ring(*_):
        raise TimeoutError(f"took more than {LIMIT_S} s")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)


def ask(server: serving.Server, prompt: list[int], **fields) -> dict:
    return server.post("/completion", {"prompt": prompt, "n_predict": REPLY, "temperature": 0, "n_probs": 2,
                                       "return_tokens": True, **fields})


def wait_for_state(server: serving.Server, session: str, tokens: int) -> None:
    """Until so many are saved; what is missing after SAVED_S shows in the restart."""
    end = time.monotonic() + SAVED_S
    while time.monotonic() < end:
        status, answer, _ = server.call("GET", f"/v1/sessions/{session}")
        if status == 200 and answer["saved_tokens"] >= tokens:
            break
        time.sleep(0.02)
    time.sleep(FLUSHED_S)


def compare(expected: dict, answer: dict) -> tuple[str, str]:
    """equal, tie or differs; and where."""
    pairs = itertools.zip_longest(expected["tokens"], answer["tokens"])
    for place, (want, got) in enumerate(pairs):
        if want == got:
            continue
        best = expected["completion_probabilities"][place]["top_logprobs"] if want is not None else []
        gap = best[0]["logprob"] - best[1]["logprob"] if len(best) == 2 else float("inf")
        tie = {want, got} == {token["id"] for token in best} and gap < TIE
        return ("tie" if tie else "differs"), f"token {place} is {got}, not {want} ({gap:.1e} ahead)"
    return "equal", ""


def compare_restart(expected: dict, answer: dict) -> tuple[str, str]:
    if expected["timings"]["cache_n"] != answer["timings"]["cache_n"]:
        return compare(expected, answer)  # computed in other batches, so with other rounding
    if expected["completion_probabilities"] == answer["completion_probabilities"]:
        return "equal", ""
    return "differs", compare(expected, answer)[1] or "the same tokens with other likelihoods"


def ask_peer(program: str, model: Path, seed: int) -> tuple[list[int], dict]:
    """A prompt, and llama-server's answer."""
    with explained(serving.LlamaServer(program, model, *PEER_OPTIONS, env=ENVIRONMENT)) as server:
        # Some architectures abort beyond the positions that they learned.
        learned = server.call("GET", "/v1/models")[1]["data"][0]["meta"]["n_ctx_train"]
        length = min(PROMPT, learned - REPLY - NEW - REPLY)
        chosen = random.Random(f"{seed} {model.stem}")
        prompt = [chosen.randrange(TOKENS) for _ in range(length)]
        answer = ask(server, prompt)
        if not answer["tokens"]:
            raise RuntimeError("its answer is empty")
        return prompt, answer


def computed(prompt: list[int], answer: dict) -> int:
    return len(prompt) + len(answer["tokens"]) - 1  # the last one is sampled, not computed


def converse(program: str, model: Path, prompt: list[int], seed: int) -> tuple[dict, dict, dict]:
    """HCache's answer to the prompt, and those to what follows: without a kill, and after one."""
    chosen = random.Random(f"{seed} {model.stem} new")
    new = [chosen.randrange(TOKENS) for _ in range(NEW)]
    with tempfile.TemporaryDirectory() as folder:
        states = Path(folder) / "killed", Path(folder) / "kept"
        with explained(Hcache(program, model, states[0])) as killed:
            answer = ask(killed, prompt, session_id="talk")
            longer = prompt + answer["tokens"] + new
            with explained(Hcache(program, model, states[1])) as kept:
                ask(kept, prompt)
                expected = ask(kept, longer)
            wait_for_state(killed, "talk", computed(prompt, answer))
            killed.kill()
        with explained(Hcache(program, model, states[0])) as again:
            return answer, expected, ask(again, longer)


def examine(hcache: str, llama_server: str, seed: int, model: Path) -> Outcome:
    outcome = Outcome(model.stem)
    try:
        with time_limit():
            prompt, wanted = ask_peer(llama_server, model, seed)
    except (RuntimeError, OSError) as error:
        outcome.peer_error = brief(error)
        return outcome
    try:
        with time_limit():
            answer, expected, again = converse(hcache, model, prompt, seed)
    except (RuntimeError, OSError) as error:
        outcome.error = brief(error)
        return outcome
    outcome.answer, where = compare(wanted, answer)
    if where:
        outcome.notes.append(f"{outcome.answer} from llama-server: {where}")
    outcome.restart, where = compare_restart(expected, again)
    if where:
        outcome.notes.append(f"{outcome.restart} after the kill: {where}")
    outcome.old = computed(prompt, answer)
    outcome.restored = again["timings"]["cache_n"]
    if outcome.too_little() and not Hcache.more_options:
        outcome.notes.append(f"only {outcome.restored} of {outcome.old} tokens came back after the kill")
    return outcome


def brief(error: Exception) -> str:
    """Its last line, where a failing server says why."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]


def report(outcomes: list[Outcome]) -> int:
    peers = [outcome for outcome in outcomes if not outcome.peer_error]
    served = [outcome for outcome in peers if not outcome.error]
    answers = Counter(outcome.answer for outcome in served)
    restarts = Counter(outcome.restart for outcome in served)
    little = sum(outcome.too_little() for outcome in served)
    rows = [("models", len(outcomes)), ("served by llama-server", len(peers)),
            ("of these by hcache", len(served)),
            *((f"  answer, against llama-server's: {word}", answers[word])
              for word in ("equal", "tie", "differs")),
            *((f"  answer after a kill, against none: {word}", restarts[word])
              for word in ("equal", "tie", "differs")),
            ("  too little restored after a kill", little)]
    for name, count in rows:
        print(f"{name:46} {count:4}")
    for outcome in outcomes:
        for exception in outcome.exceptions():
            print(f"{outcome.model}: {exception}")
    enough = not little or bool(Hcache.more_options)
    good = (served and len(served) == len(peers) >= len(outcomes) - MOST_LEFT_OUT
            and answers["differs"] <= MOST_DIFFERENT and not restarts["differs"] and enough)
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hcache", metavar="HCACHE")
    parser.add_argument("llama_server", metavar="LLAMA_SERVER")
    parser.add_argument("archs", metavar="ARCHS", help="the program that writes the models")
    parser.add_argument("--seed", type=int, default=1, help="of weights and prompts")
    parser.add_argument("--only", metavar="REGEX", default="", help="models whose name matches")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every model's outcome here")
    parser.add_argument("--jobs", metavar="N", type=int, default=2, help="models at a time")
    parser.add_argument("--snapshot-quota", metavar="BYTES", help="given to `hcache serve`")
    args = parser.parse_args()
    if args.snapshot_quota:
        Hcache.more_options = ("--snapshot-quota", args.snapshot_quota)
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run([args.archs, "-o", folder, "-s", str(args.seed), "-d", str(DEVIATION)],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                              check=False)
        if made.returncode != 0:
            print(made.stdout[-4000:], file=sys.stderr)
            return 1
        models = sorted(path for path in Path(folder).glob("*.gguf") if re.search(args.only, path.stem))
        look = functools.partial(examine, args.hcache, args.llama_server, args.seed)
        # Processes, since an alarm rings in a process's main thread alone.
        with concurrent.futures.ProcessPoolExecutor(args.jobs) as pool:
            for outcome in pool.map(look, models):
                outcomes.append(outcome)
                print(f"{len(outcomes)}/{len(models)} {outcome.model}", "; ".join(outcome.exceptions()),
                      flush=True)
    if args.json:
        result = {"seed": args.seed, "models": [dataclasses.asdict(outcome) for outcome in outcomes]}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return report(outcomes)


if __name__ == "__main__":
    sys.exit(main())
