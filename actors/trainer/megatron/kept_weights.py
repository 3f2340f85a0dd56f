"""Copies of the model's weights from earlier train steps: kept on the host, and part of a checkpoint.

A checkpoint has them in the same form as the model, so that any parallel layout can read them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

STEPS: Final = "kept_weights"  # in a checkpoint: train steps of each copy, by its name


@dataclass
class KeptWeights:
    """One copy of this rank's weights."""

    tensors: list[Tensor]  # on the host, as `Replica.weights_copy` returns them
    step: int | None = None  # train steps in the weights, those of earlier runs included; None: not of this training


def steps_of(kept: Mapping[str, KeptWeights]) -> dict[str, int]:
    """Return the train steps of each copy that a checkpoint contains."""
    return {name: copy.step for name, copy in kept.items() if copy.step is not None}


def set_steps(kept: Mapping[str, KeptWeights], saved: Mapping[str, int]) -> None:
    """Take over the train steps of a checkpoint's copies. A copy that the checkpoint lacks counts as of no training."""
    for name, copy in kept.items():
        copy.step = saved.get(name)


def sharded_weights(
    kept: Mapping[str, KeptWeights], weights: Sequence[Tensor], leaves: Sequence[Any]
) -> dict[str, list[Any]]:
    """Describe the copies with known train steps for Megatron's dist_checkpointing.

    Args:
        kept: Copies by name.
        weights: This rank's weights, in the order of the copies' tensors.
        leaves: Megatron's sharded tensors and factories of the model, whose data are those weights.
    """
    places = {id(weight): place for place, weight in enumerate(weights)}
    own = [(leaf, places[id(leaf.data)]) for leaf in leaves if id(leaf.data) in places]
    absent = places.keys() - {id(leaf.data) for leaf, _ in own}
    assert not absent, f"{len(absent)} weights are not in the model's state"
    return {
        name: [replace(leaf, key=f"{name}.{leaf.key}", data=kept[name].tensors[place]) for leaf, place in own]
        for name in steps_of(kept)
    }


def tensors_of(described: Mapping[str, Sequence[Any]]) -> dict[str, list[Tensor]]:
    """Return the tensors that `sharded_weights` described. Call it before Megatron loads, which changes the leaves."""
    return {name: [leaf.data for leaf in leaves] for name, leaves in described.items()}


@torch.no_grad()
def fill(kept: Mapping[str, Sequence[Tensor]], loaded: Mapping[str, Sequence[Tensor]]) -> None:
    """Copy loaded tensors into those of `tensors_of`."""
    for name, tensors in kept.items():
        for tensor, other in zip(tensors, loaded[name], strict=True):
            tensor.copy_(other)
