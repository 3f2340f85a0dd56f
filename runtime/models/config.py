"""A model's shape, read from its Hugging Face config.json without torch, for the trainer and the tiny engine.

A key that changes the computation and is not supported is an error that names the key. So trainer and engine compute
the same model, which is the checkpoint's.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from runtime.models.blocks import Attention, DeltaNet, Experts, Indexer, Layer, Mla, Mlp, ModelShape, Norms
from runtime.models.config_keys import config_table, sort_keys
from runtime.models.directory import CONFIG, GENERATION_CONFIG, ModelError, decoded, has_file, read_json
from runtime.models.family import Composite, Family, family_of
from runtime.models.problems import Content, Problems
from runtime.models.safetensors import MAX_TENSORS, tensor_names

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

_NOTHING: Final[Content] = {}
_ONE_EXPERT: Final = re.compile(r"\.experts\.\d+\.")  # in the names of files that have a tensor of each expert
CLASSIFIERS: Final = ("ForSequenceClassification", "ForTokenClassification")  # the same model with a value head
IGNORE: Final = "model.ignore_config_keys"  # the setting
TEXT: Final = "text_config"  # key of a composite model: the keys of its text model
OF_WHOLE: Final = ("architectures", "tie_word_embeddings")  # keys that a composite model has outside of it
OF_LAYER, OF_EXPERT = 24, 3  # at most so many tensors of a layer, and of an expert

IN_TINY_ENGINE: Final = (Attention, Mla, Indexer, DeltaNet)  # attention that the tiny engine computes


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


class _Text(msgspec.Struct, frozen=True):
    model_type: str | None = None


class _Kind(msgspec.Struct, frozen=True):
    """The keys that identify the kind of model. Read first, because other kinds have other keys."""

    architectures: tuple[str, ...] | None = None
    model_type: str | None = None
    text_config: _Text | None = None

    def family(self) -> Family:
        """Return its family. A classifier with one label is the same model with a value head."""
        text = None if self.text_config is None else self.text_config.model_type
        if self.architectures is None:
            return family_of(self.model_type, None, text)
        architecture = self.architectures[0] if self.architectures else "missing"
        for kind in CLASSIFIERS:
            architecture = architecture.replace(kind, "ForCausalLM")
        return family_of(self.model_type, architecture, text)


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
    family = problems.of(kind.family)
    model = None
    if family is not None:
        built = family.built_keys
        left_out = {key for key in ignored if key not in built}
        problems += [f"{IGNORE}: {key} cannot be ignored, as the model is built from it" for key in {*ignored} & built]
        content: Content = read_json(directory, CONFIG, dict[str, msgspec.Raw])
        composite = family.composite_of(kind.model_type)
        if composite is not None:
            found = problems.of(partial(_of_text, content, composite, directory))
            content, composite = found or (_NOTHING, composite)
        model = _read({key: content[key] for key in content if key not in left_out}, family, problems, composite)
    if model is None or problems:
        raise ModelError.of(directory / CONFIG, problems)
    return msgspec.structs.replace(
        model, eos_token_ids=model.eos_token_ids | _ids(eos), ignored_keys=tuple(dict.fromkeys(ignored))
    )


def _of_text(content: Content, composite: Composite, directory: Path) -> tuple[Content, Composite]:
    """Return the keys of the text model in a composite model's config.json, with those of the whole that it lacks.

    Also return how its files have experts: tools write a tensor of each where one of all was published.

    Raises:
        ValueError: there is no text model, a key differs from that of the whole, or the files are malformed.
    """
    if TEXT not in content:
        raise ValueError(f"{TEXT} is missing, which model_type {composite.model_type!r} has")
    text = decoded(content[TEXT], dict[str, msgspec.Raw])
    whole = {key: value for key, value in content.items() if key not in (TEXT, *composite.without_effect)}
    tied = "tie_word_embeddings"
    if tied in text and tied in whole and decoded(text[tied], object) != decoded(whole[tied], object):
        raise ValueError(f"{tied} and {TEXT}.{tied} differ: they must be equal")
    if composite.has_stacked_experts and any(_ONE_EXPERT.search(name) for name in tensor_names(directory)):
        composite = msgspec.structs.replace(composite, has_stacked_experts=False)
    return whole | text | {key: whole[key] for key in OF_WHOLE if key in whole}, composite


def _read(content: Content, family: Family, problems: Problems, composite: Composite | None) -> ModelDescription | None:
    """Read the keys of a family. Adds every problem; returns None if the model cannot be described."""
    values = {key: decoded(value, object) for key, value in content.items()}
    sorted_keys, large = sort_keys(values, family), [*_large(values)]
    problems += [*sorted_keys.problems, *large]
    defaults = config_table().reads(family.architecture)
    keys = problems.struct(content, family.decoder, defaults)
    of_attention = problems.struct(content, family.attention, defaults)
    of_mlps = problems.struct(content, family.mlp, defaults)
    if keys is None or large:
        return None
    problems += keys.problems()
    attention = None if of_attention is None else problems.of(of_attention.layers)
    mlps = None if of_mlps is None else problems.of(of_mlps.layers)
    if attention is None or mlps is None or of_mlps is None or problems:
        return None
    shape = ModelShape(
        architecture=family.architecture,
        model_type=family.model_type,
        vocab_size=keys.vocab_size,
        hidden_size=keys.hidden_size,
        intermediate_size=of_mlps.intermediate_size,
        rms_norm_eps=keys.rms_norm_eps,
        tie_word_embeddings=keys.tie_word_embeddings,
        layers=tuple(
            Layer(own, _stored(mlp, composite), _norms(family, mlp), keys.has_layer_scales)
            for own, mlp in zip(attention, mlps, strict=True)
        ),
        names=(*family.names.items(), *(() if composite is None else composite.names.items())),
        copied=(*family.copied, *(() if composite is None else composite.copied)),
        embedding_scale=keys.embedding_scale,
        logit_cap=keys.logit_cap,
        has_centred_norms=keys.has_centred_norms,
    )
    problems += _many_tensors(shape)
    return ModelDescription(
        shape=shape,
        max_context=keys.max_position_embeddings,
        eos_token_ids=_ids(keys.eos_token_id),
        dtype=keys.weights_dtype,
        initializer_range=keys.initializer_range,
        num_mtp_layers=of_mlps.num_further_layers,
        unread_keys=sorted_keys.unread,
    )


def _norms(family: Family, mlp: Mlp | Experts) -> Norms:
    """Return the norms of a layer. Experts with norms of their own read the residual itself."""
    has_own = isinstance(mlp, Experts) and mlp.has_norms
    return msgspec.structs.replace(family.norms, before_mlp="") if has_own else family.norms


def _stored(mlp: Mlp | Experts, composite: Composite | None) -> Mlp | Experts:
    """Return an MLP block as the files of a composite model have it."""
    if isinstance(mlp, Mlp) or composite is None or not composite.has_stacked_experts:
        return mlp
    return msgspec.structs.replace(mlp, is_stacked=True)


def read_tiny_engine_model(directory: Path, ignored: Collection[str] = ()) -> ModelDescription:
    """Read a model that the tiny engine can compute, without the ignored keys of its config.json.

    Raises:
        ModelError: as `read_model`, or the tiny engine cannot compute a block of the model.
    """
    model = read_model(directory, ignored)
    if lacking := not_in_tiny_engine(layer.attention for layer in model.shape.layers):
        raise ModelError(
            f"{directory / CONFIG}: the tiny engine does not support {' and '.join(lacking)} "
            f'({model.shape.architecture}); use kind = "sglang"'
        )
    return model


def not_in_tiny_engine(blocks: Iterable[msgspec.Struct]) -> list[str]:
    """Return the kinds of attention that the tiny engine does not compute, by the names of their blocks."""
    kinds = (Indexer if isinstance(block, Mla) and block.indexer is not None else type(block) for block in blocks)
    return [kind.__name__ for kind in dict.fromkeys(kinds) if kind not in IN_TINY_ENGINE]


def _ids(value: int | tuple[int, ...] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset((value,) if isinstance(value, int) else value)


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
