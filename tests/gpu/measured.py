"""What a section answers, and small things that all sections measure with."""

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Measured(NamedTuple):
    """Numbers of a section, and what is wrong with them."""

    numbers: dict[str, Any]
    problems: list[str]


def seconds(call: Callable[[], object], device: str, *, times: int) -> float:
    """Wall seconds of a call, the mean of some; the GPU has done its work at the end."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(times):
        call()
    synchronize(device)
    return (time.perf_counter() - begin) / times


def synchronize(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def forget_peak(device: str) -> None:
    """Give back what nobody uses; the peak of memory begins anew."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def used_bytes(device: str) -> int | None:
    """What tensors take now; none where that is not counted."""
    return torch.cuda.memory_allocated() if device == "cuda" else None


def peak_bytes(device: str) -> int | None:
    """The most that tensors took since; none where that is not counted."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else None
