"""Background tasks for the duration of a block."""

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def task_group() -> AsyncGenerator[TaskGroup, None]:
    """A task group that is cancelled at the end of its block. Raises a single error unwrapped, not as a group."""
    try:
        async with anyio.create_task_group() as group:
            try:
                yield group
            finally:
                group.cancel_scope.cancel()
    except BaseExceptionGroup as failed:
        error: BaseException = failed.exceptions[0]
        if len(failed.exceptions) > 1:
            raise
        raise error from error.__cause__


@asynccontextmanager
async def in_background(work: Callable[[], Coroutine[Any, Any, None]]) -> AsyncGenerator[None, None]:
    """Run a coroutine in the background for the duration of a block."""
    async with task_group() as group:
        group.start_soon(work)
        yield
