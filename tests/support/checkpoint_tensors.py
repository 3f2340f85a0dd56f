"""Reads all tensors of a trainer checkpoint without Megatron-core."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from actors.trainer.checkpoints import place_of_critic


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Load all tensors by name. Those of a critic with ranks of its own are in a directory of their own."""
    found: dict[str, torch.Tensor] = {}
    for place in dict.fromkeys((checkpoint, place_of_critic(checkpoint))):
        state: dict[str, Any] = {}
        _load_state_dict(state, FileSystemReader(place), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        found |= {name: value for name, value in _flat("", state) if isinstance(value, torch.Tensor)}
    return found


def _flat(prefix: str, values: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value
