#!/usr/bin/env python3
"""Convert an OPT model from the Hugging Face layout to GGUF.

    scripts/convert_opt.py MODEL_DIR -o OUT.gguf [--type f16|bf16|f32]

llama.cpp has no convention for OPT; docs/howto/add-a-model.md describes the one written here.
Needs: pip install torch numpy gguf (and safetensors for checkpoints in that format).
Other weight types: `hcache model requantise` on the result.
"""

import argparse
import json
import sys
from pathlib import Path

import gguf
import numpy as np

LAYER_TENSORS = {
    "self_attn_layer_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "final_layer_norm": "ffn_norm",
    "fc1": "ffn_up",
    "fc2": "ffn_down",
}
MODEL_TENSORS = {
    "decoder.embed_tokens.weight": "token_embd.weight",
    "decoder.embed_positions.weight": "position_embd.weight",
    "decoder.final_layer_norm.weight": "output_norm.weight",
    "decoder.final_layer_norm.bias": "output_norm.bias",
}
POSITION_OFFSET = 2  # rows that the position table has in front of position 0
LAYER_NORM_EPSILON = 1e-5  # torch's default; OPT's configuration has no key for it


class ConversionError(Exception):
    pass


def target_name(source: str) -> str:
    """model.decoder.layers.3.fc1.weight -> blk.3.ffn_up.weight"""
    name = source.removeprefix("model.")
    if name == "lm_head.weight":
        return "output.weight"
    if name in MODEL_TENSORS:
        return MODEL_TENSORS[name]
    prefix = "decoder.layers."
    if name.startswith(prefix):
        index, _, rest = name[len(prefix):].partition(".")
        part, _, kind = rest.rpartition(".")
        if part in LAYER_TENSORS and kind in ("weight", "bias"):
            return f"blk.{int(index)}.{LAYER_TENSORS[part]}.{kind}"
    raise ConversionError(f"tensor {source} is no part of an OPT decoder as HCache knows it")


def check_config(config: dict) -> None:
    def refuse(why: str) -> None:
        raise ConversionError(f"config.json: {why} is not supported")

    if config.get("model_type") != "opt":
        raise ConversionError(f"config.json: model_type is {config.get('model_type')}, not opt")
    if not config.get("do_layer_norm_before", True):
        refuse("do_layer_norm_before = false (OPT-350m)")
    if config.get("word_embed_proj_dim", config["hidden_size"]) != config["hidden_size"]:
        refuse("an embedding narrower than the model (OPT-350m)")
    if config.get("activation_function", "relu") != "relu":
        refuse(f"activation {config['activation_function']}")
    if not config.get("layer_norm_elementwise_affine", True):
        refuse("a layer norm without weights (Galactica)")
    if config.get("_remove_final_layer_norm", False):
        refuse("a decoder without final layer norm")


def read_tensors(folder: Path):
    """Yields (name, torch tensor) from whichever checkpoint format is there."""
    shards = sorted(folder.glob("*.safetensors"))
    if shards:
        from safetensors import safe_open
        for shard in shards:
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():
                    yield name, file.get_tensor(name)
        return
    import torch
    shards = sorted(folder.glob("pytorch_model*.bin"))
    if not shards:
        raise ConversionError(f"{folder}: no *.safetensors and no pytorch_model*.bin")
    for shard in shards:
        yield from torch.load(shard, map_location="cpu", weights_only=True).items()


def add_vocabulary(writer: gguf.GGUFWriter, folder: Path, n_vocab: int) -> None:
    """GPT-2's byte-level BPE; rows of the table beyond the vocabulary become unused tokens."""
    vocab_file = folder / "vocab.json"
    merges_file = folder / "merges.txt"
    if not vocab_file.exists() or not merges_file.exists():
        print("no vocab.json and merges.txt: the result has no vocabulary", file=sys.stderr)
        writer.add_tokenizer_model("no_vocab")
        return
    ids = json.loads(vocab_file.read_text(encoding="utf-8"))
    tokens = [f"[PAD{i}]" for i in range(n_vocab)]
    types = [gguf.TokenType.UNUSED] * n_vocab
    for token, index in ids.items():
        tokens[index] = token
        types[index] = gguf.TokenType.NORMAL
    for special in ("<s>", "<pad>", "</s>", "<unk>"):
        if special in ids:
            types[ids[special]] = gguf.TokenType.CONTROL
    lines = merges_file.read_text(encoding="utf-8").splitlines()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([line for line in lines if line and not line.startswith("#version")])
    end = ids.get("</s>", 2)  # OPT begins and ends its texts with the same token
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_pad_token_id(ids.get("<pad>", 1))
    writer.add_add_bos_token(True)


def encode(values, kind: str):
    """A torch tensor as (numpy array, GGUF type)."""
    import torch
    if kind == "bf16":
        raw = values.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
        return raw.view(np.uint8), gguf.GGMLQuantizationType.BF16
    dtype = torch.float32 if kind == "f32" else torch.float16
    return values.to(dtype).contiguous().numpy(), None


def convert(folder: Path, out: Path, kind: str) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    check_config(config)
    writer = gguf.GGUFWriter(out, "opt")
    writer.add_name(config.get("_name_or_path") or folder.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["ffn_dim"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_attention_heads"])
    writer.add_layer_norm_eps(LAYER_NORM_EPSILON)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_uint32("opt.position_offset", POSITION_OFFSET)
    add_vocabulary(writer, folder, config["vocab_size"])

    tied = config.get("tie_word_embeddings", True)
    seen = set()
    for source, values in read_tensors(folder):
        name = target_name(source)
        if name in seen or (tied and name == "output.weight"):
            continue
        seen.add(name)
        data, raw_type = encode(values, kind if values.ndim == 2 else "f32")
        writer.add_tensor(name, data, raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=sys.stderr.isatty())
    writer.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder with config.json and the checkpoint")
    parser.add_argument("-o", "--output", type=Path, required=True, help="GGUF file to write")
    parser.add_argument("--type", choices=("f16", "bf16", "f32"), default="f16",
                        help="type of the matrices (default: f16); norms and biases are f32")
    arguments = parser.parse_args()
    try:
        convert(arguments.model, arguments.output, arguments.type)
    except (ConversionError, OSError, KeyError) as error:
        print(f"convert_opt: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
