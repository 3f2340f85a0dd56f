"""Weights in shared memory: an engine reads what it is told the name of."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from actors.rollout.sglang.errors import EngineError
from actors.rollout.sglang.updates import WeightUpdates
from messages import BucketSent

SEGMENTS: Final = Path("/dev/shm")  # where Linux shows shared memory by name


async def read_segments(
    updates: WeightUpdates, url: str, step: BucketSent, payloads: Sequence[str], timeout_s: float
) -> None:
    """Have an engine read a bucket, which then is of no more use to it.

    The trainer removes what it has written, too; here for one that has died.

    Raises:
        EngineError: it did not read it.
    """
    try:
        await updates.update_from_tensor(url, payloads, timeout_s=timeout_s)
    except EngineError:
        for name in step.segments:
            (SEGMENTS / name).unlink(missing_ok=True)
        raise
