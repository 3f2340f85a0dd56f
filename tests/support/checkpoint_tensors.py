"""Reads all tensors of a trainer checkpoint without Megatron-core."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Load all tensors by name."""
    found: dict[str, Any] = {}
    _load_state_dict(found, FileSystemReader(checkpoint), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {name: value for name, value in _flat("", found) if isinstance(value, torch.Tensor)}


def _flat(prefix: str, values: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value
