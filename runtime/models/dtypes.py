"""The dtype of a recipe that names none: that of config.json or of the tensors, if the processor is fast in it."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Final, Literal

import msgspec

from runtime.models.config import read_model
from runtime.models.directory import CONFIG, ModelError, read_json
from runtime.models.safetensors import read_tensors
from runtime.models.size import is_large
from runtime.util.formatting import count_of

Dtype = Literal["float32", "bfloat16"]
TRAINED: Final[dict[str | None, Dtype]] = {  # by the name in config.json or a file; float16 trains in bfloat16
    **dict.fromkeys(("float32", "float64", "F32", "F64"), "float32"),
    **dict.fromkeys(("bfloat16", "float16", "BF16", "F16"), "bfloat16"),
}
ROUNDED: Final = {"bfloat16": ("F64", "F32", "F16"), "float32": ("F64",)}  # dtypes with values that it does not have


CPU_INFO: Final = Path("/proc/cpuinfo")
WITH_BFLOAT16: Final = ("avx512_bf16", "amx_bf16")  # features of processors that multiply bfloat16 faster than float32


class StoredDtype(msgspec.Struct, frozen=True):
    """The dtype that a model directory is trained in, and how it was found."""

    dtype: Dtype
    note: str = ""  # about a dtype that config.json does not name, or of tensors that are rounded


class _Config(msgspec.Struct, frozen=True):
    """The dtype in config.json; transformers 4 uses the longer name."""

    dtype: str | None = None
    torch_dtype: str | None = None


def stored_dtype(directory: Path, *, has_weights: bool) -> StoredDtype | None:
    """Find the dtype of a model directory. All of its tensors count; transformers takes that of the first one.

    Args:
        directory: of the model.
        has_weights: its files are trained; otherwise its weights are drawn.

    Returns:
        None if the directory names no dtype and has no readable weights.
    """
    try:
        config = read_json(directory, CONFIG, _Config)
    except ModelError:
        return None
    key = "torch_dtype" if config.dtype is None else "dtype"
    named = TRAINED.get(config.dtype or config.torch_dtype)
    try:
        weights, tensors = _counted(directory) if has_weights else ({}, {})
    except (OSError, ValueError):
        weights, tensors = {}, {}
    if named is None and not weights:
        return None
    most = max(weights, key=lambda stored: (weights[stored], TRAINED[stored] == "float32"), default="")
    dtype = named or TRAINED[most]
    rounded = {stored: count for stored, count in tensors.items() if stored in ROUNDED[dtype]}
    if named is not None and not rounded:
        return StoredDtype(dtype)
    why = f"{key} in {CONFIG}" if named is not None else f"as {CONFIG} names none, that of most weights"
    found = " and ".join(f"{count_of(tensors[each], 'tensor')} in {each}" for each in sorted(weights))
    loss = f"; those in {' and '.join(sorted(rounded))} are rounded" if rounded else ""
    return StoredDtype(dtype, f"{why}; its files have {found}{loss}")


def dtype_on_cpu(directory: Path) -> StoredDtype | None:
    """Find the dtype in which the CPU computes a model: the stored one, unless bfloat16 is slow or the model a toy.

    Returns:
        None for a toy, whose results then do not depend on the processor, and for a directory that cannot be read.
    """
    try:
        if not is_large(read_model(directory).shape):
            return None
    except (OSError, ValueError, ModelError):  # reading the model reports it
        return None
    found = stored_dtype(directory, has_weights=True)
    if found is None or found.dtype == "float32":
        return found
    if (feature := bfloat16_feature()) is None:
        return StoredDtype("float32", f"as the processor has no {' or '.join(WITH_BFLOAT16)}")
    return StoredDtype(found.dtype, found.note or f"as in {CONFIG}; the processor has {feature}")


def bfloat16_feature() -> str | None:
    """Find the feature of this processor by which bfloat16 is faster than float32; None if it has none."""
    return next((name for name in WITH_BFLOAT16 if name in _features()), None)


def _features() -> list[str]:
    """Read the features of the first processor; empty where the system does not say them as Linux does."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return flags.split()


def _counted(directory: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return the numbers of weights and of tensors by dtype, as safetensors spells it."""
    weights, tensors = defaultdict[str, int](int), defaultdict[str, int](int)
    for tensor in read_tensors(directory).values():
        if tensor.dtype in TRAINED:
            weights[tensor.dtype] += math.prod(tensor.shape)
            tensors[tensor.dtype] += 1
    return weights, tensors
