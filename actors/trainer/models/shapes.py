"""Tensors of a model under Hugging Face's names, their shapes, and the check that files hold them. No torch."""

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np

from actors.trainer.models.config import HfConfig
from runtime.models.blocks import mtp_weights
from runtime.models.quantization import FLOATS, Quantization, StoredForm, quantization_of
from runtime.models.safetensors import StoredTensor, read_tensors
from runtime.models.tensors import Shape, Weight, norm, within

VALUE_HEAD: Final = "score.weight"
VALUE_BIAS: Final = "score.bias"
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"


@lru_cache(maxsize=8)
def weights_of(model: HfConfig) -> Mapping[str, Weight]:
    """Map the trainer's name of every tensor to the tensor, in layer order.

    A value head has the names of transformers' classifiers with one label: of tokens with a bias, of sequences without.
    """
    hidden = model.hidden_size
    vocabulary = (1 if model.has_value_head else model.vocab_size, hidden)
    head = VALUE_HEAD if model.has_value_head else EMBEDDING if model.tie_word_embeddings else HEAD
    found = [Weight("embedding.word_embeddings.weight", {EMBEDDING: (model.vocab_size, hidden)})]
    for index, layer in enumerate(model.all_layers):
        own = [*layer.weights(hidden), *(mtp_weights(hidden) if index >= model.num_layers else ())]
        found += within(own, f"decoder.layers.{index}", f"model.layers.{index}")
    found += norm("decoder.final_layernorm", hidden, "model.norm"), Weight("output_layer.weight", {head: vocabulary})
    if model.has_value_bias:
        found.append(Weight("output_layer.bias", {VALUE_BIAS: (1,)}))
    return {weight.name: weight for weight in model.spelled(found)}


def hf_shapes(model: HfConfig) -> dict[str, Shape]:
    """Map the Hugging Face name of every tensor to its shape, in layer order. A tied output weight is left out."""
    shapes = {part: shape for weight in weights_of(model).values() for part, shape in weight.in_files.items()}
    return shapes | {copy: shape for name, shape in shapes.items() for copy in copies_of(name, model)}


@lru_cache(maxsize=8)
def frozen_names(model: HfConfig) -> frozenset[str]:
    """Return the names of the files' tensors that are never trained, by any setting. Biases of experts have a rule."""
    return frozenset(part for weight in weights_of(model).values() if weight.is_frozen for part in weight.in_files)


def num_weights(model: HfConfig) -> int:
    """Count the weights in all tensors of a model."""
    return sum(math.prod(shape) for shape in hf_shapes(model).values())


def copies_of(name: str, model: HfConfig) -> list[str]:
    """List the names under which an MTP layer repeats a top-level tensor. These copies are written and never read."""
    if not model.num_mtp_layers:
        return []
    embedding, head = (f"model.layers.{model.num_layers}.{own}.weight" for own in ("embed_tokens", "shared_head.head"))
    copies = {EMBEDDING: [embedding], HEAD: [head]}
    if model.tie_word_embeddings:
        copies[EMBEDDING].append(head)
    return copies.get(name, [])


NO_CONFIG: Final = ", and config.json has no quantization_config that says how it is scaled"
_OF_LAYER: Final = re.compile(r"model\.layers\.(\d{1,9})\.")
_ROPE_BUFFER: Final = "rotary_emb.inv_freq"  # computed from config.json; older tools wrote it
_COMPARED_BYTES: Final = 64 << 20  # compared at a time
_MAX_COMPARED_BYTES: Final = 4 << 30  # of a tied output weight, which few models have beside their embedding


def check_weights(directory: Path, model: HfConfig) -> None:
    """Reject files that hold anything other than the model's tensors.

    A model with a value head can start from a policy's files: the head may be missing, and an output layer is not read.

    Raises:
        ValueError: names the tensor that is missing, unsupported or unexpected.
        OSError: a file is missing or cannot be read.
    """
    found, expected, quantization = read_tensors(directory), hf_shapes(model), quantization_of(directory)
    copies = {copy for name in expected for copy in copies_of(name, model)}  # MTP duplicates are never read
    for name, shape in expected.items():
        if name not in copies and (name in found or name not in (VALUE_HEAD, VALUE_BIAS)):
            for stored, form in _forms(name, shape, found, quantization).items():
                _check_tensor(directory, stored, form, found.get(stored), model, quantization)
    first = model.num_layers + model.num_mtp_layers
    unused = range(first, first + model.num_unused_mtp_layers)
    for name, tensor in found.items():
        is_part = quantization is not None and quantization.whole(name) in expected
        if name not in expected and not is_part:
            _check_extra(directory, name, tensor, found, model, unused)


def _forms(
    name: str, shape: Shape, found: Mapping[str, StoredTensor], quantization: Quantization | None
) -> dict[str, StoredForm]:
    """Return the tensors of the files that hold a tensor, by name."""
    if quantization is None or not quantization.is_quantized(name, found):
        return {name: StoredForm(FLOATS, shape)}
    return quantization.forms(name, shape)


def _check_tensor(
    directory: Path,
    name: str,
    form: StoredForm,
    found: StoredTensor | None,
    model: HfConfig,
    quantization: Quantization | None,
) -> None:
    if found is None:
        trained = name.startswith(f"model.layers.{model.num_layers}.")
        why = ": trainer.megatron.mtp_num_layers = 1 trains a layer that these weights lack" if trained else ""
        raise ValueError(f"{directory} has no tensor {name} in its weights{why}")
    if found.dtype not in form.dtypes:
        why = f", and the files have no {name}{quantization.endings[-1]}" if quantization is not None else NO_CONFIG
        why = why if form.dtypes == FLOATS else ""
        raise ValueError(f"{found.file}: {name} is {found.dtype}{why}; allowed: {', '.join(form.dtypes)}")
    if found.shape != form.shape:
        raise ValueError(
            f"{found.file}: {name} is {list(found.shape)}, and {list(form.shape)} in the model of config.json"
        )


def _check_extra(
    directory: Path,
    name: str,
    tensor: StoredTensor,
    found: Mapping[str, StoredTensor],
    model: HfConfig,
    unused: range,
) -> None:
    """Reject a tensor that the model lacks, except RoPE buffers, unused MTP layers and a tied output weight."""
    layer = _OF_LAYER.match(name)
    is_unused = layer is not None and int(layer[1]) in unused
    is_head = name == model.name_of(HEAD)
    if name.endswith(_ROPE_BUFFER) or is_unused or model.is_copied(name) or (is_head and model.has_value_head):
        return
    if not is_head or not model.tie_word_embeddings:
        raise ValueError(f"{tensor.file}: the model of config.json has no tensor {name}")
    _check_tied(directory, tensor, found[model.name_of(EMBEDDING)])


def _check_tied(directory: Path, head: StoredTensor, embedding: StoredTensor) -> None:
    """Reject an output weight that is not the embedding it should be tied to."""
    if head.size_bytes > _MAX_COMPARED_BYTES:
        raise ValueError(
            f"{head.file}: {HEAD} has {head.size_bytes:,} bytes beside tie_word_embeddings = true; at most "
            f"{_MAX_COMPARED_BYTES:,} are compared with {EMBEDDING}: remove the tensor"
        )
    if not _is_same(head, embedding):
        raise ValueError(
            f"{head.file}: {HEAD} differs from {EMBEDDING}, but {directory / 'config.json'} "
            f"has tie_word_embeddings = true: set it to false"
        )


def _is_same(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors hold the same bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    ours, theirs = one.data(), other.data()
    starts = range(0, len(ours), _COMPARED_BYTES)
    return all(np.array_equal(ours[at : at + _COMPARED_BYTES], theirs[at : at + _COMPARED_BYTES]) for at in starts)
