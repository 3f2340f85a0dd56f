"""Profiles of chosen train steps, in files for Chrome tracing, Perfetto and torch's memory viewer."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from actors.trainer.megatron.imports import quiet
from runtime.settings.tables.trainer import ProfileConfig

PROFILES: Final = "profiles"  # in the run directory
MAX_ENTRIES: Final = 1_000_000  # allocations in a memory snapshot


@contextmanager
def profiled(config: ProfileConfig, folder: Path, *, step: int, rank: int, device: torch.device) -> Generator[None]:
    """Profile the block if its step is a chosen one. A step that fails leaves no profile.

    Args:
        config: Which steps to profile, and whether to add a snapshot of the GPU's memory.
        folder: The run directory.
        step: Train step, from 0.
        rank: Rank of the trainer.
        device: Device of this rank.
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
