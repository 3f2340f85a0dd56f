"""A Hugging Face config.json as far as the trainer understands it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

MODEL_TYPES = ("qwen3", "qwen2", "llama")


@dataclass(frozen=True, kw_only=True)
class HfConfig:
    """The shape of a dense decoder, in Hugging Face's words."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    initializer_range: float

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the query, key and value projections add a bias."""
        return self.model_type == "qwen2"

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head."""
        return self.model_type == "qwen3"


def read_hf_config(directory: Path) -> HfConfig:
    """Read config.json of a model directory.

    Raises:
        OSError: the file is missing.
        ValueError: not a model that the trainer can build exactly; says which key is in the way.
    """
    path = directory / "config.json"
    try:
        return _parse(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
    except KeyError as error:
        raise ValueError(f"{path}: key {error} is missing") from None
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path}: {error}") from None


def _parse(raw: dict[str, Any]) -> HfConfig:
    _check_supported(raw)
    heads: int = raw["num_attention_heads"]
    rope: dict[str, Any] = raw.get("rope_parameters") or {}
    model = HfConfig(
        model_type=raw["model_type"],
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        max_position_embeddings=raw.get("max_position_embeddings", 32768),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        initializer_range=raw.get("initializer_range", 0.02),
    )
    msgspec.convert(vars(model), HfConfig)  # or a wrong type is met only in the middle of building
    return model


def _check_supported(raw: dict[str, Any]) -> None:
    """Refuse what would train a slightly different model than the one that samples."""
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"model_type {model_type!r}: allowed are {', '.join(MODEL_TYPES)}")
    rope: dict[str, Any] = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise ValueError(f"rope type {rope_type!r}: only 'default' is supported")
    unsupported = ("attention_bias", "mlp_bias", "use_sliding_window")
    for key in unsupported:
        if raw.get(key):
            raise ValueError(f"{key} is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r}: only 'silu' is supported")
