"""Weight transfer through shared memory: an engine reads segments by name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from actors.rollout.sglang.errors import EngineError
from actors.rollout.sglang.updates import WeightUpdates
from messages import BucketSent

SEGMENTS: Final = Path("/dev/shm")  # where Linux lists shared memory by name


async def read_segments(
    updates: WeightUpdates, url: str, step: BucketSent, payloads: Sequence[str], timeout_s: float
) -> None:
    """Make an engine read a bucket from shared memory.

    On a failure, removes the bucket's segments here: the trainer normally does that, but it may have died.

    Raises:
        EngineError: the engine did not read it.
    """
    try:
        await updates.update_from_tensor(url, payloads, timeout_s=timeout_s)
    except EngineError:
        for name in step.segments:
            (SEGMENTS / name).unlink(missing_ok=True)
        raise
