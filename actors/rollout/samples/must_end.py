"""Ends this process when a user's function goes on long after its cancellation.

A function that catches every exception in a loop (`except BaseException`) catches its cancellation too. Nothing in this
process can end it, and what waits for it would wait for ever. The node daemon starts the process again, and its tasks
come again with the tokens that are stored.
"""

import asyncio
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

import anyio
import structlog

from runtime.util.exit_codes import EXIT_FAILED

log = structlog.get_logger()

LIMIT_S: Final = 30.0  # for a function's clean-up
LOOKS: Final = 10  # in the limit


@contextmanager
def must_end(
    key: str, scope: anyio.CancelScope, is_waiting: Callable[[], bool], limit_s: float | None = None
) -> Generator[None]:
    """Run a user's function in the block, and end the process if it goes on too long after its cancellation.

    Args:
        key: the setting that names the function.
        scope: around the block. It, or this task, is cancelled.
        is_waiting: whether the function waits for this project, as in an outage of the bus. That time does not count.
        limit_s: seconds from the cancellation on; None: LIMIT_S.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    limit_s = LIMIT_S if limit_s is None else limit_s
    num_cancellations, cancelled_at = task.cancelling(), 0.0

    def look() -> None:
        nonlocal waiting, cancelled_at
        if is_waiting():
            cancelled_at = 0.0
        elif scope.cancel_called or task.cancelling() > num_cancellations:
            cancelled_at = cancelled_at or loop.time()
            if loop.time() - cancelled_at >= limit_s:
                problem = (
                    f"{key}: goes on {limit_s:g} s after its cancellation, which it catches (except BaseException)"
                )
                log.error("actor_failed", error=problem, exit_code=EXIT_FAILED)
                os._exit(EXIT_FAILED)
        waiting = loop.call_later(limit_s / LOOKS, look)

    waiting = loop.call_later(limit_s / LOOKS, look)
    try:
        yield
    finally:
        waiting.cancel()
