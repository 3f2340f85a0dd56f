"""Columns of integers on their way to the device, in one copy for which nothing waits."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actors.trainer.batches.context import Ints


def on_device(columns: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """The same columns, int64, on the device; on the CPU they share memory with the given ones."""
    if device.type == "cpu":
        return [torch.from_numpy(column) for column in columns]
    joined = torch.from_numpy(np.concatenate([column.ravel() for column in columns])).pin_memory()
    parts = joined.to(device, non_blocking=True).split([column.size for column in columns])
    return [part.view(column.shape) for part, column in zip(parts, columns, strict=True)]
