"""Weights on disk for engines to take: `v000007/model.safetensors` and config.json, complete or not there at all."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from actors.trainer.models.files import copy_small_files
from messages import WeightProbe
from runtime.checksums import safetensors_files
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
    took_s: float  # to gather, write and probe it
    probe: WeightProbe | None = None


NOT_WRITTEN: Final = Published(path=None, checksum="", size_bytes=0, took_s=0.0)


def begin_version(root: Path, version: int) -> Path:
    """A directory to write a version into; what a crash before the announcement left under its name is gone.

    Args:
        root: where versions lie.
        version: one that was never announced.
    """
    path = root / f"v{version:06d}"
    unfinished = root / f".{path.name}"
    for leftover in (unfinished, path):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def complete_version(unfinished: Path, *, model_directory: Path) -> tuple[Path, int]:
    """Give a version whose weights are written its name; return its place, and bytes of its files of weights.

    Args:
        unfinished: as `begin_version` made it.
        model_directory: where config.json is copied from.
    """
    copy_small_files(model_directory, unfinished, tokenizer=False)
    size_bytes = sum(file.stat().st_size for file in safetensors_files(unfinished))
    path = unfinished.with_name(unfinished.name.removeprefix("."))
    complete_directory(unfinished, path)
    return path.resolve(), size_bytes


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
