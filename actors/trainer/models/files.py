"""Model directories in Hugging Face's format: read one tensor at a time, and written."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from actors.trainer.models.sources import Cut, WeightSource
from runtime.checksums import INDEX_FILE, SINGLE_FILE

SHARD_BYTES: Final = 5_000_000_000  # of tensors in a file
_COPIED = ("config.json", "generation_config.json")


def file_source(directory: Path) -> WeightSource:
    """Weights of a model directory, read from its safetensors files one tensor, or the asked part of one, at a time.

    Raises:
        ValueError: the directory has no safetensors file.
    """
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if index.exists():
        weight_map: dict[str, str] = msgspec.json.decode(index.read_bytes())["weight_map"]
    elif single.exists():
        with safe_open(single, framework="pt") as file:
            weight_map = dict.fromkeys(file.keys(), single.name)
    else:
        raise ValueError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")

    def read(name: str, cut: Cut | None = None) -> Tensor:
        if name not in weight_map:
            raise ValueError(f"{directory} has no tensor {name}")
        with safe_open(directory / weight_map[name], framework="pt") as file:
            return file.get_tensor(name) if cut is None else _part(file.get_slice(name), cut)

    return read


def _part(whole: Any, cut: Cut) -> Tensor:
    """Read a part; the rest of the tensor stays on the disk."""
    size = -(-whole.get_shape()[cut.dim] // cut.count)
    begin, end = cut.index * size, (cut.index + 1) * size
    return whole[begin:end] if cut.dim == 0 else whole[:, begin:end]


def write_model(
    weights: Mapping[str, Tensor], directory: Path, *, model_directory: Path, tokenizer: bool = False
) -> None:
    """Write a Hugging Face model directory.

    Args:
        weights: whole tensors by name.
        directory: exists.
        model_directory: where the configuration is copied from.
        tokenizer: copy all other small files too and have config.json say the dtype that is written, so that the
            directory stands on its own.
    """
    _write_weights(weights, directory)
    copy_small_files(model_directory, directory, tokenizer=tokenizer)
    if tokenizer:
        set_dtype(directory / "config.json", str(next(iter(weights.values())).dtype).removeprefix("torch."))


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
    config.write_bytes(msgspec.json.format(msgspec.json.encode(values | dict.fromkeys(keys, dtype)), indent=2) + b"\n")


def _write_weights(weights: Mapping[str, Tensor], directory: Path) -> None:
    """One file, or shards and their index."""
    shards = list(_shards(weights))
    files = [SINGLE_FILE]
    if len(shards) > 1:
        files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        size = sum(tensor.nbytes for tensor in weights.values())
        places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (directory / INDEX_FILE).write_bytes(msgspec.json.encode(index))
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, directory / file, metadata={"format": "pt"})


def _shards(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors in their order, as many at a time as fit; a larger one alone."""
    shard, size = dict[str, Tensor](), 0
    for name, tensor in weights.items():
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard
