"""Model directories in Hugging Face's format: read one tensor at a time, and written."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from safetensors import safe_open
from torch import Tensor

from actors.trainer.models.shards import write_weights
from actors.trainer.models.sources import Cut, WeightSource
from runtime.checksums import INDEX_FILE, SINGLE_FILE, safetensors_files, shards_by_tensor
from runtime.settings.topology import WeightFormat
from runtime.weights.fp8 import quantization_config

_COPIED = ("config.json", "generation_config.json")


def file_source(directory: Path) -> WeightSource:
    """Weights of a model directory, read from its safetensors files one tensor, or the asked part of one, at a time.

    Raises:
        ValueError: the directory has no safetensors file, or its index cannot be used.
        FileNotFoundError: a file that the index names is missing.
    """
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if index.exists():
        files = shards_by_tensor(directory)
    elif single.exists():
        (only,) = safetensors_files(directory)
        with safe_open(only, framework="pt") as file:
            files = dict.fromkeys(file.keys(), only)
    else:
        raise ValueError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")

    def read(name: str, cut: Cut | None = None) -> Tensor:
        if name not in files:
            raise ValueError(f"{directory} has no tensor {name}")
        with safe_open(files[name], framework="pt") as file:
            return file.get_tensor(name) if cut is None else _part(file.get_slice(name), cut)

    return read


def _part(whole: Any, cut: Cut) -> Tensor:
    """Read a part; the rest of the tensor stays on the disk."""
    size = -(-whole.get_shape()[cut.dim] // cut.count)
    begin, end = cut.index * size, (cut.index + 1) * size
    return whole[begin:end] if cut.dim == 0 else whole[:, begin:end]


def write_model(weights: Mapping[str, Tensor], directory: Path, *, model_directory: Path) -> None:
    """Write a Hugging Face model directory of tensors that are in memory.

    Args:
        weights: whole tensors by name.
        directory: exists.
        model_directory: where the configuration is copied from.
    """
    write_weights(weights, directory)
    copy_small_files(model_directory, directory, tokenizer=False)


def copy_small_files(model_directory: Path, directory: Path, *, tokenizer: bool) -> None:
    """Copy what a model directory has beside its weights: its configuration, or all of it with the tokenizer."""
    for source in model_directory.iterdir():
        is_weights = source.suffix in (".safetensors", ".bin") or source.name.endswith(".index.json")
        if source.is_file() and not is_weights and (tokenizer or source.name in _COPIED):
            shutil.copyfile(source, directory / source.name)


def set_dtype(config: Path, dtype: str) -> None:
    """Whoever loads a directory takes the dtype that its config.json names, and rounds weights to it."""
    values: dict[str, Any] = msgspec.json.decode(config.read_bytes())
    keys = [key for key in ("dtype", "torch_dtype") if key in values] or ["torch_dtype"]  # the newer and the older name
    _write_config(config, values | dict.fromkeys(keys, dtype))


def set_format(config: Path, weight_format: WeightFormat, shapes: Mapping[str, Sequence[int]]) -> None:
    """Have config.json say in which form the weights beside it are; those as trained are in whatever it says.

    Args:
        config: the file.
        weight_format: of the weights.
        shapes: of all tensors by name.
    """
    if weight_format == "as_trained":
        return
    set_dtype(config, "bfloat16")
    if weight_format == "fp8":
        values: dict[str, Any] = msgspec.json.decode(config.read_bytes())
        _write_config(config, values | {"quantization_config": quantization_config(shapes)})


def _write_config(config: Path, values: Mapping[str, Any]) -> None:
    config.write_bytes(msgspec.json.format(msgspec.json.encode(values), indent=2) + b"\n")
