"""Checkpoints of model, optimizer and random state: written and read by all ranks together.

How one gets onto the disk: saving.py.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from actors.trainer.algorithms.skips import Skips
from actors.trainer.checkpoints import SavedRun, directory_of
from actors.trainer.megatron.imports import (
    dict_list_map_inplace,
    dist_checkpointing,
    extract_sharded_base,
    merge,
    quiet,
)
from actors.trainer.megatron.optimizer_shards import PREFIX, sharded_optimizer
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.megatron.reading import reading
from actors.trainer.megatron.saving import Saving

DISTRIBUTED = "use_distributed_optimizer"
MAIN_PARAMETERS = {True: f"{PREFIX}param.", False: f"{PREFIX}fp32_param."}  # by whether it is distributed


def begin_save(
    replica: Replica, root: Path, executor: Executor, *, step: int, incarnation: int, said: SavedRun | None = None
) -> Saving:
    """Copy the state and begin to write a checkpoint. A collective of all ranks.

    Args:
        replica: what is saved; it may train on.
        root: where checkpoints lie.
        executor: a thread that writes.
        step: train steps that it contains.
        incarnation: of the trainer.
        said: what it says of itself.
    """
    path = directory_of(root, step=step, incarnation=incarnation)
    return Saving(_state(replica, step=step, loading=False), path, executor, said=said)


def save_checkpoint(replica: Replica, root: Path, *, step: int, incarnation: int) -> Path:
    """Write a checkpoint while nothing else happens; return its directory. A collective of all ranks."""
    with ThreadPoolExecutor(max_workers=1) as executor:
        return begin_save(replica, root, executor, step=step, incarnation=incarnation).finish()


def load_checkpoint(replica: Replica, path: Path) -> int:
    """Set model, optimizer and random state. A collective of all ranks.

    Returns:
        Train steps that the state contains.

    Raises:
        ValueError: it was saved by an earlier version.
        Whatever Megatron raises when files are damaged or belong to another model.
    """
    saved = _saved_distributed(path)
    with quiet(), reading(path):
        wanted = _state(replica, step=0, loading=True)
        settings = _settings(replica)
        optimizer = wanted.pop("optimizer")
        _take_main_parameters(optimizer, replica, saved)
        state = dist_checkpointing.load(wanted, str(path))
        state |= dist_checkpointing.load({"optimizer": optimizer}, str(path))  # which may ask for the model's, too
    for key, chunk in named_chunks(replica.complete_chunks()).items():
        chunk.load_state_dict(state[key])
    loaded = settings if replica.is_distributed else merge(settings, state["optimizer"])  # which is in its place
    load_settings(replica.optimizer, loaded, state["optimizer_steps"])
    torch.set_rng_state(state["rng"][dist.get_rank() % len(state["rng"])])
    replica.skips = Skips(state["skipped_in_a_row"], tuple(state.get("skipped_recently", ())))
    replica.steps_before = state["steps_before"]
    return state["step"]


def begin_from(replica: Replica, path: Path, *, finetune: bool) -> None:
    """Begin a run from another one's checkpoint: from all of it, or from its weights. A collective of all ranks.

    Raises:
        ValueError: it was saved by an earlier version.
        Whatever Megatron raises when files are damaged or belong to another model.
    """
    if finetune:
        load_model(replica.complete_chunks(), path)
        replica.optimizer.reload_model_params()
        return
    step = load_checkpoint(replica, path)
    replica.steps_before += step
    replica.skips = Skips()


def load_model(chunks: Sequence[Any], path: Path) -> None:
    """Set the model alone, whatever layout and optimizer the checkpoint is of. A collective of all ranks.

    Args:
        chunks: the rank's GPTModels.
        path: of the checkpoint.
    """
    named = named_chunks(chunks)
    with quiet(), reading(path):
        state = dist_checkpointing.load({key: chunk.sharded_state_dict() for key, chunk in named.items()}, str(path))
    for key, chunk in named.items():
        chunk.load_state_dict(state[key])


def _state(replica: Replica, *, step: int, loading: bool) -> dict[str, Any]:
    """What is saved, and when loading the shape of it: of the optimizer its tensors and how many steps it has made.

    Its settings are the run's, and their form is that of a layout: experts that are shared out have an optimizer of
    their own, and Megatron would not read them where they are not.
    """
    fill_optimizer_state(replica.optimizer)
    model = {key: chunk.sharded_state_dict() for key, chunk in named_chunks(replica.complete_chunks()).items()}
    optimizer = sharded_state(replica, model, loading=loading)
    plain = {
        "optimizer_steps": _optimizer_steps(replica.optimizer),
        "step": step,
        "steps_before": replica.steps_before,
        "skipped_in_a_row": replica.skips.in_a_row,
        "skipped_recently": list(replica.skips.recent),
        DISTRIBUTED: replica.is_distributed,
    }
    return {**model, "optimizer": optimizer, "rng": _random_states(), **plain}


def sharded_state(replica: Replica, model: dict[str, Any], *, loading: bool) -> dict[Any, Any]:
    """The optimizer's tensors, described for dist_checkpointing. Those of the distributed optimizer are the live ones.

    Args:
        replica: whose optimizer's state is filled.
        model: Megatron's descriptions of its chunks.
        loading: they are to be read.
    """
    if replica.is_distributed:
        described = {id(leaf.data): leaf for leaf in leaves(model)}
        return sharded_optimizer(_parts(replica.optimizer), described)
    sharded, _ = extract_sharded_base(_plain_state(replica, model, loading=loading))
    return sharded


def _plain_state(replica: Replica, model: dict[str, Any], *, loading: bool) -> dict[Any, Any]:
    """Of the optimizer that is not distributed."""
    of_chunks = model if len(model) > 1 else model["model"]
    metadata = {"chained_optim_avoid_prefix": True}  # experts that are shared out have an optimizer of their own
    return replica.optimizer.sharded_state_dict(of_chunks, loading, metadata=metadata)


def _settings(replica: Replica) -> dict[Any, Any]:
    """What Megatron wants to load of an optimizer beside its tensors."""
    if replica.is_distributed:
        return own_settings(replica.optimizer)
    model = {key: chunk.sharded_state_dict() for key, chunk in named_chunks(replica.complete_chunks()).items()}
    _, settings = extract_sharded_base(_plain_state(replica, model, loading=True))
    return dict_list_map_inplace(lambda value: value.unwrap() if hasattr(value, "unwrap") else value, settings)


def own_settings(optimizer: Any) -> dict[Any, Any]:
    """Those of a distributed optimizer, which has its tensors already."""
    settings = [part.state_dict() for part in _parts(optimizer)]
    return settings[0] if len(settings) == 1 else dict(enumerate(settings))


def _optimizer_steps(optimizer: Any) -> float:
    counts = [float(state["step"]) for part in _parts(optimizer) for state in part.optimizer.state.values()]
    return max(counts, default=0.0)


def load_settings(optimizer: Any, state: dict[Any, Any], steps: float) -> None:
    """Load an optimizer's settings and count of steps, and the state that comes with them."""
    parts = _parts(optimizer)
    for index in range(len(parts)):
        of_part = state if len(parts) == 1 else state[index]
        inner = of_part.get("optimizer", of_part)  # mixed precision wraps it
        if "state" in inner:
            inner["state"]["common_step"] = torch.tensor(steps)
        for group in inner["param_groups"]:
            group["step"] = steps
    optimizer.load_state_dict(state)
    own_step_counts(optimizer)


def _parts(optimizer: Any) -> list[Any]:
    """The optimizers of which one consists."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _random_states() -> list[torch.Tensor]:
    """Of every rank, on each: Megatron expects ranks to agree about what is saved once."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, torch.get_rng_state())
    return states


def _saved_distributed(path: Path) -> bool:
    """Whether a checkpoint is of the distributed optimizer."""
    plain = dist_checkpointing.load_common_state_dict(str(path))
    if "optimizer_steps" not in plain:
        raise ValueError(f"{path} was written by an earlier version of the trainer, and is no longer read")
    return plain[DISTRIBUTED]


def _take_main_parameters(optimizer: Any, replica: Replica, saved: bool) -> None:
    """Ask for main parameters by the names that the checkpoint's kind of optimizer gives them.

    The optimizer that is not distributed has none in float32: the model's are the same.
    """
    own = MAIN_PARAMETERS[replica.is_distributed]
    theirs = "" if not saved and replica.dtype is torch.float32 else MAIN_PARAMETERS[saved]
    for leaf in leaves(optimizer):
        if leaf.key.startswith(own):
            leaf.key = theirs + leaf.key.removeprefix(own)


def leaves(value: Any) -> Iterator[Any]:
    """Megatron's descriptions of tensors, some of which stand for several."""
    if isinstance(value, dict):
        for each in value.values():
            yield from leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from leaves(each)
    elif hasattr(value, "key"):
        yield value


def named_chunks(chunks: Sequence[Any]) -> dict[str, Any]:
    """The parts of the model by the names that Megatron gives them in checkpoints."""
    return {"model": chunks[0]} if len(chunks) == 1 else {f"model{index}": chunk for index, chunk in enumerate(chunks)}


def own_step_counts(optimizer: Any) -> None:
    """Megatron loads one tensor as the count of all parameters, and torch's AdamW adds 1 to it for each of them."""
    for part in _parts(optimizer):
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


def fill_optimizer_state(optimizer: Any) -> None:
    """Give torch's AdamW the state it makes at its first step: Megatron expects fused optimizers that start with it."""
    for part in _parts(optimizer):
        inner = part.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
