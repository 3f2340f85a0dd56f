"""Calls of the torch thread to rollout actors."""

import asyncio
import os
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import anyio
import pytest
import torch

from actors.trainer.weights.calls import ThreadCalls
from actors.trainer.weights.engines import described
from actors.trainer.weights.shared_memory import SEGMENTS, Segments
from runtime.bus.bus import Bus

pytestmark = pytest.mark.anyio


async def test_the_end_lets_a_thread_go_that_waits_for_an_answer_and_no_segment_is_left(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollout actor has stopped. The trainer waited for it, was killed after some seconds, and left the segment."""
    called = anyio.Event()

    async def hangs(*_arguments: Any, **_options: Any) -> None:
        called.set()
        await anyio.sleep_forever()

    monkeypatch.setattr(Bus, "call", hangs)
    prefix, flat = f"physarum-test-{os.getpid()}", torch.zeros(16, dtype=torch.uint8)
    step = described("session", 0, 0, [("weight", flat)])
    with ThreadPoolExecutor(1) as thread, anyio.CancelScope() as stop:
        async with ThreadCalls.opened(bus) as calls:
            ask = calls.ask_of(["rollout"])
            sending = thread.submit(Segments(prefix, {"engine": 1}).carry, step, flat, ask, 600.0, lambda: None)
            with anyio.fail_after(200):
                await called.wait()
            assert list(SEGMENTS.glob(f"{prefix}-*"))
            stop.cancel()
            with anyio.CancelScope(shield=True):  # as a weight sync is
                await asyncio.wait([asyncio.wrap_future(sending)], timeout=200)
    with pytest.raises(CancelledError):
        sending.result()
    assert not list(SEGMENTS.glob(f"{prefix}-*"))
    with pytest.raises(CancelledError):
        ask(step, 600.0).result()
