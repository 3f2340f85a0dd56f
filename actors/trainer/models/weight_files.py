"""Checks that a directory's safetensors files hold the model that its config.json describes. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from actors.trainer.models.config import HfConfig
from actors.trainer.models.shapes import copies_of, hf_shapes
from runtime.models.safetensors import StoredTensor, read_tensors

FLOATS: Final = ("F64", "F32", "BF16", "F16")  # dtypes of weights, as safetensors spells them
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
_ROPE_BUFFER: Final = "rotary_emb.inv_freq"  # computed from config.json; older tools wrote it
_COMPARED_BYTES: Final = 64 << 20  # compared at a time


def check_weights(directory: Path, model: HfConfig) -> None:
    """Reject files that hold anything other than the model's tensors.

    Raises:
        ValueError: names the tensor that is missing, unsupported or unexpected.
        OSError: a file is missing or cannot be read.
    """
    found, expected = read_tensors(directory), hf_shapes(model)
    copies = {copy for name in expected for copy in copies_of(name, model)}  # MTP duplicates are never read
    for name, shape in expected.items():
        if name not in copies:
            _check_tensor(directory, name, shape, found.get(name), model)
    for name, tensor in found.items():
        if name not in expected:
            _check_mtp(directory, name, tensor, found, model)


def _check_tensor(
    directory: Path, name: str, shape: tuple[int, ...], found: StoredTensor | None, model: HfConfig
) -> None:
    if found is None:
        trained = name.startswith(f"model.layers.{model.num_hidden_layers}.")
        why = ": trainer.megatron.mtp_num_layers = 1 trains a layer that these weights lack" if trained else ""
        raise ValueError(f"{directory} has no tensor {name} in its weights{why}")
    if found.dtype not in FLOATS:
        raise ValueError(
            f"{found.file}: {name} is {found.dtype}, and config.json has no quantization_config that says how it is "
            f"scaled; allowed: {', '.join(FLOATS)}"
        )
    if found.shape != shape:
        raise ValueError(f"{found.file}: {name} is {list(found.shape)}, and {list(shape)} in the model of config.json")


def _check_mtp(
    directory: Path, name: str, tensor: StoredTensor, found: Mapping[str, StoredTensor], model: HfConfig
) -> None:
    """Check a tensor that is not part of the model."""
    first = model.num_hidden_layers + model.num_mtp_layers
    unused = tuple(f"model.layers.{first + number}." for number in range(model.num_unused_mtp_layers))
    if name.endswith(_ROPE_BUFFER) or name.startswith(unused):
        return
    if name == HEAD and model.tie_word_embeddings:
        if not _is_same(tensor, found[EMBEDDING]):
            raise ValueError(
                f"{tensor.file}: {HEAD} differs from {EMBEDDING}, but {directory / 'config.json'} "
                f"has tie_word_embeddings = true: set it to false"
            )
        return
    raise ValueError(f"{tensor.file}: the model of config.json has no tensor {name}")


def _is_same(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors hold the same bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    ours, theirs = one.data(), other.data()
    starts = range(0, len(ours), _COMPARED_BYTES)
    return all(np.array_equal(ours[at : at + _COMPARED_BYTES], theirs[at : at + _COMPARED_BYTES]) for at in starts)
