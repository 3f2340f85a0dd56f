"""Calls of a function that grades samples of many score requests at once."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio
import structlog

from actors.reward.grades import Graded, GraderSpec
from actors.reward.gradings import CallLimits
from actors.reward.pool import GraderPool
from actors.reward.samples import GradedSample

MAX_REQUESTS: Final = 1024  # score requests in hand, however large a batch is

log = structlog.get_logger()


@dataclass(eq=False, kw_only=True)
class _Waiting:
    """A sample that waits for its grade."""

    sample: GradedSample
    since: float  # loop time
    abandoned: bool = False  # the caller no longer waits
    graded: Graded | None = None
    done: anyio.Event = field(default_factory=anyio.Event)


class Batches:
    """Collects samples into batches, one call each. A batch whose call fails is halved until only the culprit fails."""

    def __init__(self, pool: GraderPool, grader: GraderSpec, *, size: int, wait_s: float, limits: CallLimits) -> None:
        """Start empty; `run` makes the calls.

        Args:
            pool: runs the function.
            grader: the function, which takes a list of samples.
            size: samples of a call at most.
            wait_s: seconds that a sample waits for others while a process is free.
            limits: of each call.
        """
        self._pool = pool
        self._grader = grader
        self._size = size
        self._wait_s = wait_s
        self._limits = limits
        self._queue: deque[_Waiting] = deque()
        self._arrived = anyio.Event()

    @property
    def requests_at_once(self) -> int:
        """Number of score requests in hand that keep the processes busy with full batches."""
        return min(MAX_REQUESTS, self._pool.calls_at_once(self._grader) * self._size)

    async def grade(self, samples: Sequence[GradedSample]) -> list[Graded]:
        """Return one grade per sample, in order."""
        now = anyio.current_time()
        waiting = [_Waiting(sample=sample, since=now) for sample in samples]
        self._queue.extend(waiting)
        self._arrived.set()
        try:
            for one in waiting:
                await one.done.wait()
        finally:
            for one in waiting:
                one.abandoned = one.graded is None
        return [one.graded for one in waiting if one.graded is not None]

    async def run(self) -> None:
        """Call the function for batches until cancelled."""
        room = anyio.Semaphore(self._pool.calls_at_once(self._grader))
        async with anyio.create_task_group() as calls:
            while True:
                await self._until_due()
                await room.acquire()
                calls.start_soon(self._grade_next, self._take(), room)

    async def _until_due(self) -> None:
        """Wait until a batch is full, or its oldest sample has waited long enough."""
        while not self._queue:
            self._arrived = anyio.Event()
            await self._arrived.wait()
        with anyio.move_on_after(self._queue[0].since + self._wait_s - anyio.current_time()):
            while len(self._queue) < self._size:
                self._arrived = anyio.Event()
                await self._arrived.wait()

    def _take(self) -> list[_Waiting]:
        return [self._queue.popleft() for _ in range(min(self._size, len(self._queue)))]

    async def _grade_next(self, batch: list[_Waiting], room: anyio.Semaphore) -> None:
        try:
            await self._grade(batch)
        finally:
            room.release()

    async def _grade(self, batch: list[_Waiting]) -> None:
        """Grade a batch in one call. If the call fails as a whole, grade its halves."""
        batch = [one for one in batch if not one.abandoned]
        if not batch:
            return
        grades = await self._pool.grade(
            self._grader, [one.sample for one in batch], self._limits, splits=len(batch) > 1
        )
        if len(batch) > 1 and grades[0].of_call:
            log.warning("batch_failed", num_samples=len(batch), cause=grades[0].cause, reason=grades[0].error)
            middle = len(batch) // 2
            async with anyio.create_task_group() as halves:
                halves.start_soon(self._grade, batch[:middle])
                halves.start_soon(self._grade, batch[middle:])
            return
        for one, graded in zip(batch, grades, strict=True):
            one.graded = graded
            one.done.set()
