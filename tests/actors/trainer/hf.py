"""Models of transformers, the independent implementation that the trainer's are compared with."""

import json
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from actors.trainer.models.config import HfConfig
from actors.trainer.weights.gathering import own_parts, whole_tensors
from runtime.models.safetensors import SINGLE_FILE
from tests.actors.trainer.tiny import OF_KIND, TINY, type_of

BUFFERS = ("e_score_correction_bias", "layer_scalar")  # endings of names of those in checkpoints


def classes_of(kind: str) -> tuple[Any, Any]:
    """The classes of transformers of a tiny model: its configuration and its causal model."""
    config: Any = CONFIG_MAPPING[type_of(kind)]
    return config, MODEL_FOR_CAUSAL_LM_MAPPING[config]


def state_of(model: Any) -> dict[str, torch.Tensor]:
    """Its tensors by the names of a checkpoint, where each expert has its own."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return load_file(Path(directory) / "model.safetensors")


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Its gradients by the names of a checkpoint; a parameter without one has zeros."""
    holder = deepcopy(model)
    with torch.no_grad():
        for own, other in zip(holder.parameters(), model.parameters(), strict=True):
            own.copy_(torch.zeros_like(other) if other.grad is None else other.grad)
        for buffer in holder.buffers():
            buffer.zero_()
    return state_of(holder)


def write_model(directory: Path, kind: str = "qwen3", *, tied: bool = False, noise: float = 0.1, **changes: Any) -> Any:
    """Write a model directory with random weights, norms and biases included; return the model, ready to train."""
    config_type, model_type = classes_of(kind)
    settings = {key: value for key, value in deepcopy(TINY).items() if key != "model_type"}  # GLM's config changes it
    settings |= deepcopy(OF_KIND.get(kind, {})) | changes
    if settings["head_dim"] is None:
        del settings["head_dim"]
    if "qk_rope_head_dim" in settings:
        settings |= {"head_dim": settings["qk_rope_head_dim"], "num_key_value_heads": settings["num_attention_heads"]}
    config = config_type(**settings | {"tie_word_embeddings": tied, "pad_token_id": None})
    config._attn_implementation = "sdpa" if model_type._supports_sdpa else "eager"  # sinks have no other kernel
    torch.manual_seed(7)
    model = model_type(config).float().eval()
    with torch.no_grad():
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith(BUFFERS)]
        for parameter in (*model.parameters(), *biases):
            parameter.add_(torch.randn_like(parameter) * noise)
        for name, parameter in model.named_parameters():
            if name.endswith(".A_log"):  # faster decays have large sums, which transformers rounds to float32
                parameter.uniform_(-2.0, 0.0)
    model.save_pretrained(directory)
    return model


def write_mtp_model(directory: Path, *, num_hidden_layers: int = 2, noise: float = 0.1, **changes: Any) -> Any:
    """Write a GLM-4-MoE with an MTP layer, laid out as those that are published; return its parts.

    Returns:
        A model of transformers with one layer more than its decoder has, and the tensors that it has no place for.
    """
    layers = {"num_hidden_layers": num_hidden_layers + 1}
    model = write_model(directory, "glm4_moe", noise=noise, **layers, **changes)
    state, hidden = load_file(directory / SINGLE_FILE), model.config.hidden_size
    own = {f"{name}.weight": 1 + torch.randn(hidden) * noise for name in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * model.config.initializer_range
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    more = own | {name: state[of].clone() for name, of in copies.items()}
    state |= {f"model.layers.{num_hidden_layers}.{name}": tensor for name, tensor in more.items()}
    save_file(state, directory / SINGLE_FILE, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": num_hidden_layers, "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return model, own


def whole_weights(chunks: Sequence[Any], hf: HfConfig) -> dict[str, torch.Tensor]:
    """The weights of a single rank by Hugging Face name, some of them its own tensors."""
    tensors = whole_tensors(own_parts(chunks, hf), hf, torch.device("cpu"))
    return {entry.name: tensor for entry, tensor in tensors if tensor is not None}
