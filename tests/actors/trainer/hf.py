"""Models of transformers, the independent implementation that the trainer's are compared with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from actors.trainer.models.config import HfConfig
from actors.trainer.models.gathering import own_parts, whole_tensors
from tests.actors.trainer.tiny import TINY

MODELS: dict[str, tuple[Any, Any]] = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
}


def write_model(directory: Path, kind: str = "qwen3", *, tied: bool = False, noise: float = 0.1, **changes: Any) -> Any:
    """Write a model directory with random weights, norms and biases included; return the model, ready to train."""
    config_type, model_type = MODELS[kind]
    settings = {key: value for key, value in TINY.items() if key != "model_type"} | changes
    if kind == "qwen2":
        del settings["head_dim"]  # Qwen2 has no such key: the hidden size over the heads
    config = config_type(**settings | {"tie_word_embeddings": tied, "attn_implementation": "sdpa"})
    torch.manual_seed(7)
    model = model_type(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    model.save_pretrained(directory)
    return model


def whole_weights(chunks: Sequence[Any], hf: HfConfig) -> dict[str, torch.Tensor]:
    """The weights of a single rank by Hugging Face name, some of them its own tensors."""
    tensors = whole_tensors(own_parts(chunks, hf), hf, torch.device("cpu"))
    return {entry.name: tensor for entry, tensor in tensors if tensor is not None}
