"""A model's shape, read from its Hugging Face config.json without torch, for the trainer and the tiny engine.

A key that changes the computation and is not supported is an error that names the key. So trainer and engine compute
the same model, which is the checkpoint's.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from runtime.models.attention import MLA_KEYS, MlaConfig, Rope, RopeKeys, read_rope
from runtime.models.config_keys import config_table, sort_keys
from runtime.models.directory import CONFIG, GENERATION_CONFIG, ModelError, decoded, has_file, read_json
from runtime.models.experts import EXPERT_KEYS, DeepseekV3Keys, Experts, Glm4MoeKeys
from runtime.models.problems import Content, Problems
from runtime.models.safetensors import MAX_TENSORS

MAX_CONTEXT: Final = 1 << 20  # tokens; a larger value is taken for a mistake in the config
LARGEST: Final = {  # by key of config.json; a larger value is taken for a mistake, or for an attack on memory
    **dict.fromkeys(("num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers"), 2048),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), 4096),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 1 << 14),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 1 << 14),
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank"), 1 << 22
    ),
    "vocab_size": 1 << 24,
}


DTYPES: Final = ("float64", "float32", "bfloat16", "float16")  # of weights, Hugging Face names


ARCHITECTURES: Final = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
SAME_AS: Final = {"kimi_k2": "deepseek_v3"}  # model types with the architecture of another one
CLASSIFIERS: Final = ("ForSequenceClassification", "ForTokenClassification")  # the same model with a value head
_OWN_HEAD_DIM: Final = ("Qwen3ForCausalLM", "DeepseekV3ForCausalLM")  # classes that do not divide hidden_size
WITH_QK_NORM: Final = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
IGNORE: Final = "model.ignore_config_keys"  # the setting
OF_LAYER, OF_EXPERT = 24, 3  # at most so many tensors of a layer, and of an expert


class ConfigKeys(RopeKeys, frozen=True, kw_only=True):
    """The keys of config.json that change the computation of all supported models, with the classes' defaults."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    architectures: tuple[str, ...] | None = None
    model_type: str = ""
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float | None = None  # default 1e-6, or 1e-5 for GLM-4-MoE
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    sliding_window: int | bool | None = None  # without effect unless use_sliding_window turns it on
    layer_types: tuple[str, ...] | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    initializer_range: float = 0.02
    dtype: str | None = None  # transformers 5
    torch_dtype: str | None = None  # transformers 4


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
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
    experts: Experts | None = None  # None: every layer has one dense MLP
    mla: MlaConfig | None = None  # None: queries, keys and values are projected directly


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A model directory: its shape and other values of config.json and generation_config.json."""

    shape: ModelShape
    max_context: int  # tokens, prompt plus response
    eos_token_ids: frozenset[int]
    dtype: str  # Hugging Face name; for randomly initialized weights
    initializer_range: float
    num_mtp_layers: int = 0  # MTP layers; a forward pass skips them
    unread_keys: tuple[str, ...] = ()  # keys of config.json without effect, because no class reads them
    ignored_keys: tuple[str, ...] = ()  # keys that were left out, as the user named them


class _Kind(msgspec.Struct, frozen=True):
    """The keys that identify the kind of model. Read first, because other kinds have other keys."""

    architectures: tuple[str, ...] | None = None
    model_type: str = ""


class _Eos(msgspec.Struct, frozen=True):
    eos_token_id: int | tuple[int, ...] | None = None


def read_model(directory: Path, ignored: Collection[str] = ()) -> ModelDescription:
    """Read config.json and, if it exists, generation_config.json.

    Args:
        directory: of the model.
        ignored: keys of config.json to leave out, as `model.ignore_config_keys` names them.

    Raises:
        ModelError: no directory, no config, or an unsupported model. The text names every key that is unsupported.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such directory")
    kind = read_json(directory, CONFIG, _Kind)
    has_generation = has_file(directory, GENERATION_CONFIG)
    eos = read_json(directory, GENERATION_CONFIG, _Eos).eos_token_id if has_generation else None
    problems = Problems()
    architecture = problems.of(lambda: _architecture(kind))
    model = None
    if architecture is not None:
        built = built_keys(architecture)
        left_out = {key for key in ignored if key not in built}
        problems += [f"{IGNORE}: {key} cannot be ignored, as the model is built from it" for key in {*ignored} & built]
        content = read_json(directory, CONFIG, dict[str, msgspec.Raw])
        model = _read({key: content[key] for key in content if key not in left_out}, architecture, problems)
    if model is None or problems:
        raise ModelError.of(directory / CONFIG, problems)
    return msgspec.structs.replace(
        model, eos_token_ids=model.eos_token_ids | _ids(eos), ignored_keys=tuple(dict.fromkeys(ignored))
    )


def built_keys(architecture: str) -> frozenset[str]:
    """Return the keys of config.json that a model of an architecture is built from, or that are checked for it."""
    structs = (ConfigKeys, EXPERT_KEYS.get(architecture), MLA_KEYS.get(architecture))
    return frozenset(key for keys in structs if keys for key in keys.__struct_fields__)


def _read(content: Content, architecture: str, problems: Problems) -> ModelDescription | None:
    """Read the keys of an architecture. Adds every problem; returns None if the model cannot be described."""
    values = {key: decoded(value, object) for key, value in content.items()}
    sorted_keys, large = sort_keys(values, architecture, built_keys(architecture)), [*_large(values)]
    problems += [*sorted_keys.problems, *large]
    raw = problems.struct(content, ConfigKeys)
    of_experts, of_mla = EXPERT_KEYS.get(architecture), MLA_KEYS.get(architecture)
    expert_keys = None if of_experts is None else problems.struct(content, of_experts)
    mla_keys = None if of_mla is None else problems.struct(content, of_mla)
    if raw is None or large:
        return None
    problems += _unsupported(raw, architecture)
    glm = isinstance(expert_keys, Glm4MoeKeys)
    rope = problems.of(
        lambda: read_rope(raw, share=0.5 if glm else 1.0, stretching="llama3" if of_mla is None else "yarn")
    )
    experts = None if expert_keys is None else problems.of(expert_keys.read)
    mla = None if mla_keys is None else problems.of(mla_keys.read)
    if rope is None or problems:
        return None
    has_qk_norm = expert_keys.use_qk_norm if isinstance(expert_keys, Glm4MoeKeys) else architecture in WITH_QK_NORM
    shape = _shape(raw, architecture, rope, experts, mla, has_qk_norm=has_qk_norm)
    problems += _many_tensors(shape)
    mtp = isinstance(expert_keys, Glm4MoeKeys | DeepseekV3Keys)
    return ModelDescription(
        shape=shape,
        max_context=raw.max_position_embeddings,
        eos_token_ids=_ids(raw.eos_token_id),
        dtype=raw.dtype or raw.torch_dtype or "float32",
        initializer_range=raw.initializer_range,
        num_mtp_layers=expert_keys.num_further_layers if mtp else 0,
        unread_keys=sorted_keys.unread,
    )


def read_dense_model(directory: Path, ignored: Collection[str] = ()) -> ModelDescription:
    """Read a model that the tiny engine can compute, without the ignored keys of its config.json.

    Raises:
        ModelError: as `read_model`, or the model has experts or MLA.
    """
    model = read_model(directory, ignored)
    if model.shape.mla is not None:
        raise ModelError(
            f"{directory / CONFIG}: the tiny engine does not support multi-latent attention "
            f'({model.shape.architecture}); use kind = "sglang"'
        )
    if model.shape.experts is not None:
        raise ModelError(
            f"{directory / CONFIG}: the tiny engine does not support a mixture of experts "
            f'({model.shape.architecture} with {model.shape.experts.num_experts} experts); use kind = "sglang"'
        )
    return model


def _ids(value: int | tuple[int, ...] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset((value,) if isinstance(value, int) else value)


def _shape(
    raw: ConfigKeys, architecture: str, rope: Rope, experts: Experts | None, mla: MlaConfig | None, *, has_qk_norm: bool
) -> ModelShape:
    glm, qwen2 = architecture == "Glm4MoeForCausalLM", architecture == "Qwen2ForCausalLM"
    return ModelShape(
        architecture=architecture,
        model_type=next(kind for kind, name in ARCHITECTURES.items() if name == architecture),
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=_head_dim(raw, architecture) if mla is None else mla.head_dim,
        rms_norm_eps=(1e-5 if glm else 1e-6) if raw.rms_norm_eps is None else raw.rms_norm_eps,
        rope=rope,
        tie_word_embeddings=raw.tie_word_embeddings,
        qkv_bias=qwen2 or raw.attention_bias,
        output_bias=not (qwen2 or glm) and raw.attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and raw.mlp_bias,
        qk_norm=has_qk_norm,
        experts=experts,
        mla=mla,
    )


def _architecture(raw: _Kind) -> str:
    model_type = SAME_AS.get(raw.model_type, raw.model_type)
    if raw.architectures is None:
        if model_type not in ARCHITECTURES:
            supported = ", ".join((*ARCHITECTURES, *SAME_AS))
            raise ValueError(f"model_type {raw.model_type!r} is not supported; supported: {supported}")
        return ARCHITECTURES[model_type]
    architecture = raw.architectures[0] if raw.architectures else "missing"
    for kind in CLASSIFIERS:
        architecture = architecture.replace(kind, "ForCausalLM")
    if architecture not in ARCHITECTURES.values():
        known = ", ".join(sorted(ARCHITECTURES.values()))
        raise ValueError(f"architecture {architecture!r} is not supported; supported: {known}")
    if model_type and ARCHITECTURES.get(model_type) != architecture:
        raise ValueError(f"model_type {raw.model_type!r} does not match architecture {architecture}")
    return architecture


def _large(keys: Mapping[str, Any]) -> Iterator[str]:
    """Yield sizes that no model has, from which nothing may be computed."""
    for key, most in LARGEST.items():
        value = keys.get(key)
        if isinstance(value, int) and value > most:
            yield f"{key} {value} is not supported; supported: at most {most:,}"


def _many_tensors(shape: ModelShape) -> Iterator[str]:
    experts = shape.experts
    num_experts = 0 if experts is None else experts.num_experts
    if shape.num_layers * (OF_LAYER + OF_EXPERT * num_experts) > MAX_TENSORS:
        yield (
            f"num_hidden_layers {shape.num_layers} with {num_experts} experts is not supported; supported: layers with "
            f"at most {MAX_TENSORS:,} tensors together"
        )


def _head_dim(raw: ConfigKeys, architecture: str) -> int:
    if raw.head_dim or architecture == "Qwen3ForCausalLM":
        return raw.head_dim or 128
    return raw.hidden_size // raw.num_attention_heads


def _unsupported(raw: ConfigKeys, architecture: str) -> Iterator[str]:
    sizes = (raw.vocab_size, raw.hidden_size, raw.intermediate_size, raw.num_hidden_layers, raw.num_attention_heads)
    if min(sizes) < 1 or raw.num_attention_heads % (raw.num_key_value_heads or 1):
        yield "sizes must be positive, and num_key_value_heads must divide num_attention_heads"
    elif not raw.head_dim and architecture not in _OWN_HEAD_DIM and raw.hidden_size % raw.num_attention_heads:
        yield f"hidden_size {raw.hidden_size} is not divisible by num_attention_heads {raw.num_attention_heads}"
    if not 1 < raw.max_position_embeddings <= MAX_CONTEXT:
        yield f"max_position_embeddings {raw.max_position_embeddings} is not in 2..{MAX_CONTEXT}"
    if raw.hidden_act != "silu":
        yield f"hidden_act {raw.hidden_act!r} is not supported; supported: 'silu'"
    dtype = raw.dtype or raw.torch_dtype or "float32"
    if dtype not in DTYPES:
        yield f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}"
    if raw.use_sliding_window:
        yield "use_sliding_window is not supported"
    if raw.sliding_window and "use_sliding_window" not in config_table().reads(architecture):
        yield f"sliding_window {raw.sliding_window} is not supported; supported: null"
    if other := set(raw.layer_types or ()) - {"full_attention"}:
        yield f"layer_types {min(other)!r} is not supported; supported: 'full_attention'"
