"""Asynchronous copy of integer columns to the device, all in one transfer."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actors.trainer.data.context import Ints


def on_device(columns: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """Return the columns as int64 tensors on the device. On the CPU they share memory with the given arrays."""
    if device.type == "cpu":
        return [torch.from_numpy(column) for column in columns]
    joined = torch.from_numpy(np.concatenate([column.ravel() for column in columns])).pin_memory()
    parts = joined.to(device, non_blocking=True).split([column.size for column in columns])
    return [part.view(column.shape) for part, column in zip(parts, columns, strict=True)]
