"""Which checkpoints a run has, without torch: directories that are complete, ignored, or set aside as damaged.

A checkpoint of train step 40 by the third start of the trainer is `0003/step-00000040`: every incarnation writes in a
directory of its own, so that a predecessor that is not quite dead disturbs nobody. A damaged one is renamed to
`0003/damaged-step-00000040`, which no start reads and no start deletes.
"""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from actors.trainer.file_checksums import CHECKSUMS_FILE, damage_of
from actors.trainer.models.config import HfConfig
from runtime.settings.topology import MegatronConfig, Topology

RUN_FILE: Final = "run.json"  # in a checkpoint
METADATA_FILE: Final = "metadata.json"  # in a checkpoint, the last file that Megatron writes
CHECKPOINTS: Final = "checkpoints"  # in the run directory
TRACKER: Final = "latest_checkpointed_iteration.txt"  # of Megatron-LM, beside its checkpoints
BACKEND: Final = "torch_dist"  # the format of ours, and the only one of Megatron-LM's that is read
DAMAGED: Final = "damaged-"  # what the name of a checkpoint that was set aside begins with
WITHOUT_EFFECT: Final = ("initializer_range", "max_position_embeddings", "num_unused_mtp_layers")  # on what is computed
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
    return [found for found in _named_in(root) if (found.path / METADATA_FILE).is_file()]


def _named_in(root: Path) -> list[Checkpoint]:
    """Directories with the name of a checkpoint, oldest first. Each got its name once it was complete."""
    found: list[Checkpoint] = []
    for path in root.glob("[0-9]*/step-*"):
        match = _NAME.fullmatch(path.name)
        if match:
            found.append(Checkpoint(int(match[1]), int(path.parent.name), path))
    return sorted(found)


class SetAside(NamedTuple):
    """A damaged checkpoint, renamed."""

    step: int  # train steps that it was to contain
    path: Path  # its new name
    reason: str  # which file is damaged, and how


def set_aside_damaged(root: Path, *, thorough: bool = True) -> list[SetAside]:
    """Rename the newest checkpoints up to the first without damage, and all that lack a file or a part of one.

    Args:
        root: of checkpoints.
        thorough: hash all files of the newest; else only sizes are compared.

    Raises:
        ValueError: a checkpoint is of an earlier version, which wrote no checksums.
        OSError: a file cannot be opened.
    """
    found = _named_in(root)
    damages = {each: damage for each in found if (damage := _damage_of(each.path, thorough=False))}
    for each in reversed(found if thorough else []):
        if each in damages:
            continue
        damage = _damage_of(each.path, thorough=True)
        if damage is None:
            break
        damages[each] = damage
    return [SetAside(each.step, _renamed(each.path), damage) for each, damage in damages.items()]


def _damage_of(path: Path, *, thorough: bool) -> str | None:
    damage = damage_of(path, thorough=thorough)
    if damage is not None and not (path / CHECKSUMS_FILE).exists() and _is_of_earlier_version(path):
        raise _too_old(path)
    return damage


def _too_old(path: Path) -> ValueError:
    return ValueError(f"{path} was written by an earlier version of the trainer, and is no longer read")


def _is_of_earlier_version(path: Path) -> bool:
    try:
        said: dict[str, Any] = msgspec.json.decode((path / RUN_FILE).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return False
    return not said.get("has_checksums", False)


def _renamed(path: Path) -> Path:
    names = (f"{DAMAGED}{path.name}{again}" for again in ("", *(f".{number}" for number in range(2, 1000))))
    free = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    path.rename(free)
    return free


def prune_checkpoints(root: Path, keep: int) -> list[Checkpoint]:
    """Delete all complete checkpoints but the newest, and what a crash left half written; return those left."""
    found = checkpoints_in(root)
    for path in (*(checkpoint.path for checkpoint in found[:-keep]), *root.glob("[0-9]*/.step-*")):
        shutil.rmtree(path, ignore_errors=True)
    return found[-keep:]


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
    has_checksums: bool = False  # of its files; those of earlier versions have none

    def check(self, path: Path, model: HfConfig, *, dtype: str | None, resumes: bool = False) -> None:
        """Refuse a checkpoint of another model.

        Args:
            path: of the checkpoint.
            model: that is to go on from it.
            dtype: in which it trains; none: the weights alone are taken.
            resumes: the run that wrote it goes on; else another begins, whose context may be longer.

        Raises:
            ValueError: says what is different, or that an earlier version wrote it.
        """
        saved, expected = dict(_values("", self.model)), dict(_values("", model))
        for name in (*expected, *saved):
            there, here = (_told(values.get(name)) for values in (saved, expected))
            if there != here and (resumes or name not in WITHOUT_EFFECT):
                raise ValueError(f"{path} is of another model: {name} is {there} there, and {here} here (config.json)")
        if resumes and not self.has_checksums:
            raise _too_old(path)
        if dtype not in (None, self.dtype):
            raise ValueError(
                f"{path} was trained in {self.dtype}, and its optimizer's state does not fit model.dtype = {dtype}: "
                f"set that, or take the weights alone with trainer.finetune = true"
            )


def _values(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a configuration says, by dotted names."""
    values = msgspec.to_builtins(value)
    if not isinstance(values, dict):
        yield prefix, values
        return
    for name, each in values.items():
        yield from _values(f"{prefix}.{name}" if prefix else name, each)


def _told(value: Any) -> str:
    return msgspec.json.encode(value).decode()


class Beginning(NamedTuple):
    """A checkpoint that a run can begin from."""

    path: Path
    of_megatron_lm: bool = False  # else of a run of ours


def beginning_of(topology: Topology, shape: HfConfig, *, thorough: bool = False) -> Beginning | None:
    """The checkpoint that a run without one of its own begins from; none: it begins from the model's weights.

    Args:
        topology: of the run.
        shape: its model.
        thorough: hash all files of the checkpoint; else only sizes are compared.

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
    if (damage := _damage_of(path, thorough=thorough)) is not None:
        raise ValueError(f"{path} is damaged: {damage}")
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
    return path, saved_run(path)


def saved_run(path: Path) -> SavedRun:
    """What a checkpoint says of itself.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        return msgspec.json.decode((path / RUN_FILE).read_bytes(), type=SavedRun)
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path / RUN_FILE} cannot be read: {error}") from error


def newest_of_run(directory: Path) -> tuple[Path, SavedRun] | None:
    """The newest complete checkpoint of a run, and what it says of itself; none: it has none.

    Raises:
        ValueError: it cannot be read.
    """
    found = checkpoints_in(directory / CHECKPOINTS)
    return (found[-1].path, saved_run(found[-1].path)) if found else None
