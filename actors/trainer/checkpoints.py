"""Checkpoint directories of a run: list complete ones, prune old ones, set damaged ones aside. No torch.

The checkpoint of train step 40 by the trainer's third incarnation is `0003/step-00000040`. Every incarnation writes to
its own directory, so a predecessor that is still alive cannot interfere. A damaged checkpoint is renamed to
`0003/damaged-step-00000040`; no start reads or deletes it.
"""

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec

from actors.trainer.file_checksums import damage_of
from actors.trainer.lora.saved import SavedLora, compare
from actors.trainer.models.config import HfConfig, with_value_head
from runtime.models.checkpoint_files import CHECKPOINTS, CHECKSUMS_FILE
from runtime.models.directory import ModelError, read_json
from runtime.models.family import families
from runtime.report.summary import KeptCheckpoint
from runtime.settings.tables.trainer import MegatronConfig
from runtime.settings.topology import Topology

RUN_FILE: Final = "run.json"  # in a checkpoint: its metadata
METADATA_FILE: Final = "metadata.json"  # in a checkpoint, the last file that Megatron writes
TRACKER: Final = "latest_checkpointed_iteration.txt"  # written by Megatron-LM next to its checkpoints
RELEASE: Final = "release"  # in that file, and the name of the directory: a checkpoint of weights alone
BACKEND: Final = "torch_dist"  # format of our checkpoints; the only Megatron-LM format that can be read
CRITIC: Final = "critic"  # entry of the critic's state; its tensors are saved under names that begin with "critic."
DAMAGED: Final = "damaged-"  # name prefix of a damaged checkpoint
WITHOUT_EFFECT: Final = ("initializer_range", "max_position_embeddings", "num_unused_mtp_layers")  # on the computation
_NAME: Final = re.compile(r"step-(\d{8})")
_RENAMED: Final = {  # keys of experts, in the version before and now
    "moe_intermediate_size": "size",
    "shared_intermediate_size": "shared_size",
}
_KEPT: Final = (  # keys of a model that the version before had too
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "tie_word_embeddings"),
    *("max_position_embeddings", "initializer_range", "num_mtp_layers", "num_unused_mtp_layers"),
    *("has_value_head", "has_value_bias"),
)
_MEGATRON_LM: Final = re.compile(rf"iter_\d{{7,}}|{RELEASE}")


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A complete checkpoint. Checkpoints sort by train steps, then by incarnation."""

    step: int  # train steps that it contains
    incarnation: int
    path: Path


def directory_of(root: Path, *, step: int, incarnation: int) -> Path:
    """Return the path of a complete checkpoint."""
    return root / name_of(step=step, incarnation=incarnation)


def name_of(*, step: int, incarnation: int) -> str:
    """Return the name of a checkpoint in the directory of checkpoints."""
    return f"{incarnation:04d}/step-{step:08d}"


def place_of_critic(path: Path) -> Path:
    """Return where a checkpoint has its critic: a critic on ranks of its own wrote a directory inside of it."""
    own = path / CRITIC
    return own if own.is_dir() else path


def checkpoints_in(root: Path) -> list[Checkpoint]:
    """List complete checkpoints, oldest first."""
    return [found for found in _named_in(root) if (found.path / METADATA_FILE).is_file()]


def _named_in(root: Path) -> list[Checkpoint]:
    """List directories named like a checkpoint, oldest first. A directory gets this name once it is complete."""
    found: list[Checkpoint] = []
    for path in root.glob("[0-9]*/step-*"):
        match = _NAME.fullmatch(path.name)
        if match:
            found.append(Checkpoint(int(match[1]), int(path.parent.name), path))
    return sorted(found)


class DamagedCheckpoint(NamedTuple):
    """A damaged checkpoint."""

    step: int  # train steps that it should contain
    path: Path  # its new path, if it was renamed
    reason: str  # the damaged file and its damage


def newest_undamaged(root: Path, *, step: int | None = None) -> tuple[Checkpoint | None, list[DamagedCheckpoint]]:
    """Find the newest checkpoint without damage, as the next start will. Changes nothing: the run may be at work.

    Args:
        root: directory of the checkpoints.
        step: look only at checkpoints of this train step; None: at all.

    Returns:
        The checkpoint, or None, and the damaged ones that are newer, newest first.

    Raises:
        ValueError: an earlier version of the trainer wrote a checkpoint without checksums.
        OSError: a file cannot be opened.
    """
    damaged: list[DamagedCheckpoint] = []
    for each in reversed(_named_in(root)):
        if step not in (None, each.step):
            continue
        damage = _damage_of(each.path, thorough=True)
        if damage is None:
            return each, damaged
        damaged.append(DamagedCheckpoint(each.step, each.path, damage))
    return None, damaged


def kept_of(run_directory: Path) -> KeptCheckpoint | None:
    """Look which checkpoint a run can continue from. None: it has no checkpoint here, damaged or not.

    Raises:
        ValueError: an earlier version of the trainer wrote a checkpoint without checksums.
        OSError: a file cannot be opened.
    """
    newest, damaged = newest_undamaged(run_directory / CHECKPOINTS)
    if newest is None and not damaged:
        return None
    return KeptCheckpoint(
        step=newest.step if newest else 0,
        damages=tuple(f"{each.path} is damaged: {each.reason}" for each in damaged),
    )


def set_aside_damaged(root: Path, *, thorough: bool = True) -> list[DamagedCheckpoint]:
    """Rename damaged checkpoints so that no start reads them.

    Every checkpoint with a missing file or a wrong file size is damaged. With `thorough`, the others are hashed from
    the newest back to the first undamaged one.

    Args:
        root: directory of the checkpoints.
        thorough: also hash files; otherwise compare only sizes.

    Raises:
        ValueError: an earlier version of the trainer wrote a checkpoint without checksums.
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
    return [DamagedCheckpoint(each.step, _renamed(each.path), damage) for each, damage in damages.items()]


def _damage_of(path: Path, *, thorough: bool) -> str | None:
    damage = damage_of(path, thorough=thorough)
    if damage is not None and not (path / CHECKSUMS_FILE).exists() and _is_of_earlier_version(path):
        raise _too_old(path)
    return damage


def _too_old(path: Path) -> ValueError:
    return ValueError(f"{path} was written by an earlier version of the trainer, and is no longer read")


def _is_of_earlier_version(path: Path) -> bool:
    try:
        run = read_json(path, RUN_FILE, dict[str, Any])
    except ModelError:
        return False
    return not run.get("has_checksums", False)


def _renamed(path: Path) -> Path:
    names = (f"{DAMAGED}{path.name}{again}" for again in ("", *(f".{number}" for number in range(2, 1000))))
    free = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    path.rename(free)
    return free


def prune_checkpoints(root: Path, keep: int) -> list[Checkpoint]:
    """Delete unfinished checkpoints and all but the newest `keep` complete ones.

    Returns:
        The remaining checkpoints, oldest first.
    """
    found = checkpoints_in(root)
    for path in (*(checkpoint.path for checkpoint in found[:-keep]), *root.glob("[0-9]*/.step-*")):
        shutil.rmtree(path, ignore_errors=True)
    return found[-keep:]


class SavedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a checkpoint (`run.json`), for users and for a run that starts from it."""

    run: str  # its name
    step: int  # train steps that it contains
    frontier: int  # train steps in the run's log at that time; above `step` while lost steps are trained again
    steps_before: int  # train steps of the checkpoint that the run started from
    incarnation: int
    dtype: str
    model: HfConfig
    num_processes: int
    megatron: MegatronConfig
    use_distributed_optimizer: bool
    critic: HfConfig | None = None  # None: it has no critic
    lora: SavedLora | None = None  # None: it has all weights
    has_checksums: bool = False  # checkpoints of earlier versions have no checksums

    def check(
        self,
        path: Path,
        model: HfConfig,
        *,
        lora: SavedLora | None,
        dtype: str | None,
        resumes: bool = False,
        critic: HfConfig | None = None,
    ) -> None:
        """Reject a checkpoint of another model, of other adapters, or of another critic.

        Args:
            path: directory of the checkpoint.
            model: model of the run that continues from it.
            lora: adapters of that run; None: it trains all weights.
            dtype: training dtype of that run; None: it loads only the weights.
            resumes: the same run continues; otherwise a new run starts, whose context may be longer.
            critic: critic of that run; None: it needs none.

        Raises:
            ValueError: the models or dtypes differ, or an earlier version wrote the checkpoint. The message says which.
        """
        _compare(path, "model", self.model, model, resumes=resumes)
        compare(path, self.lora, lora)
        if critic is not None and self.critic is not None:
            _compare(path, "critic", self.critic, critic, resumes=resumes)
        elif critic is not None and resumes:
            raise ValueError(f'{path} has no critic, which algorithm.estimator.type = "ppo" continues with')
        if resumes and not self.has_checksums:
            raise _too_old(path)
        if dtype not in (None, self.dtype):
            raise ValueError(
                f"{path} was trained in {self.dtype}, and its optimizer's state does not fit model.dtype = {dtype}: "
                f"set model.dtype = {self.dtype}, or load only the weights with trainer.load_weights_only = true"
            )


def _compare(path: Path, role: str, there: HfConfig, here: HfConfig, *, resumes: bool) -> None:
    saved, expected = dict(_values("", there)), dict(_values("", here))
    for name in (*expected, *saved):
        old, new = (_shown(values.get(name)) for values in (saved, expected))
        if old != new and (resumes or name not in WITHOUT_EFFECT):
            raise ValueError(
                f"{path} is of another {role}: {name} is {old} in the checkpoint, and {new} in config.json"
            )


def _values(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a configuration's values by dotted name."""
    values = msgspec.to_builtins(value)
    if isinstance(values, list | tuple):
        values = dict(enumerate(cast("Sequence[Any]", values)))
    if not isinstance(values, dict):
        yield prefix, values
        return
    for name, each in cast("dict[str, Any]", values).items():
        yield from _values(f"{prefix}.{name}" if prefix else name, each)


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()


class _Metadata(msgspec.Struct, frozen=True):
    """The used part of Megatron-LM's metadata.json."""

    sharded_backend: Any = None


class StartCheckpoint(NamedTuple):
    """A checkpoint that a new run can start from."""

    path: Path
    of_megatron_lm: bool = False  # False: written by a Physarum run


def beginning_of(
    topology: Topology, shape: HfConfig, critic: HfConfig | None = None, *, thorough: bool = False
) -> StartCheckpoint | None:
    """Find the checkpoint that a run without its own checkpoints starts from (`trainer.load`).

    Args:
        topology: topology of the run.
        shape: model of the run.
        critic: critic of the run. If the checkpoint has none, it starts from the policy in the checkpoint.
        thorough: hash all files of the checkpoint; otherwise compare only sizes.

    Returns:
        The checkpoint, or None if the run starts from the model's weights.

    Raises:
        ValueError: the model cannot start from trainer.load. The message says why.
    """
    trainer = topology.trainer
    if trainer.load is None:
        return None
    if (path := megatron_lm_checkpoint_at(Path(trainer.load))) is not None:
        if trainer.lora.rank:
            raise ValueError(f"{path} is a Megatron-LM checkpoint: not implemented yet with trainer.lora")
        if not trainer.load_weights_only and not trainer.optimizer.use_distributed_optimizer:
            raise ValueError(
                f"{path} is a Megatron-LM checkpoint: set trainer.optimizer.use_distributed_optimizer = true to load "
                f"its optimizer, or trainer.load_weights_only = true to load only the weights"
            )
        return StartCheckpoint(path, of_megatron_lm=True)
    path, saved = checkpoint_at(Path(trainer.load))
    if (damage := _damage_of(path, thorough=thorough)) is not None:
        raise ValueError(f"{path} is damaged: {damage}")
    dtype = None if trainer.load_weights_only else topology.model.dtype
    saved.check(path, shape, lora=SavedLora.of(topology, shape), dtype=dtype, critic=critic)
    if critic is not None and saved.critic is None and topology.critic.hf_checkpoint is None:
        _compare(path, "critic", with_value_head(saved.model), critic, resumes=False)
    return StartCheckpoint(path)


def megatron_lm_checkpoint_at(path: Path) -> Path | None:
    """Find the Megatron-LM checkpoint in a directory. None: it has none.

    A directory of several checkpoints names the one to load in its tracker file.

    Raises:
        ValueError: the checkpoint cannot be read. The message says why.
    """
    tracker = path / TRACKER
    if tracker.is_file():
        newest = tracker.read_text().strip()
        if not newest.isdigit() and newest != RELEASE:
            raise ValueError(f"{tracker} holds {newest!r}; expected the number of an iteration, or release")
        path /= f"iter_{int(newest):07d}" if newest.isdigit() else newest
    elif not _MEGATRON_LM.fullmatch(path.name):
        return None
    if not (path / METADATA_FILE).is_file():
        if any(path.glob("mp_rank_*")):
            raise ValueError(
                f"{path} is in Megatron-LM's format torch, which is sharded for its ranks: save it as {BACKEND}"
            )
        raise ValueError(f"{path} is not a complete checkpoint of Megatron-LM: it has no {METADATA_FILE}")
    backend = read_json(path, METADATA_FILE, _Metadata).sharded_backend
    if backend != BACKEND:
        raise ValueError(f"{path} is in Megatron-LM's format {backend}; supported: {BACKEND}")
    return path


def checkpoint_at(path: Path) -> tuple[Path, SavedRun]:
    """Return the checkpoint in a directory, or the newest one of a run's directory, with its metadata.

    Raises:
        ValueError: there is no checkpoint that is complete and readable.
    """
    if not path.is_dir():
        raise ValueError(f"{path}: no such directory")
    if not (path / METADATA_FILE).is_file():
        found = checkpoints_in(path / CHECKPOINTS)
        if not found:
            raise ValueError(f"{path} is neither a run with a complete checkpoint nor a complete checkpoint")
        path = found[-1].path
    return path, saved_run(path)


def in_layers(model: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a model in a checkpoint as this version writes it: layer by layer.

    Args:
        model: a description of this version, which is returned as it is, or of the version before.
    """
    if "layers" in model:
        return model
    experts = model["experts"]
    layers = [
        {"attention": _attention(model), "mlp": _experts(experts) if has_experts else _mlp(model)}
        for has_experts in (experts["layers"] if experts else model["num_hidden_layers"] * [False])
    ]
    architecture = families()[model["model_type"]].architecture
    return {**{key: model[key] for key in _KEPT if key in model}, "architecture": architecture, "layers": layers}


def _attention(model: dict[str, Any]) -> dict[str, Any]:
    heads, mla = {"heads": model["num_attention_heads"], "rope": model["rope"]}, model["mla"]
    if mla:
        return {"type": "Mla", **heads, **mla}
    return {
        "type": "Attention",
        **heads,
        "kv_heads": model["num_key_value_heads"],
        "head_dim": model["head_dim"],
        "qkv_bias": model["has_qkv_bias"],
        "head_norms": model["has_qk_norm"],
    }


def _mlp(model: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Mlp", "size": model["intermediate_size"]}


def _experts(experts: dict[str, Any]) -> dict[str, Any]:
    values = {_RENAMED.get(key, key): value for key, value in experts.items() if key != "layers"}
    return {"type": "Experts", **values}


def saved_run(path: Path) -> SavedRun:
    """Read the metadata of a checkpoint.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        saved = read_json(path, RUN_FILE, dict[str, Any])
        for role in ("model", "critic"):
            if saved.get(role):
                saved[role] = in_layers(saved[role])
        return msgspec.convert(saved, SavedRun)
    except (KeyError, TypeError) as error:  # in a description of the version before
        raise ValueError(f"{path / RUN_FILE} cannot be read: it describes no model: {error!r}") from error
    except (ModelError, msgspec.ValidationError) as error:
        raise ValueError(f"{path / RUN_FILE} cannot be read: {error}") from error


def newest_of_run(directory: Path) -> tuple[Path, SavedRun] | None:
    """Return a run's newest complete checkpoint with its metadata. None: the run has none.

    Raises:
        ValueError: the metadata cannot be read.
    """
    found = checkpoints_in(directory / CHECKPOINTS)
    return (found[-1].path, saved_run(found[-1].path)) if found else None
