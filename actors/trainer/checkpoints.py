"""Which checkpoints a run has, without torch: directories that are either complete or ignored.

A checkpoint of train step 40 by the third start of the trainer is `0003/step-00000040`: every incarnation writes in a
directory of its own, so that a predecessor that is not quite dead disturbs nobody.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from actors.trainer.models.config import HfConfig
from actors.trainer.models.shapes import hf_shapes
from runtime.settings.topology import MegatronConfig, Topology

RUN_FILE: Final = "run.json"  # in a checkpoint
METADATA_FILE: Final = "metadata.json"  # in a checkpoint, the last file that Megatron writes
CHECKPOINTS: Final = "checkpoints"  # in the run directory
TRACKER: Final = "latest_checkpointed_iteration.txt"  # of Megatron-LM, beside its checkpoints
BACKEND: Final = "torch_dist"  # the format of ours, and the only one of Megatron-LM's that is read
_NAME: Final = re.compile(r"step-(\d{8})")
_MEGATRON_LM: Final = re.compile(r"iter_\d{7,}|release")


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
        if match and (path / METADATA_FILE).is_file():
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


class SavedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of itself, for people and for a run that begins from it."""

    run: str  # its name
    step: int  # train steps that it contains
    frontier: int  # train steps that the run's log knew of then: more, while lost ones are trained again
    steps_before: int  # train steps of the checkpoint that its run began from
    incarnation: int
    dtype: str
    model: HfConfig
    num_processes: int
    megatron: MegatronConfig
    use_distributed_optimizer: bool

    def check(self, path: Path, shape: HfConfig, *, dtype: str | None) -> None:
        """Refuse a checkpoint that another model cannot begin from.

        Args:
            path: of the checkpoint.
            shape: the model.
            dtype: in which it trains; none: the weights alone are taken.

        Raises:
            ValueError: says what is different.
        """
        saved, expected = hf_shapes(self.model), hf_shapes(shape)
        for name in (*expected, *saved):
            if saved.get(name) != expected.get(name):
                has = [f"has {list(one[name])}" if name in one else "has none" for one in (saved, expected)]
                raise ValueError(f"{path} is of another model: of {name} it {has[0]}, and this model {has[1]}")
        if dtype not in (None, self.dtype):
            raise ValueError(
                f"{path} was trained in {self.dtype}, and its optimizer's state does not fit model.dtype = {dtype}: "
                f"set that, or take the weights alone with trainer.finetune = true"
            )


class Beginning(NamedTuple):
    """A checkpoint that a run can begin from."""

    path: Path
    of_megatron_lm: bool = False  # else of a run of ours


def beginning_of(topology: Topology, shape: HfConfig) -> Beginning | None:
    """The checkpoint that a run without one of its own begins from; none: it begins from the model's weights.

    Args:
        topology: of the run.
        shape: its model.

    Raises:
        ValueError: trainer.load names nothing that the model can begin from; says why.
    """
    trainer = topology.trainer
    if trainer.load is None:
        return None
    if (path := megatron_lm_checkpoint_at(Path(trainer.load))) is not None:
        if not trainer.finetune and not trainer.optimizer.use_distributed_optimizer:
            raise ValueError(
                f"{path} is Megatron-LM's, whose optimizer is read with trainer.optimizer.use_distributed_optimizer = "
                f"true; its weights alone with trainer.finetune = true"
            )
        return Beginning(path, of_megatron_lm=True)
    path, saved = checkpoint_at(Path(trainer.load))
    saved.check(path, shape, dtype=None if trainer.finetune else topology.model.dtype)
    return Beginning(path)


def megatron_lm_checkpoint_at(path: Path) -> Path | None:
    """The checkpoint of Megatron-LM in a directory, or the newest in a directory of several; none: it is not one.

    Raises:
        ValueError: it is one that cannot be read; says why.
    """
    tracker = path / TRACKER
    if tracker.is_file():
        told = tracker.read_text().strip()
        if not told.isdigit() and told != "release":
            raise ValueError(f"{tracker} says {told!r}, which is no iteration")
        path /= f"iter_{int(told):07d}" if told.isdigit() else told
    elif not _MEGATRON_LM.fullmatch(path.name):
        return None
    if not (path / METADATA_FILE).is_file():
        if any(path.glob("mp_rank_*")):
            raise ValueError(f"{path} is in Megatron-LM's format torch, cut for its ranks: save it as {BACKEND}")
        raise ValueError(f"{path} is no complete checkpoint of Megatron-LM: it has no {METADATA_FILE}")
    backend = msgspec.json.decode((path / METADATA_FILE).read_bytes()).get("sharded_backend")
    if backend != BACKEND:
        raise ValueError(f"{path} is in Megatron-LM's format {backend}, and only {BACKEND} is read")
    return path


def checkpoint_at(path: Path) -> tuple[Path, SavedRun]:
    """The checkpoint in a directory, or the newest one of a run's directory, and what it says of itself.

    Raises:
        ValueError: there is none that is complete and can be read.
    """
    if not path.is_dir():
        raise ValueError(f"{path}: no such directory")
    if not (path / METADATA_FILE).is_file():
        found = checkpoints_in(path / CHECKPOINTS)
        if not found:
            raise ValueError(f"{path} is neither a run with a complete checkpoint nor a complete checkpoint")
        path = found[-1].path
    try:
        return path, msgspec.json.decode((path / RUN_FILE).read_bytes(), type=SavedRun)
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path / RUN_FILE} cannot be read: {error}") from error
