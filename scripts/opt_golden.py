#!/usr/bin/env python3
"""Write tests/golden/opt_tiny.{gguf,json}: a tiny random OPT and what `transformers` says of it.

    scripts/opt_golden.py tests/golden

Run once, when the converter's output changes; the tests read the two files. Needs: pip install
torch transformers numpy gguf. The weights are random, rounded to F16 so that the GGUF file holds
exactly what was run, in F32.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import OPTConfig, OPTForCausalLM

import convert_opt

SEED = 20240229
N_TOKENS = 40


def main() -> int:
    out = Path(sys.argv[1])
    torch.manual_seed(SEED)
    config = OPTConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, ffn_dim=128,
                       num_attention_heads=2, max_position_embeddings=64, word_embed_proj_dim=64,
                       dropout=0.0, attention_dropout=0.0, activation_function="relu")
    model = OPTForCausalLM(config).eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            if values.ndim == 2:
                values.normal_(0.0, 2.0 / values.shape[1] ** 0.5)
            elif "norm" in name and name.endswith("weight"):
                values.normal_(1.0, 0.1)
            else:
                values.normal_(0.0, 0.1)
            values.copy_(values.half().float())
    tokens = torch.randint(0, config.vocab_size, (1, N_TOKENS))
    with torch.no_grad():
        logits = model(tokens).logits[0]

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        convert_opt.convert(Path(folder), out / "opt_tiny.gguf", "f16")
    golden = {
        "made_by": f"scripts/opt_golden.py, torch {torch.__version__}",
        "tokens": tokens[0].tolist(),
        "logits": [[round(v, 5) for v in row] for row in logits.tolist()],
    }
    (out / "opt_tiny.json").write_text(json.dumps(golden) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
