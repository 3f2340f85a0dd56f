#!/usr/bin/env bash
# What: a model that transformers read from a GGUF file cannot be saved with save_pretrained, although all its tensors
#   are float32, in the file and in memory. Its config also keeps float32's roundings: rms_norm_eps 9.999999747378752e-06.
# One would guess: from_pretrained(DIR, gguf_file=NAME) followed by save_pretrained(OUT) converts a GGUF file to
#   safetensors, as its tensors are dequantized when they are read.
# Whom it hurts: who has a released model as GGUF alone and wants a directory to train from. What helps: a fresh model
#   of the same class from a config without quantization_config, with the state dict loaded.
# Seen: 30 November 2026, with transformers 5.23.0, gguf 0.19.0, torch 2.13.0. Source: seen while a converter was built.
set -euo pipefail

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 gguf==0.19.0 safetensors==0.8.0 accelerate==1.15.0
cat >"$place/try.py" <<'PY'
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

place = Path(sys.argv[1])
writer = gguf.GGUFWriter(place / "tiny.gguf", "llama")
writer.add_vocab_size(64)
writer.add_context_length(128)
writer.add_embedding_length(64)
writer.add_block_count(1)
writer.add_feed_forward_length(96)
writer.add_head_count(2)
writer.add_head_count_kv(1)
writer.add_rope_freq_base(10000.0)
writer.add_layer_norm_rms_eps(1e-5)
shapes = {
    "token_embd": (64, 64),
    "output_norm": (64,),
    "blk.0.attn_q": (64, 64),
    "blk.0.attn_k": (32, 64),
    "blk.0.attn_v": (32, 64),
    "blk.0.attn_output": (64, 64),
    "blk.0.attn_norm": (64,),
    "blk.0.ffn_norm": (64,),
    "blk.0.ffn_gate": (96, 64),
    "blk.0.ffn_up": (96, 64),
    "blk.0.ffn_down": (64, 96),
}
draw = np.random.default_rng(0)
for name, shape in shapes.items():
    writer.add_tensor(f"{name}.weight", draw.normal(0, 0.1, shape).astype(np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

types = {tensor.tensor_type.name for tensor in gguf.GGUFReader(place / "tiny.gguf").tensors}
model = AutoModelForCausalLM.from_pretrained(place, gguf_file="tiny.gguf", dtype=torch.float32)
dtypes = {str(parameter.dtype) for parameter in model.parameters()}
print("transformers", transformers.__version__, "torch", torch.__version__)
print("types in the file:", types, "dtypes in memory:", dtypes, "rms_norm_eps:", model.config.rms_norm_eps)
try:
    model.save_pretrained(place / "out")
    said = "saved"
except ValueError as error:
    said = f"ValueError: {error}"
print("save_pretrained:", said)
as_seen = types == {"F32"} and dtypes == {"torch.float32"} and model.config.rms_norm_eps != 1e-5
sys.exit(0 if as_seen and "quantized with gguf" in said else 1)
PY
"$place/venv/bin/python" "$place/try.py" "$place"
