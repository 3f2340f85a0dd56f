"""Reads Megatron-LM checkpoints in torch_dist format: the weights, and the optimizer state if it is reshardable.

Megatron-LM stores model tensors under the names of GPTModel, stacked over layers or one per layer. Optimizer tensors
are under `optimizer.state.<what>.<name>`, everything else in `common.pt`.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from actors.trainer.megatron.checkpoint import (
    fill_optimizer_state,
    leaves,
    load_settings,
    named_chunks,
    own_settings,
    sharded_state,
    without_head,
)
from actors.trainer.megatron.imports import TorchCommonLoadStrategy, dist_checkpointing, quiet
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.megatron.reading import UnsafeCheckpoint, reading

ALIKE: Final = {  # norm names: TransformerEngine's layers to Megatron's local layers
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
}
EMBEDDING: Final = "embedding.word_embeddings.weight"
OF_OPTIMIZER: Final = "optimizer."
READABLE: Final = "fully_reshardable"
WEIGHTS_ONLY: Final = "load only the weights with trainer.load_weights_only = true"


def begin_from_megatron_lm(replica: Replica, path: Path, *, weights_only: bool, with_head: bool = True) -> None:
    """Start a run from a Megatron-LM checkpoint, or from its weights alone. A collective of all ranks.

    The run's train steps start at 0: Megatron-LM's iterations do not count as train steps.

    Args:
        replica: Model replica to load.
        path: Directory of the checkpoint.
        weights_only: Load no optimizer state.
        with_head: Load the output layer, too. A critic, which has another one, keeps its own.

    Raises:
        ValueError: The checkpoint is of another model, or its optimizer state cannot be read; the text says why.
    """
    with quiet(), reading(path):
        saved: dict[str, Any] = dist_checkpointing.load_tensors_metadata(str(path))
    one_by_one = any(name.startswith("decoder.layers.0.") for name in saved)
    model = {
        key: _tensors(chunk.sharded_state_dict(metadata={"non_homogeneous_layers": one_by_one}))
        for key, chunk in named_chunks(replica.complete_chunks()).items()
    }
    if not with_head:
        model = {key: without_head(chunk) for key, chunk in model.items()}
        saved = without_head(saved)
    _take_names(model, saved)
    _check(model, saved, path)
    if weights_only:
        with quiet(), reading(path):
            state = dist_checkpointing.load(model, str(path), common_strategy=_NoCommonState())
        _set_model(replica, state, with_head=with_head)
        replica.optimizer.reload_model_params()
        return
    steps = _check_optimizer(replica, saved, path)
    fill_optimizer_state(replica.optimizer)
    optimizer = sharded_state(replica, model, loading=True)
    with quiet():
        state = dist_checkpointing.load({**model, "optimizer": optimizer}, str(path))
    _set_model(replica, state)
    # optimizer settings come from the recipe, not from the other training run
    load_settings(replica.optimizer, own_settings(replica.optimizer), steps)


class _NoCommonState(TorchCommonLoadStrategy):
    """Common strategy that loads nothing: non-tensor data may hold objects of programs that are not installed here."""

    def load_common(self, checkpoint_dir: Any) -> dict[str, Any]:
        """Return nothing. dist_checkpointing.load calls this."""
        del checkpoint_dir
        return {}


def _set_model(replica: Replica, state: Mapping[str, Any], *, with_head: bool = True) -> None:
    for key, chunk in named_chunks(replica.chunks).items():
        own = chunk.state_dict()
        missing = dict.fromkeys(own if with_head else without_head(own))  # non-tensor entries become None
        chunk.load_state_dict(missing | state[key], strict=with_head)


def _tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Drop the extra state of layers that is not a tensor, such as TransformerEngine's fp8 state."""
    return {name: leaf for name, leaf in state.items() if not name.endswith("._extra_state")}


def _take_names(model: dict[str, Any], saved: Collection[str]) -> None:
    """Rename the requested norms to the names that the checkpoint uses."""
    for leaf in leaves(model):
        for one, other in (*ALIKE.items(), *((local, engine) for engine, local in ALIKE.items())):
            if leaf.key not in saved and (renamed := leaf.key.replace(one, other)) in saved:
                leaf.key = renamed


def _check(model: dict[str, Any], saved: Mapping[str, Any], path: Path) -> None:
    """Refuse a checkpoint of another model. All ranks raise alike, since each has only a part of the model."""
    wanted: dict[str, tuple[tuple[int, ...], bool]] = {}
    for leaf in leaves(model):
        for part in leaves(leaf.build()) if hasattr(leaf, "build") else [leaf]:
            wanted[part.key] = (tuple(part.global_shape), part.allow_shape_mismatch)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, wanted)
    for name, (shape, may_be_padded) in {name: one for each in everywhere for name, one in each.items()}.items():
        if name not in saved:
            raise ValueError(f"{path} is of another model: it has no {name}")
        found = tuple(saved[name].global_shape)
        padded = may_be_padded and found[0] >= shape[0] and found[1:] == shape[1:]  # padded vocabulary
        if found != shape and not padded:
            raise ValueError(
                f"{path} is of another model: {name} is {list(found)} in the checkpoint, and {list(shape)} here"
            )
    known = {name for each in everywhere for name in each}
    if more := [name for name in saved if name not in known and not name.startswith(OF_OPTIMIZER)]:
        raise ValueError(f"{path} is of another model: it has {more[0]}, which this model does not have")


def _check_optimizer(replica: Replica, saved: Mapping[str, Any], path: Path) -> int:
    """Return the number of steps that the optimizer has completed.

    Raises:
        ValueError: The optimizer state cannot be read here; the text says why.
    """
    if len(getattr(replica.optimizer, "chained_optimizers", [None])) > 1:
        raise ValueError(
            f"{path}: not implemented yet: Megatron-LM's optimizer of a model with experts; {WEIGHTS_ONLY}"
        )
    if saved[EMBEDDING].dtype != replica.dtype:
        raise ValueError(
            f"{path} was trained in {saved[EMBEDDING].dtype}, but this run trains in {replica.dtype}; {WEIGHTS_ONLY}"
        )
    try:
        common = dist_checkpointing.load_common_state_dict(str(path))
    except UnsafeCheckpoint as error:
        raise ValueError(
            f"{path / 'common.pt'} holds objects of another program, which are not loaded; {WEIGHTS_ONLY}"
        ) from error
    if "optimizer" not in common:
        raise ValueError(f"{path} was saved without its optimizer; {WEIGHTS_ONLY}")
    kind = common["optimizer"].get("param_state_sharding_type")
    if kind != READABLE:
        how = "by another optimizer than the distributed one" if kind is None else f"as {kind}"
        raise ValueError(
            f"{path} has its optimizer's state saved {how}; only {READABLE} can be read by other layouts "
            f"(Megatron-LM's --use-distributed-optimizer and --dist-ckpt-optim-fully-reshardable); {WEIGHTS_ONLY}"
        )
    steps = {group.get("step") for group in common["optimizer"]["optimizer"]["param_groups"]}
    if len(steps) != 1 or None in steps:
        raise ValueError(f"{path} does not hold the number of steps of its optimizer; {WEIGHTS_ONLY}")
    return int(steps.pop())
