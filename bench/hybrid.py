#!/usr/bin/env python3
"""Conversations with a hybrid model that come back after a restart, against llama-server.

    bench/hybrid.py                     4,096 tokens, five conversations
    bench/hybrid.py --quick             tiny settings: proves the script, measures nothing

The model has the shape of Qwen3-Next-80B-A3B: three layers with recurrent state (gated delta net), then
one with attention, and random weights in F16. To fit, it has four layers of the 48, 64 experts of the
512 and a vocabulary of 128 tokens; all widths, and the ten experts that a token takes, are the real ones.
It runs on libllama in both servers.

Each server holds the conversations, is killed (SIGKILL) when what it saves is written, starts again, and
is sent each conversation with some new tokens: the time until the first token of the answer is measured.
llama-server has no state left and computes it all; hcache restores rows and the last snapshot. Both must
give the answers that they give without a kill.
"""

import argparse
import array
import random
import struct
import tempfile
import time
from pathlib import Path

import benchlib as lib
import servers

LEAST_FASTER = 10
NEW = 50      # tokens of the next message
REPLY = 16
VOCABULARY = 128
SETTLE_S = 3  # thrice the interval at which state is flushed
WAIT_S = 600  # for an answer
U32, F32, STRING, ARRAY, I32 = 4, 6, 8, 9, 5  # types of values in GGUF
AS_F32, AS_F16 = 0, 1                         # of tensors


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    lib.add_common_options(parser)
    parser.add_argument("--tokens", type=int, default=4096, help="of a conversation")
    parser.add_argument("--conversations", type=int, default=5)
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.conversations = 256, 1
    args.llama_server = lib.peer_programs(args.device)["llama-server"]
    args.work.mkdir(parents=True, exist_ok=True)
    return args


# ---- The model ------------------------------------------------------------------------------------


class Shape:
    """Qwen3-Next-80B-A3B's numbers, but for layers, experts and vocabulary."""

    def __init__(self, quick: bool):
        self.layers, self.interval = 4, 4  # the last of every so many has attention
        self.width = 256 if quick else 2048
        self.heads, self.kv_heads, self.head = (4, 2, 64) if quick else (16, 2, 256)
        self.state, self.kernel = 64 if quick else 128, 4
        self.key_heads, self.value_heads = (2, 4) if quick else (16, 32)
        self.experts, self.experts_used, self.expert_width = (8, 2, 64) if quick else (64, 10, 512)

    def values(self) -> list:
        p = "qwen3next."
        return [
            ("general.architecture", STRING, "qwen3next"), ("general.name", STRING, "random"),
            (p + "block_count", U32, self.layers), (p + "context_length", U32, 32768),
            (p + "embedding_length", U32, self.width), (p + "feed_forward_length", U32, self.expert_width),
            (p + "attention.head_count", U32, self.heads),
            (p + "attention.head_count_kv", U32, self.kv_heads),
            (p + "attention.key_length", U32, self.head), (p + "attention.value_length", U32, self.head),
            (p + "attention.layer_norm_rms_epsilon", F32, 1e-6),
            (p + "rope.dimension_count", U32, self.head // 4), (p + "rope.freq_base", F32, 1e7),
            (p + "full_attention_interval", U32, self.interval),
            (p + "expert_count", U32, self.experts), (p + "expert_used_count", U32, self.experts_used),
            (p + "expert_feed_forward_length", U32, self.expert_width),
            (p + "expert_shared_feed_forward_length", U32, self.expert_width),
            (p + "ssm.conv_kernel", U32, self.kernel), (p + "ssm.state_size", U32, self.state),
            (p + "ssm.group_count", U32, self.key_heads), (p + "ssm.time_step_rank", U32, self.value_heads),
            (p + "ssm.inner_size", U32, self.state * self.value_heads),
            ("tokenizer.ggml.model", STRING, "test"),
            ("tokenizer.ggml.tokens", ARRAY, (STRING, [f"t{i}" for i in range(VOCABULARY)])),
            ("tokenizer.ggml.scores", ARRAY, (F32, [0.0] * VOCABULARY)),
            ("tokenizer.ggml.token_type", ARRAY, (I32, [1] * VOCABULARY)),
        ]

    def tensors(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """Name, type and dimensions, the fastest first."""
        d, ff = self.width, self.expert_width
        keys, values = self.state * self.key_heads, self.state * self.value_heads
        out = [("token_embd.weight", AS_F16, (d, VOCABULARY)), ("output_norm.weight", AS_F32, (d,)),
               ("output.weight", AS_F16, (d, VOCABULARY))]
        for i in range(self.layers):
            b = f"blk.{i}."
            out += [(b + "attn_norm.weight", AS_F32, (d,)), (b + "post_attention_norm.weight", AS_F32, (d,))]
            if (i + 1) % self.interval == 0:
                out += [(b + "attn_q.weight", AS_F16, (d, 2 * self.head * self.heads)),
                        (b + "attn_k.weight", AS_F16, (d, self.head * self.kv_heads)),
                        (b + "attn_v.weight", AS_F16, (d, self.head * self.kv_heads)),
                        (b + "attn_output.weight", AS_F16, (self.head * self.heads, d)),
                        (b + "attn_q_norm.weight", AS_F32, (self.head,)),
                        (b + "attn_k_norm.weight", AS_F32, (self.head,))]
            else:
                out += [(b + "attn_qkv.weight", AS_F16, (d, 2 * keys + values)),
                        (b + "attn_gate.weight", AS_F16, (d, values)),
                        (b + "ssm_conv1d.weight", AS_F32, (self.kernel, 2 * keys + values)),
                        (b + "ssm_dt.bias", AS_F32, (self.value_heads,)),
                        (b + "ssm_a", AS_F32, (self.value_heads,)),
                        (b + "ssm_ba.weight", AS_F16, (d, 2 * self.value_heads)),
                        (b + "ssm_norm.weight", AS_F32, (self.state,)),
                        (b + "ssm_out.weight", AS_F16, (values, d))]
            out += [(b + "ffn_gate_inp.weight", AS_F32, (d, self.experts)),
                    (b + "ffn_gate_exps.weight", AS_F16, (d, ff, self.experts)),
                    (b + "ffn_up_exps.weight", AS_F16, (d, ff, self.experts)),
                    (b + "ffn_down_exps.weight", AS_F16, (ff, d, self.experts)),
                    (b + "ffn_gate_inp_shexp.weight", AS_F32, (d,)),
                    (b + "ffn_gate_shexp.weight", AS_F16, (d, ff)),
                    (b + "ffn_up_shexp.weight", AS_F16, (d, ff)),
                    (b + "ffn_down_shexp.weight", AS_F16, (ff, d))]
        return out


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def value(kind: int, what) -> bytes:
    if kind == STRING:
        return string(what)
    if kind == ARRAY:
        item, items = what
        return struct.pack("<IQ", item, len(items)) + b"".join(value(item, one) for one in items)
    return struct.pack({U32: "<I", I32: "<i", F32: "<f"}[kind], what)


class Weights:
    """Random numbers: a block of normal ones, taken from another place for every tensor."""

    BLOCK = 1 << 20

    def __init__(self):
        self.chosen = random.Random(1)
        drawn = [self.chosen.gauss(0, 1) for _ in range(self.BLOCK)]
        self.normal = drawn

    def block(self, name: str, kind: int, fan_in: int) -> bytes:
        if name.endswith("norm.weight"):
            return array.array("f", [1.0] * 4096).tobytes()
        if name.endswith("ssm_a"):  # the state decays
            return array.array("f", [-abs(x) for x in self.normal[:4096]]).tobytes()
        scale = 1 / max(fan_in, 16) ** 0.5
        if kind == AS_F32:
            return array.array("f", [x * scale for x in self.normal[:1 << 16]]).tobytes()
        return struct.pack(f"<{self.BLOCK}e", *(x * scale for x in self.normal))

    def write(self, out, block: bytes, n_bytes: int, size: int) -> None:
        at = self.chosen.randrange(len(block) // size) * size
        while n_bytes > 0:
            piece = block[at:at + n_bytes]
            out.write(piece)
            n_bytes -= len(piece)
            at = 0


def write_model(path: Path, shape: Shape) -> None:
    values, tensors = shape.values(), shape.tensors()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    head += b"".join(string(key) + struct.pack("<I", kind) + value(kind, what) for key, kind, what in values)
    offset = 0
    sizes = []
    for name, kind, dims in tensors:
        head += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        n_bytes = 2 if kind == AS_F16 else 4
        for n in dims:
            n_bytes *= n
        sizes.append(n_bytes)
        offset += (n_bytes + 31) // 32 * 32
    weights, blocks = Weights(), {}
    scratch = path.with_suffix(".new")
    with open(scratch, "wb") as out:
        out.write(head + bytes(-len(head) % 32))
        for (name, kind, dims), n_bytes in zip(tensors, sizes, strict=True):
            special = name.endswith("norm.weight") or name.endswith("ssm_a")
            key = (name.split(".")[-1] if special else "", kind, dims[0])
            if key not in blocks:
                blocks[key] = weights.block(name, kind, dims[0])
            weights.write(out, blocks[key], n_bytes, 2 if kind == AS_F16 else 4)
            out.write(bytes(-n_bytes % 32))
    scratch.rename(path)


# ---- The measurement ------------------------------------------------------------------------------


def ask(server: servers.Server, prompt: list[int], n_reply: int) -> dict:
    return server.post("/completion", {"prompt": prompt, "n_predict": n_reply, "temperature": 0,
                                       "return_tokens": True}, WAIT_S)


def come_back(server: servers.Server, prompts: list[list[int]], new: list[int]) -> list[dict]:
    """For each conversation: how long the first token took after a restart, what was cached, and
    whether the answer is the one without it."""
    talks = []
    with server:
        for prompt in prompts:
            longer = prompt + ask(server, prompt, REPLY)["tokens"] + new
            talks.append({"prompt": longer, "expected": ask(server, longer, REPLY)["tokens"]})
        time.sleep(SETTLE_S)
        server.kill()
        server.start()
        for talk in talks:
            begin = time.monotonic()
            first = ask(server, talk["prompt"], 1)
            talk["first_ms"] = 1000 * (time.monotonic() - begin)
            talk["cached"] = first["timings"]["cache_n"]
            talk["same"] = ask(server, talk["prompt"], REPLY)["tokens"] == talk["expected"]
            lib.say(f"{server.name}: {talk['cached']} of {len(talk['prompt'])} tokens cached, first token "
                    f"after {talk['first_ms']:.0f} ms, {'the same' if talk['same'] else 'ANOTHER'} answer")
    return talks


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def main() -> None:
    args = parse()
    args.model = args.work / f"hybrid-{'quick' if args.quick else 'qwen3next'}.gguf"
    if not args.model.exists():
        lib.say(f"writing {args.model}")
        write_model(args.model, Shape(args.quick))
    chosen = random.Random(2)
    prompts = [[chosen.randrange(VOCABULARY) for _ in range(args.tokens)]
               for _ in range(args.conversations)]
    new = [chosen.randrange(VOCABULARY) for _ in range(NEW)]
    room = args.conversations * (args.tokens + 2 * REPLY + NEW + 64) + 512
    with tempfile.TemporaryDirectory(dir=args.work, prefix="hybrid-") as folder:
        ours = come_back(servers.hcache(args, Path(folder), room, 2, 256, "--engine", "llama"), prompts, new)
        theirs = come_back(servers.llama_server(args, room, 1, 0), prompts, new)
    ratios = [b["first_ms"] / a["first_ms"] for a, b in zip(ours, theirs, strict=True)]
    met = lib.median(ratios) >= LEAST_FASTER
    rows = [[name, f"{lib.median([t['first_ms'] for t in talks]):.0f}",
             f"{min(t['first_ms'] for t in talks):.0f} to {max(t['first_ms'] for t in talks):.0f}",
             f"{min(t['cached'] for t in talks)}", "yes" if all(t["same"] for t in talks) else "NO"]
            for name, talks in (("hcache", ours), ("llama-server", theirs))]
    print(lib.table(["after a restart", "first token, ms", "", "cached", "same answers"], rows))
    print(f"llama-server / hcache: {lib.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f}), bar "
          f">= {LEAST_FASTER}: {'pass' if met else 'MISSED'}")
    for talk in ours + theirs:
        del talk["prompt"]
    lib.write_results(args.json_file or (args.work / "hybrid.json"), {
        "quick": args.quick, "machine": {"cpu": cpu_name(), "threads": args.threads}, "tokens": args.tokens,
        "hcache": ours, "llama_server": theirs, "ratios": ratios})
    if not all(talk["same"] for talk in ours):
        raise SystemExit("an answer after the restart is not the one before")


if __name__ == "__main__":
    main()
