"""Models of transformers, the independent implementation that the trainer's are compared with."""

import tempfile
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from actors.trainer.models.config import HfConfig
from actors.trainer.models.gathering import own_parts, whole_tensors
from tests.actors.trainer.tiny import EXPERTS, TINY

MODELS: dict[str, tuple[Any, Any]] = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "glm4_moe": (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM),
}


def state_of(model: Any) -> dict[str, torch.Tensor]:
    """Its tensors by the names of a checkpoint, where each expert has its own."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return load_file(Path(directory) / "model.safetensors")


def write_model(directory: Path, kind: str = "qwen3", *, tied: bool = False, noise: float = 0.1, **changes: Any) -> Any:
    """Write a model directory with random weights, norms and biases included; return the model, ready to train."""
    config_type, model_type = MODELS[kind]
    settings = {key: value for key, value in deepcopy(TINY).items() if key != "model_type"}  # GLM's config changes it
    settings |= EXPERTS.get(kind, {}) | changes
    if kind == "qwen2":
        del settings["head_dim"]  # Qwen2 has no such key: the hidden size over the heads
    config = config_type(**settings | {"tie_word_embeddings": tied, "attn_implementation": "sdpa"})
    torch.manual_seed(7)
    model = model_type(config).float().eval()
    with torch.no_grad():
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for parameter in (*model.parameters(), *biases):
            parameter.add_(torch.randn_like(parameter) * noise)
    model.save_pretrained(directory)
    return model


def whole_weights(chunks: Sequence[Any], hf: HfConfig) -> dict[str, torch.Tensor]:
    """The weights of a single rank by Hugging Face name, some of them its own tensors."""
    tensors = whole_tensors(own_parts(chunks, hf), hf, torch.device("cpu"))
    return {entry.name: tensor for entry, tensor in tensors if tensor is not None}
