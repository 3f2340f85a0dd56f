"""A profile of chosen train steps, in files that Chrome's tracing, Perfetto and torch's memory viewer open."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from actors.trainer.megatron.imports import quiet
from runtime.settings.topology import ProfileConfig

PROFILES: Final = "profiles"  # in the run directory
MAX_ENTRIES: Final = 1_000_000  # allocations that a snapshot of memory tells of


@contextmanager
def profiled(config: ProfileConfig, folder: Path, *, step: int, rank: int, device: torch.device) -> Generator[None]:
    """Profile the block, if its step is one of those chosen; a step that fails leaves no profile.

    Args:
        config: which steps, and whether with a snapshot of the GPU's memory.
        folder: the run directory.
        step: train step, counted from 0.
        rank: of the trainer's.
        device: of this rank.
    """
    if step not in config.steps:
        yield
        return
    is_cuda = device.type == "cuda"
    path = folder / PROFILES / f"step-{step:08d}-rank-{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    memory: Any = torch.cuda.memory
    if is_cuda and config.memory_snapshot:
        memory._record_memory_history(max_entries=MAX_ENTRIES)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with quiet(), profile(activities=activities, record_shapes=True, profile_memory=True) as recorded:
        yield
    recorded.export_chrome_trace(str(path))
    if is_cuda and config.memory_snapshot:
        memory._dump_snapshot(str(path.with_suffix(".pickle")))
        memory._record_memory_history(enabled=None)
