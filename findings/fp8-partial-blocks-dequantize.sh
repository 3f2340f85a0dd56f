#!/usr/bin/env bash
# What: FineGrainedFP8Config(dequantize=True) of transformers divides a weight evenly among its scales. Where a side is no
#   multiple of the block, as the last block is then smaller, it reads other numbers without a word if the side happens
#   to divide by the number of scales (192 with blocks of 128: two of 96), and else refuses the file (320: three scales).
# One would guess: weight_block_size in quantization_config says which weights share a scale, as in DeepSeek's own code,
#   where the last block of a row or column is what is left.
# Whom it hurts: who reads a block-FP8 checkpoint to train from it or to compare with it. By arithmetic, kv_a_proj_with_mqa
#   of DeepSeek-V3 (576 rows, five scales) is of the second kind. What helps: to multiply block by block oneself.
# Seen: 30 November 2026, with transformers 5.23.0, torch 2.13.0, on a CPU. Source: seen while such a reader was built.
set -euo pipefail

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 safetensors==0.8.0 accelerate==1.15.0
cat >"$place/try.py" <<'PY'
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Qwen3Config

BLOCK = 128
place = Path(sys.argv[1])
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def quantized(weight):
    """Returns FP8 numbers, a scale for each block, and their products by the definition."""
    rows, columns = weight.shape
    stored, exact = torch.zeros_like(weight, dtype=torch.float8_e4m3fn), torch.zeros_like(weight)
    scales = torch.zeros(-(-rows // BLOCK), -(-columns // BLOCK))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            scale = weight[part].abs().max() / 448 * (1 + row + 2 * column)  # neighbours differ
            scales[row, column] = scale
            stored[part] = (weight[part] / scale).to(torch.float8_e4m3fn)
            exact[part] = stored[part].float() * scale
    return stored, scales, exact


def tried(hidden, intermediate):
    """Returns the largest error, as a share of the largest weight, or the type of the error that was raised."""
    sizes = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    torch.manual_seed(0)
    config = Qwen3Config(hidden_size=hidden, intermediate_size=intermediate, tie_word_embeddings=False, **sizes)
    directory = place / f"{hidden}-{intermediate}"
    AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    tensors, exact = load_file(directory / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale_inv"], exact[name] = quantized(tensors[name])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((directory / "config.json").read_text())
    method = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    (directory / "config.json").write_text(json.dumps(values | {"quantization_config": method}))
    try:
        read = AutoModelForCausalLM.from_pretrained(
            directory, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
        )
    except (RuntimeError, ValueError) as error:
        return type(error).__name__
    found = dict(read.named_parameters())
    return max(float((found[name] - each).abs().max() / each.abs().max()) for name, each in exact.items())


print("transformers", transformers.__version__, "torch", torch.__version__)
whole, uneven, even = tried(128, 256), tried(128, 320), tried(192, 256)
print("sides of whole blocks, 128 and 256: largest error", whole)
print("a side of 320, three scales:", uneven)
print("a side of 192, two scales: largest error", even)
assert whole == 0, "whole blocks are read wrongly too"
assert uneven == "RuntimeError", "a side of 320 is read now"
assert isinstance(even, float) and even > 0.5, "a side of 192 is read by its blocks now"
PY
"$place/venv/bin/python" -W ignore "$place/try.py" "$place" 2>"$place/errors" || { cat "$place/errors"; exit 1; }
