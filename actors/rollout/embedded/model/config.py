"""What the engine needs to know of a model, read from its Hugging Face config.json without torch."""

import math
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

MAX_CONTEXT: Final = 1 << 20  # tokens; beyond this a config is a mistake rather than a tiny model


DTYPES: Final = ("float64", "float32", "bfloat16", "float16")  # of weights, in Hugging Face's spelling


class ModelError(Exception):
    """A model directory cannot be used. The text names the file and what is wrong with it."""


class HfConfig(msgspec.Struct, frozen=True):
    """The keys of config.json that change what Qwen2, Qwen3 and Llama compute, with the classes' defaults."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    architectures: tuple[str, ...] = ()
    model_type: str = ""
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rope_theta: float | None = None  # transformers 4
    rope_scaling: dict[str, Any] | None = None  # transformers 4
    rope_parameters: dict[str, Any] | None = None  # transformers 5
    partial_rotary_factor: float = 1.0
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    eos_token_id: int | tuple[int, ...] | None = None
    initializer_range: float = 0.02
    dtype: str | None = None  # transformers 5
    torch_dtype: str | None = None  # transformers 4


class Rope(msgspec.Struct, frozen=True):
    """Rotary embedding: the base, and Llama 3's stretching of low frequencies if there is any."""

    theta: float = 10000.0
    factor: float = 1.0  # 1 = no stretching
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one decoder-only model. Two models with equal shapes can exchange weights."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # on the attention's output projection
    mlp_bias: bool
    qk_norm: bool


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A model directory: its shape, and what else config.json and generation_config.json say."""

    shape: ModelConfig
    max_context: int  # tokens, prompt and response together
    eos_token_ids: frozenset[int]
    dtype: str  # as Hugging Face spells it; of weights that are drawn, not loaded
    initializer_range: float


class _Eos(msgspec.Struct, frozen=True):
    eos_token_id: int | tuple[int, ...] | None = None


def read_model(directory: Path) -> ModelDescription:
    """Read config.json and, where it exists, generation_config.json.

    Raises:
        ModelError: no directory, no config, or a model that this engine does not compute.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such directory")
    raw = _decode(directory / "config.json", HfConfig)
    generation = directory / "generation_config.json"
    eos = _decode(generation, _Eos).eos_token_id if generation.is_file() else None
    try:
        return ModelDescription(
            shape=_shape(raw),
            max_context=raw.max_position_embeddings,
            eos_token_ids=_ids(raw.eos_token_id) | _ids(eos),
            dtype=raw.dtype or raw.torch_dtype or "float32",
            initializer_range=raw.initializer_range,
        )
    except ValueError as error:
        raise ModelError(f"{directory / 'config.json'}: {error}") from error


T = TypeVar("T")


def _decode(file: Path, struct: type[T]) -> T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=struct)
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise ModelError(f"{file}: {error}") from error


def _ids(value: int | tuple[int, ...] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset((value,) if isinstance(value, int) else value)


def _shape(raw: HfConfig) -> ModelConfig:
    architecture = raw.architectures[0] if raw.architectures else ""
    if architecture not in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"):
        known = "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
        raise ValueError(f"architecture {architecture or 'missing'!r} is not supported; supported: {known}")
    _refuse_unsupported(raw)
    qwen2 = architecture == "Qwen2ForCausalLM"
    return ModelConfig(
        architecture=architecture,
        model_type=raw.model_type,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=raw.head_dim or (128 if architecture == "Qwen3ForCausalLM" else _even_head(raw)),
        rms_norm_eps=raw.rms_norm_eps,
        rope=_rope(raw),
        tie_word_embeddings=raw.tie_word_embeddings,
        qkv_bias=qwen2 or raw.attention_bias,
        output_bias=not qwen2 and raw.attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and raw.mlp_bias,
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


def _even_head(raw: HfConfig) -> int:
    if raw.hidden_size % raw.num_attention_heads:
        raise ValueError(f"hidden_size {raw.hidden_size} does not split into {raw.num_attention_heads} heads")
    return raw.hidden_size // raw.num_attention_heads


def _refuse_unsupported(raw: HfConfig) -> None:
    sizes = (raw.vocab_size, raw.hidden_size, raw.intermediate_size, raw.num_hidden_layers, raw.num_attention_heads)
    if min(sizes) < 1 or raw.num_attention_heads % (raw.num_key_value_heads or 1):
        raise ValueError("sizes must be positive, and num_key_value_heads must divide num_attention_heads")
    if not 1 < raw.max_position_embeddings <= MAX_CONTEXT:
        raise ValueError(f"max_position_embeddings {raw.max_position_embeddings} is not in 2..{MAX_CONTEXT}")
    if raw.hidden_act != "silu":
        raise ValueError(f"hidden_act {raw.hidden_act!r} is not supported; supported: 'silu'")
    dtype = raw.dtype or raw.torch_dtype or "float32"
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    if raw.use_sliding_window:
        raise ValueError("use_sliding_window is not supported")


def _rope(raw: HfConfig) -> Rope:
    """Join the two spellings of rotary parameters: transformers 4 (rope_theta, rope_scaling) and 5."""
    parameters: dict[str, Any] = dict(raw.rope_scaling or {}) | dict(raw.rope_parameters or {})
    theta = float(parameters.get("rope_theta") or raw.rope_theta or 10000.0)
    if not (math.isfinite(theta) and theta > 0):
        raise ValueError(f"rope_theta {theta} is not a positive number")
    if parameters.get("partial_rotary_factor", raw.partial_rotary_factor) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return Rope(theta=theta)
    if kind != "llama3":
        raise ValueError(f"rope_type {kind!r} is not supported; supported: 'default', 'llama3'")
    try:
        return Rope(
            theta=theta,
            factor=float(parameters["factor"]),
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
            original_max_position=int(parameters["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ValueError(f"rope_type 'llama3' lacks {error}") from error
