"""Batch functions as users write them. Each sample says what becomes of a call that it is in."""

import asyncio
import os
import signal
import time
from typing import Any


def sizes(samples: list[Any]) -> list[Any]:
    """Do what the samples say; else the reward of each is the size of its batch."""
    said = {sample.response for sample in samples}
    if "raise" in said:
        raise RuntimeError("one of you")
    if "hang" in said:
        time.sleep(60)
    if "die" in said:
        os.kill(os.getpid(), signal.SIGKILL)
    if "short" in said:
        return [1.0] * (len(samples) - 1)
    failed = {"error": ValueError("no answer"), "nan": float("nan"), "busy": TimeoutError("slow server")}
    return [failed.get(sample.response, float(len(samples))) for sample in samples]


async def async_sizes(samples: list[Any]) -> list[Any]:
    if any(sample.response == "never" for sample in samples):
        await asyncio.Event().wait()
    await asyncio.sleep(0)
    return sizes(samples)
