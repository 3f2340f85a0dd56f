"""A Hugging Face config.json as far as the trainer understands it, and the Megatron config that means the same."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from actors.trainer.megatron.imports import TransformerConfig
from runtime.settings.topology import MegatronConfig

MODEL_TYPES = ("qwen3", "qwen2", "llama")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
        raw: dict[str, Any] = json.loads(path.read_text())
        return _parse(raw)
    except KeyError as error:
        raise ValueError(f"{path}: key {error} is missing") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _parse(raw: dict[str, Any]) -> HfConfig:
    _check_supported(raw)
    heads: int = raw["num_attention_heads"]
    rope: dict[str, Any] = raw.get("rope_parameters") or {}
    return HfConfig(
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


def transformer_config(model: HfConfig, layout: MegatronConfig, *, dtype: torch.dtype, device: torch.device) -> Any:
    """Megatron's TransformerConfig of a model.

    Raises:
        ValueError: the layout does not fit the model, or asks for what the trainer does not do yet.
    """
    check_layout(model, layout)
    pipeline = layout.pipeline_model_parallel_size
    return TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=model.has_qkv_bias,
        qk_layernorm=model.has_qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline,
        sequence_parallel=layout.sequence_parallel,
        calculate_per_token_loss=True,  # the loss function returns a sum and what to divide it by, for both reductions
        variable_seq_lengths=pipeline > 1,  # micro-batches differ in length
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths refuses the default, also for dense models
        use_cpu_initialization=device.type == "cpu",
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        batch_p2p_comm=False,
        cuda_graph_scope=[],
    )


def check_layout(model: HfConfig, layout: MegatronConfig) -> None:
    """Refuse a parallel layout that cannot hold the model.

    Raises:
        ValueError: says which size, and what would fit.
    """
    tensor, pipeline = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    for name in ("context_parallel_size", "expert_model_parallel_size"):
        if getattr(layout, name) > 1:
            raise ValueError(f"trainer.megatron.{name} = {getattr(layout, name)}: only 1 is supported so far")
    divisible = {"num_key_value_heads": tensor, "vocab_size": tensor, "intermediate_size": tensor}
    divisible["num_hidden_layers"] = pipeline
    for name, size in divisible.items():
        if getattr(model, name) % size:
            raise ValueError(f"{name} = {getattr(model, name)} of the model does not divide by {size} ranks")
