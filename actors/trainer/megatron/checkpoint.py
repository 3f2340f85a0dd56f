"""Checkpoints of model, optimizer and random state: written and read by all ranks together.

One is written under a name that starts with a dot and renamed when all ranks are done. Rank 0 syncs all of it to the
disk before that, once.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from actors.trainer.checkpoints import RUN_FILE, SavedRun, directory_of
from actors.trainer.megatron.imports import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    dist_checkpointing,
    mcore_to_pyt_state_dict,
    quiet,
    replace_state_dict_keys_with_sharded_keys,
)
from actors.trainer.megatron.rank_model import Replica
from runtime.files import complete_directory

# of a distributed optimizer's state: readable by any layout, and the only one that this version of Megatron can write
FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": False}
DISTRIBUTED = "use_distributed_optimizer"


def save_checkpoint(replica: Replica, root: Path, *, step: int, incarnation: int, said: SavedRun | None = None) -> Path:
    """Write a checkpoint. A collective of all ranks.

    Args:
        replica: what is saved.
        root: where checkpoints lie.
        step: train steps that it contains.
        incarnation: of the trainer.
        said: what it says of itself.

    Returns:
        Its directory. One that is there already is taken as this one.
    """
    path = directory_of(root, step=step, incarnation=incarnation)
    if path.exists():
        return path
    unfinished = path.with_name(f".{path.name}")
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    with quiet():
        dist_checkpointing.save(_state(replica, step=step, loading=False), str(unfinished), _SaveInProcess())
    dist.barrier()
    if dist.get_rank() == 0:
        if said is not None:
            (unfinished / RUN_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(said)))
        complete_directory(unfinished, path)
    return path


def load_checkpoint(replica: Replica, path: Path) -> int:
    """Set model, optimizer and random state. A collective of all ranks.

    Returns:
        Train steps that the state contains.

    Raises:
        ValueError: it was saved by the other kind of optimizer.
        Whatever Megatron raises when files are damaged or belong to another model.
    """
    _check_optimizer(replica, path)
    with quiet():
        state = dist_checkpointing.load(_state(replica, step=0, loading=True), str(path))
    for key, chunk in _named(replica.complete_chunks()).items():
        chunk.load_state_dict(state[key])
    inner = state["optimizer"].get("optimizer", state["optimizer"])  # mixed precision wraps it
    if "state" in inner:
        inner["state"].setdefault("common_step", torch.tensor(0.0))  # Megatron does not save a count of zero
    replica.optimizer.load_state_dict(state["optimizer"])
    _own_step_counts(replica.optimizer)
    torch.set_rng_state(state["rng"][dist.get_rank() % len(state["rng"])])
    replica.skipped_in_a_row = state["skipped_in_a_row"]
    replica.steps_before = state["steps_before"]
    return state["step"]


def begin_from(replica: Replica, path: Path, *, finetune: bool) -> None:
    """Begin a run from another one's checkpoint: from all of it, or from its weights. A collective of all ranks.

    Raises:
        ValueError: it was saved by the other kind of optimizer.
        Whatever Megatron raises when files are damaged or belong to another model.
    """
    if finetune:
        load_model(replica.complete_chunks(), path)
        replica.optimizer.reload_model_params()
        return
    step = load_checkpoint(replica, path)
    replica.steps_before += step
    replica.skipped_in_a_row = 0


def load_model(chunks: Sequence[Any], path: Path) -> None:
    """Set the model alone, whatever layout and optimizer the checkpoint is of. A collective of all ranks.

    Args:
        chunks: the rank's GPTModels.
        path: of the checkpoint.
    """
    named = _named(chunks)
    with quiet():
        state = dist_checkpointing.load({key: chunk.sharded_state_dict() for key, chunk in named.items()}, str(path))
    for key, chunk in named.items():
        chunk.load_state_dict(state[key])


def _state(replica: Replica, *, step: int, loading: bool) -> dict[str, Any]:
    """What is saved, and when loading the shape of it."""
    _fill_optimizer_state(replica.optimizer)
    model = {key: chunk.sharded_state_dict() for key, chunk in _named(replica.complete_chunks()).items()}
    optimizer = replica.optimizer.sharded_state_dict(
        model if len(model) > 1 else model["model"], loading, metadata=FORMAT
    )
    plain = {
        "step": step,
        "steps_before": replica.steps_before,
        "skipped_in_a_row": replica.skipped_in_a_row,
        DISTRIBUTED: replica.is_distributed,
    }
    return {**model, "optimizer": optimizer, "rng": _random_states(), **plain}


def _random_states() -> list[torch.Tensor]:
    """Of every rank, on each: Megatron expects ranks to agree about what is saved once."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, torch.get_rng_state())
    return states


def _check_optimizer(replica: Replica, path: Path) -> None:
    """Megatron's two optimizers keep their settings in different forms, and neither reads the other's."""
    saved: bool = dist_checkpointing.load_common_state_dict(str(path))[DISTRIBUTED]
    if saved != replica.is_distributed:
        raise ValueError(
            f"{path} was saved with trainer.optimizer.use_distributed_optimizer = {str(saved).lower()}: "
            f"set it so again; the rest of the layout may change"
        )


def _named(chunks: Sequence[Any]) -> dict[str, Any]:
    """The parts of the model by the names that Megatron gives them in checkpoints."""
    return {"model": chunks[0]} if len(chunks) == 1 else {f"model{index}": chunk for index, chunk in enumerate(chunks)}


def _own_step_counts(optimizer: Any) -> None:
    """Megatron loads one tensor as the count of all parameters, and torch's AdamW adds 1 to it for each of them."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


def _fill_optimizer_state(optimizer: Any) -> None:
    """Give torch's AdamW the state it makes at its first step: Megatron expects fused optimizers that start with it."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


class _SaveInProcess(TorchDistSaveShardedStrategy):
    """Writes in this process. Megatron's own strategy starts a manager process and forks a writer, for asynchrony that
    is not used here; both outlive a killed trainer, and forking a process with threads may hang."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        """Called by dist_checkpointing.save on every rank."""
        flat, _, _ = replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        writer = FileSystemWriter(checkpoint_dir, sync_files=False)
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        save_state_dict(mcore_to_pyt_state_dict(flat, False), storage_writer=writer, planner=planner)
