"""Publishes weight versions as the trainer does, from tensors in memory."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from actors.trainer.models.shards import bytes_of, entry_of, write_weights
from actors.trainer.weights.delta import DeltaWriter
from actors.trainer.weights.publish import Published, Versions, Written
from runtime.models.checksums import checksums_of
from runtime.models.file_sums import sum_of
from runtime.models.safetensors import safetensors_files

Weights = Mapping[str, Tensor]


def drawn(seed: int = 0) -> dict[str, Tensor]:
    """Draw three matrices."""
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{index}.w": torch.randn(40, 3, generator=generator).bfloat16() for index in range(3)}


def changed(weights: Weights, number: int) -> dict[str, Tensor]:
    """Make the next weights: two elements differ."""
    after = {name: tensor.clone() for name, tensor in weights.items()}
    after["layers.1.w"][number % 40, 1] += 1
    after["layers.2.w"][number % 40, 2] -= 1
    return after


def publish(versions: Versions, number: int, weights: Weights, *, whole: bool = False) -> Published:
    """Write a version as one rank does."""
    begun = versions.begin(number, whole=whole)
    write_weights(weights, begun.whole)
    tensors = []
    if begun.delta is not None and begun.base is not None:
        writer = DeltaWriter(begun.delta, begun.base, checksums_of(begun.base).tensors)
        for name, tensor in weights.items():
            writer.write(entry_of(name, tensor), bytes_of(tensor))
        tensors = writer.close()
    files = {file.name: sum_of(file) for file in safetensors_files(begun.whole)}
    return versions.complete(begun, Written(checksums_of(begun.whole).tensors, tensors, files=files))


def flip(file: Path, place: int) -> None:
    """Flip a bit of one byte. A negative place counts from the end."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
