"""Checkpoints of model, optimizer and random state, written and read by all ranks collectively.

saving.py writes the files in the background.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from actors.trainer.checkpoints import CRITIC, SavedRun, directory_of, place_of_critic
from actors.trainer.lora.adapters import has_adapters, sharded_adapters
from actors.trainer.megatron.imports import (
    dict_list_map_inplace,
    dist_checkpointing,
    extract_sharded_base,
    merge,
    quiet,
)
from actors.trainer.megatron.kept_weights import STEPS, fill, set_steps, sharded_weights, steps_of, tensors_of
from actors.trainer.megatron.optimizer_shards import PREFIX, sharded_optimizer
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.megatron.reading import reading
from actors.trainer.megatron.saving import Saving
from actors.trainer.step.skips import Skips

DISTRIBUTED = "use_distributed_optimizer"
HEAD = "output_layer."  # names of the output layer's parameters
MAIN_PARAMETERS = {True: f"{PREFIX}param.", False: f"{PREFIX}fp32_param."}  # True: distributed optimizer


def begin_save(
    replica: Replica,
    root: Path,
    executor: Executor,
    *,
    step: int,
    incarnation: int,
    run_file: SavedRun | None = None,
    critic: Replica | None = None,
    nodes: Sequence[str] = (),
) -> Saving:
    """Start to write a checkpoint. A collective of all ranks.

    Args:
        replica: Model replica to save. It may train on meanwhile: before its state changes, it calls `Saving.settle`.
        root: Directory of the checkpoints.
        executor: Thread that writes the files.
        step: Train steps that the checkpoint contains.
        incarnation: Incarnation of the trainer.
        run_file: Contents of the checkpoint's run file.
        critic: The critic's replica, which is saved with it. None: there is no critic.
        nodes: Node of each rank, if each node has a directory of its own.
    """
    path = directory_of(root, step=step, incarnation=incarnation)
    state = _state(replica, loading=False) | {"rng": _random_states(), "step": step}
    if critic is not None:
        state[CRITIC] = _of_critic(_state(critic, loading=False))
    saving = Saving(state, path, executor, run_file=run_file, nodes=nodes)
    for each in (replica, critic):
        if each is not None:
            each.before_change = saving.settle
    return saving


def begin_save_of_critic(critic: Replica, root: Path, executor: Executor, *, step: int, incarnation: int) -> Saving:
    """Start to write the part of a checkpoint of a critic on ranks of its own. A collective of these ranks.

    Args:
        critic: The critic's replica, as in `begin_save`, like the others.
        root: Directory of the checkpoints.
        executor: Thread that writes the files.
        step: Train steps that the checkpoint contains.
        incarnation: Incarnation of the trainer.
    """
    path = directory_of(root, step=step, incarnation=incarnation)
    state = {CRITIC: _of_critic(_state(critic, loading=False)), "rng": _random_states(), "step": step}
    saving = Saving(state, path, executor, run_file=None, part=CRITIC)
    critic.before_change = saving.settle
    return saving


def load_checkpoint(replica: Replica, path: Path, critic: Replica | None = None) -> int:
    """Load model, optimizer, random state and kept weights. A collective of all ranks.

    Args:
        replica: Model replica to load.
        path: Directory of the checkpoint.
        critic: The critic's replica, which is loaded, too. None: the critic of the checkpoint is not read.

    Returns:
        Train steps that the state contains.

    Raises:
        ValueError: An earlier version of the trainer saved the checkpoint, or it has no critic.
        Whatever Megatron raises when files are damaged or belong to another model.
    """
    saved = _saved_values(path)
    _load_replica(replica, path, saved)
    if critic is not None:
        load_critic(critic, path)
    torch.set_rng_state(saved["rng"][dist.get_rank() % len(saved["rng"])])
    return saved["step"]


def load_critic(critic: Replica, path: Path) -> int:
    """Load the critic of a checkpoint, its optimizer and the random state. A collective of the ranks that have it.

    Returns:
        Train steps that the state contains.

    Raises:
        ValueError: As in `load_checkpoint`.
    """
    place = place_of_critic(path)
    saved = _saved_values(place)
    if CRITIC not in saved:
        raise ValueError(f"{path} has no critic")
    _load_replica(critic, place, saved[CRITIC], is_critic=True)
    torch.set_rng_state(saved["rng"][dist.get_rank() % len(saved["rng"])])
    return saved["step"]


def _load_replica(replica: Replica, path: Path, saved: dict[str, Any], *, is_critic: bool = False) -> None:
    """Load a model, its optimizer and its kept weights.

    Args:
        replica: Model replica to load.
        path: Directory of the checkpoint.
        saved: What the checkpoint holds of it besides tensors.
        is_critic: Load the critic, not the policy.
    """
    set_steps(replica.kept, saved.get(STEPS, {}))
    with quiet(), reading(path):
        wanted = _state(replica, loading=True)
        settings = _settings(replica)
        optimizer, kept = wanted.pop("optimizer"), tensors_of(wanted["kept"])
        _take_main_parameters(optimizer, replica, saved[DISTRIBUTED])
        model = {key: wanted[key] for key in (*named_chunks(replica.chunks), "kept")}
        state = _read(path, model, is_critic=is_critic)
        state |= _read(path, {"optimizer": optimizer}, is_critic=is_critic)  # may request the model's names, too
    for key, chunk in named_chunks(replica.complete_chunks()).items():
        chunk.load_state_dict(state[key], strict=not has_adapters(chunk))
    fill(kept, state["kept"])
    loaded = settings if replica.is_distributed else merge(settings, state["optimizer"])  # distributed: read in place
    load_settings(replica.optimizer, loaded, saved["optimizer_steps"])
    replica.skips = Skips(saved["skipped_in_a_row"], tuple(saved.get("skipped_recently", ())))
    replica.steps_before = saved["steps_before"]
    replica.untrained_before = saved.get("untrained_before", 0)


def begin_from(replica: Replica, path: Path, *, weights_only: bool) -> None:
    """Start a run from the checkpoint of another run, or from its weights alone. A collective of all ranks.

    Raises:
        ValueError: An earlier version of the trainer saved the checkpoint.
        Whatever Megatron raises when files are damaged or belong to another model.
    """
    if weights_only:
        load_model(replica.complete_chunks(), path)
        replica.optimizer.reload_model_params()
        return
    step = load_checkpoint(replica, path)
    replica.steps_before += step
    replica.untrained_before += min(step, _saved_values(path).get("first_step", 0))
    replica.skips = Skips()


def begin_critic_from(critic: Replica, path: Path, *, weights_only: bool, own_weights: bool) -> None:
    """Start a run's critic from the checkpoint of another run. A collective of all ranks.

    From a checkpoint without a critic it takes the policy's weights, and keeps its new value head.

    Args:
        critic: The critic's replica, with its initial weights.
        path: Directory of the checkpoint.
        weights_only: Take the weights alone from a critic in the checkpoint.
        own_weights: Keep the initial weights if the checkpoint has no critic.
    """
    place = place_of_critic(path)
    saved = _saved_values(place)
    if CRITIC not in saved:
        if not own_weights:
            load_model(critic.complete_chunks(), path, with_head=False)
            critic.optimizer.reload_model_params()
        return
    if weights_only:
        load_model(critic.complete_chunks(), path, is_critic=True)
        critic.optimizer.reload_model_params()
        return
    _load_replica(critic, place, saved[CRITIC], is_critic=True)
    critic.steps_before += saved["step"]
    critic.skips = Skips()


def load_model(chunks: Sequence[Any], path: Path, *, is_critic: bool = False, with_head: bool = True) -> None:
    """Load the model alone, from a checkpoint of any layout and optimizer. A collective of all ranks.

    Args:
        chunks: GPTModels of this rank.
        path: Directory of the checkpoint.
        is_critic: Load the critic, not the policy.
        with_head: Load the output layer, too.
    """
    named = named_chunks(chunks)
    wanted = {key: _described(chunk) for key, chunk in named.items()}
    if not with_head:
        wanted = {key: without_head(chunk) for key, chunk in wanted.items()}
    path = place_of_critic(path) if is_critic else path
    with quiet(), reading(path):
        state = _read(path, wanted, is_critic=is_critic)
    for key, chunk in named.items():
        chunk.load_state_dict(state[key], strict=with_head and not has_adapters(chunk))


def _described(chunk: Any) -> dict[str, Any]:
    """Describe the tensors of a chunk that a checkpoint has: all, or with LoRA those of the adapters alone."""
    return sharded_adapters(chunk) or chunk.sharded_state_dict()


def _read(path: Path, wanted: dict[str, Any], *, is_critic: bool) -> dict[str, Any]:
    """Read the tensors of a state dict."""
    if is_critic:
        return dist_checkpointing.load({CRITIC: _of_critic(wanted)}, str(path))[CRITIC]
    return dist_checkpointing.load(wanted, str(path))


def _of_critic(state: dict[str, Any]) -> dict[str, Any]:
    """Give the tensors of a state dict the names that those of the critic have in a checkpoint. Changes the leaves."""
    for leaf in leaves(state):
        leaf.key = f"{CRITIC}.{leaf.key}"
    return state


def without_head(state: dict[str, Any]) -> dict[str, Any]:
    """Leave the output layer out of a chunk's state dict."""
    return {name: leaf for name, leaf in state.items() if not name.startswith(HEAD)}


def _state(replica: Replica, *, loading: bool) -> dict[str, Any]:
    """Build the state dict of a model and its optimizer: the data when saving, the expected shapes when loading.

    The optimizer contributes its tensors and the step count. Its settings come from the run. Their form
    depends on the layout: expert-parallel experts have an optimizer of their own, and Megatron could not read its
    settings in a layout without one.
    """
    fill_optimizer_state(replica.optimizer)
    model = {key: _described(chunk) for key, chunk in named_chunks(replica.complete_chunks()).items()}
    optimizer = sharded_state(replica, model, loading=loading)
    plain = {
        "optimizer_steps": _optimizer_steps(replica.optimizer),
        "steps_before": replica.steps_before,
        "untrained_before": replica.untrained_before,
        "first_step": replica.first_step,
        "skipped_in_a_row": replica.skips.in_a_row,
        "skipped_recently": list(replica.skips.recent),
        STEPS: steps_of(replica.kept),
        DISTRIBUTED: replica.is_distributed,
    }
    kept = sharded_weights(replica.kept, list(replica.weights()), list(leaves(model)))
    return {**model, "optimizer": optimizer, "kept": kept, **plain}


def sharded_state(replica: Replica, model: dict[str, Any], *, loading: bool) -> dict[Any, Any]:
    """Describe the optimizer's tensors for dist_checkpointing. For the distributed optimizer they are the live ones.

    Args:
        replica: Replica whose optimizer state is filled.
        model: Megatron's sharded state dicts of its chunks.
        loading: Whether the tensors are to be read.
    """
    if replica.is_distributed:
        described = {id(leaf.data): leaf for leaf in leaves(model)}
        return sharded_optimizer(_parts(replica.optimizer), described)
    sharded, _ = extract_sharded_base(_plain_state(replica, model, loading=loading))
    return sharded


def _plain_state(replica: Replica, model: dict[str, Any], *, loading: bool) -> dict[Any, Any]:
    """Sharded state dict of the non-distributed optimizer."""
    of_chunks = model if len(model) > 1 else model["model"]
    metadata = {"chained_optim_avoid_prefix": True}  # expert-parallel experts have an optimizer of their own
    return replica.optimizer.sharded_state_dict(of_chunks, loading, metadata=metadata)


def _settings(replica: Replica) -> dict[Any, Any]:
    """Return the optimizer state that Megatron loads besides the tensors."""
    if replica.is_distributed:
        return own_settings(replica.optimizer)
    model = {key: _described(chunk) for key, chunk in named_chunks(replica.complete_chunks()).items()}
    _, settings = extract_sharded_base(_plain_state(replica, model, loading=True))
    return dict_list_map_inplace(lambda value: value.unwrap() if hasattr(value, "unwrap") else value, settings)


def own_settings(optimizer: Any) -> dict[Any, Any]:
    """Return the settings of a distributed optimizer, whose tensors are read in place."""
    settings = [part.state_dict() for part in _parts(optimizer)]
    return settings[0] if len(settings) == 1 else dict(enumerate(settings))


def _optimizer_steps(optimizer: Any) -> float:
    counts = [float(state["step"]) for part in _parts(optimizer) for state in part.optimizer.state.values()]
    return max(counts, default=0.0)


def load_settings(optimizer: Any, state: dict[Any, Any], steps: float) -> None:
    """Load an optimizer's settings, its step count, and the state that comes with them."""
    parts = _parts(optimizer)
    for index in range(len(parts)):
        of_part = state if len(parts) == 1 else state[index]
        inner = of_part.get("optimizer", of_part)  # the mixed-precision optimizer nests it
        if "state" in inner:
            inner["state"]["common_step"] = torch.tensor(steps)
        for group in inner["param_groups"]:
            group["step"] = steps
    optimizer.load_state_dict(state)
    own_step_counts(optimizer)


def _parts(optimizer: Any) -> list[Any]:
    """Return the parts of a chained optimizer."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _random_states() -> list[torch.Tensor]:
    """All-gather the random states: Megatron expects ranks to agree on data that is saved once."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, torch.get_rng_state())
    return states


def _saved_values(path: Path) -> dict[str, Any]:
    """Return the plain values of a checkpoint."""
    with reading(path):
        plain: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(path))
    if "optimizer_steps" not in plain and CRITIC not in plain:
        raise ValueError(f"{path} was written by an earlier version of the trainer, and is no longer read")
    return plain


def _take_main_parameters(optimizer: Any, replica: Replica, saved: bool) -> None:
    """Rename the requested main parameters to the names of the optimizer kind that saved the checkpoint.

    In float32 the non-distributed optimizer has no main parameters; the model's parameters take their place.
    """
    own = MAIN_PARAMETERS[replica.is_distributed]
    theirs = "" if not saved and replica.dtype is torch.float32 else MAIN_PARAMETERS[saved]
    for leaf in leaves(optimizer):
        if leaf.key.startswith(own):
            leaf.key = theirs + leaf.key.removeprefix(own)


def leaves(value: Any) -> Iterator[Any]:
    """Yield Megatron's sharded tensors and factories of a nested state dict."""
    if isinstance(value, dict):
        for each in value.values():
            yield from leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from leaves(each)
    elif hasattr(value, "key"):
        yield value


def named_chunks(chunks: Sequence[Any]) -> dict[str, Any]:
    """Name the model chunks as Megatron does in checkpoints."""
    return {"model": chunks[0]} if len(chunks) == 1 else {f"model{index}": chunk for index, chunk in enumerate(chunks)}


def own_step_counts(optimizer: Any) -> None:
    """Give each parameter its own step count.

    Megatron loads one shared tensor, and torch's AdamW would add 1 to it once per parameter.
    """
    for part in _parts(optimizer):
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


def fill_optimizer_state(optimizer: Any) -> None:
    """Create the state that torch's AdamW makes at its first step. Megatron expects it of fused optimizers."""
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
