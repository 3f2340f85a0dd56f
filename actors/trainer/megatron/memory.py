"""Memory of the host for what is on the device."""

import torch
from torch import Tensor


def host_copy(tensor: Tensor) -> Tensor:
    """A tensor of a GPU in memory that the GPU reads and writes by itself; of the CPU a copy."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)
