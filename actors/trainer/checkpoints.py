"""Which checkpoints a run has, without torch: directories that are either complete or ignored.

A checkpoint of train step 40 by the third start of the trainer is `0003/step-00000040`: every incarnation writes in a
directory of its own, so that a predecessor that is not quite dead disturbs nobody.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CHECKPOINTS: Final = "checkpoints"  # in the run directory
_NAME: Final = re.compile(r"step-(\d{8})")


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A complete checkpoint. The newest has the most train steps; of equals the latest incarnation's."""

    step: int  # train steps that it contains
    incarnation: int
    path: Path


def directory_of(root: Path, *, step: int, incarnation: int) -> Path:
    """Where a checkpoint is once it is complete."""
    return root / f"{incarnation:04d}" / f"step-{step:08d}"


def checkpoints_in(root: Path) -> list[Checkpoint]:
    """Complete checkpoints, oldest first."""
    found: list[Checkpoint] = []
    for path in root.glob("[0-9]*/step-*"):
        match = _NAME.fullmatch(path.name)
        if match and (path / "metadata.json").is_file():  # the last file that Megatron writes
            found.append(Checkpoint(int(match[1]), int(path.parent.name), path))
    return sorted(found)


def prune_checkpoints(root: Path, keep: int) -> list[Checkpoint]:
    """Delete all but the newest checkpoints, and what a crash left half written; return those left."""
    kept = checkpoints_in(root)[-keep:]
    paths = {checkpoint.path for checkpoint in kept}
    for path in (*root.glob("[0-9]*/step-*"), *root.glob("[0-9]*/.step-*")):
        if path not in paths:
            shutil.rmtree(path, ignore_errors=True)
    return kept
