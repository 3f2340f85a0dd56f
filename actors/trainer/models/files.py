"""Weights on disk for engines to take: `v000007/model.safetensors` and config.json, complete or not there at all."""

import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safetensors.torch import save_file
from torch import Tensor

from runtime.checksums import SINGLE_FILE, checksums_of

KEEP_VERSIONS: Final = 2
_NAME = re.compile(r"v(\d{6,})")
_COPIED = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class Published:
    """A set of weights on disk."""

    path: Path | None  # none: not written
    checksum: str
    size_bytes: int
    took_s: float  # to write it, from the model's tensors on


NOT_WRITTEN: Final = Published(path=None, checksum="", size_bytes=0, took_s=0.0)


def publish_weights(weights: Mapping[str, Tensor], root: Path, *, version: int, model_directory: Path) -> Published:
    """Write a version; it appears under its name when it is complete.

    Args:
        weights: whole tensors by Hugging Face name, contiguous, on the CPU.
        root: where versions lie.
        version: one that was never announced; what lies there from a crash before the announcement is replaced.
        model_directory: where config.json is copied from.
    """
    begin = time.perf_counter()
    path = root / f"v{version:06d}"
    unfinished = root / f".{path.name}"
    for leftover in (unfinished, path):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_model(weights, unfinished, model_directory=model_directory)
    checksum = checksums_of(unfinished).total
    size_bytes = (unfinished / SINGLE_FILE).stat().st_size
    unfinished.rename(path)
    return Published(path.resolve(), checksum, size_bytes, time.perf_counter() - begin)


def write_model(
    weights: Mapping[str, Tensor], directory: Path, *, model_directory: Path, tokenizer: bool = False
) -> None:
    """Write a Hugging Face model directory.

    Args:
        weights: whole tensors by name.
        directory: exists.
        model_directory: where the configuration is copied from.
        tokenizer: copy all other small files too, so that the directory stands on its own.
    """
    save_file(dict(weights), directory / SINGLE_FILE, metadata={"format": "pt"})
    for source in model_directory.iterdir():
        is_weights = source.suffix in (".safetensors", ".bin") or source.name.endswith(".index.json")
        if source.is_file() and not is_weights and (tokenizer or source.name in _COPIED):
            shutil.copyfile(source, directory / source.name)


def prune_versions(root: Path, *, confirmed: int) -> None:
    """Delete versions that nobody needs: neither among the newest, nor newer than what engines confirmed.

    Args:
        root: where versions lie.
        confirmed: the newest version that an engine holds; 0: none yet.
    """
    versions = sorted((int(match[1]), path) for path in root.glob("v*") if (match := _NAME.fullmatch(path.name)))
    for version, path in versions[:-KEEP_VERSIONS]:
        if version < confirmed:
            shutil.rmtree(path, ignore_errors=True)
