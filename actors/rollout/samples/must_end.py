"""Ends this process when a user's function goes on long after its cancellation.

A function that catches every exception in a loop (`except BaseException`) catches its cancellation too. Nothing in this
process can end it, and what waits for it would wait for ever. So its task fails with the reason, and the node daemon
starts the process again. The other tasks come again with the tokens that are stored.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Final

import anyio
import structlog

from runtime.util.exit_codes import EXIT_FAILED

log = structlog.get_logger()

LIMIT_S: Final = 30.0  # for a function's clean-up
LOOKS: Final = 10  # in the limit
WINDOW: Final = 1 / 3  # of the limit: until the process ends, so that functions cancelled soon afterwards fail with it

GiveUp = Callable[[str], Awaitable[None]]  # ends a task with the reason why it failed, though its function goes on


async def gives_up_nothing(_reason: str) -> None:
    """Do nothing: bin/try, for example, has no tasks."""


def never_halted() -> bool:
    """Return False, for what belongs to no round."""
    return False


@contextmanager
def must_end(
    key: str,
    scope: anyio.CancelScope,
    is_waiting: Callable[[], bool],
    *,
    give_up: GiveUp = gives_up_nothing,
    is_halted: Callable[[], bool] = never_halted,
    limit_s: float | None = None,
) -> Generator[None]:
    """Run a user's function in the block, and end the process if it goes on too long after its cancellation.

    Args:
        key: the setting that names the function.
        scope: around the block. It, or this task, is cancelled.
        is_waiting: whether the function waits for this project, as in an outage of the bus. That time does not count.
        give_up: called before the process ends, unless a halt was the cause: a task of a halted round comes again
            and ends without its function.
        is_halted: whether the round is halted.
        limit_s: seconds from the cancellation on; None: LIMIT_S.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    limit_s = LIMIT_S if limit_s is None else limit_s
    num_cancellations, cancelled_at, was_halted = task.cancelling(), 0.0, False
    ends: asyncio.Task[None] | None = None

    def look() -> None:
        nonlocal waiting, cancelled_at, was_halted, ends
        if is_waiting():
            cancelled_at = 0.0
        elif scope.cancel_called or task.cancelling() > num_cancellations:
            if not cancelled_at:
                cancelled_at, was_halted = loop.time(), is_halted()
            if loop.time() - cancelled_at >= limit_s:
                problem = (
                    f"{key}: goes on {limit_s:g} s after its cancellation, which it catches (except BaseException)"
                )
                given_up = gives_up_nothing if was_halted else give_up
                ends = loop.create_task(end_process(problem, given_up, within_s=limit_s * WINDOW))
                return
        waiting = loop.call_later(limit_s / LOOKS, look)

    waiting = loop.call_later(limit_s / LOOKS, look)
    try:
        yield
    finally:
        waiting.cancel()


async def end_process(problem: str, give_up: GiveUp = gives_up_nothing, *, within_s: float = LIMIT_S * WINDOW) -> None:
    """Give a task up, and end the process so many seconds later, when tasks that fail with it have ended."""
    try:
        async with asyncio.timeout(within_s):
            await give_up(problem)
            await anyio.sleep_forever()  # until the timeout
    except TimeoutError:
        pass
    finally:  # also if the bus is away: the task then comes again
        log.error("actor_failed", error=problem, exit_code=EXIT_FAILED)
        os._exit(EXIT_FAILED)
