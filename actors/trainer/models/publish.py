"""Weights on disk for engines to take: `v000007/model.safetensors` and config.json, complete or not there at all."""

import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch import Tensor

from actors.trainer.models.files import write_model
from messages import WeightProbe
from runtime.checksums import checksums_of, safetensors_files
from runtime.files import complete_directory

WEIGHTS: Final = "weights"  # in the run directory
KEEP_VERSIONS: Final = 2
_NAME = re.compile(r"v(\d{6,})")


@dataclass(frozen=True)
class Published:
    """A set of weights on disk."""

    path: Path | None  # none: not written
    checksum: str
    size_bytes: int
    took_s: float  # to write it, from the model's tensors on
    probe: WeightProbe | None = None  # added by who has the model


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
    size_bytes = sum(file.stat().st_size for file in safetensors_files(unfinished))
    complete_directory(unfinished, path)
    return Published(path.resolve(), checksum, size_bytes, time.perf_counter() - begin)


def versions_in(root: Path) -> list[tuple[int, Path]]:
    """Complete versions with their directories, oldest first."""
    return sorted((int(match[1]), path) for path in root.glob("v*") if (match := _NAME.fullmatch(path.name)))


def prune_versions(root: Path, *, confirmed: int) -> None:
    """Delete versions that nobody needs: neither among the newest, nor newer than what engines confirmed.

    Args:
        root: where versions lie.
        confirmed: the newest version that an engine holds; 0: none yet.
    """
    for version, path in versions_in(root)[:-KEEP_VERSIONS]:
        if version < confirmed:
            shutil.rmtree(path, ignore_errors=True)
