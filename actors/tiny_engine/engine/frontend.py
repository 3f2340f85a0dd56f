"""Frontend between HTTP and the torch thread: admission, progress, pauses and weight updates, as in SGLang."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar

from actors.tiny_engine.engine.adapters import LoadedAdapters
from actors.tiny_engine.engine.core import Core, Updated
from actors.tiny_engine.engine.scheduler import TokenReport
from actors.tiny_engine.engine.thread import EngineThread
from actors.tiny_engine.http.api import Job
from actors.tiny_engine.http.rendering import Clock, Progress

T = TypeVar("T")


class QueueFull(Exception):
    """The server has its maximum number of requests."""


class Waiting:
    """Progress of one request, for its HTTP handler."""

    def __init__(self, job: Job, changed: asyncio.Event) -> None:
        self.job = job
        self.progress = Progress(0, None)
        self._changed = changed

    def advance(self, report: TokenReport) -> None:
        """Update the progress. Unread reports are merged, so a slow reader costs no memory."""
        self.progress = Progress(report.num_tokens, report.finish, report.spans)
        self._changed.set()


class GenerateCall:
    """The requests of one /generate call in progress."""

    def __init__(self, jobs: Sequence[Job], started: float) -> None:
        self._changed = asyncio.Event()
        self._started = started
        self.waiting = [Waiting(job, self._changed) for job in jobs]

    @property
    def ended(self) -> bool:
        """Whether every request has ended."""
        return all(each.progress.finish is not None for each in self.waiting)

    async def change(self) -> None:
        """Wait until a request has progressed since the last call."""
        await self._changed.wait()
        self._changed.clear()

    async def end(self) -> None:
        """Wait until every request has ended."""
        while not self.ended:
            await self.change()

    def clock(self) -> Clock:
        """Timestamps for an answer sent now."""
        return Clock(latency_s=time.perf_counter() - self._started, now_s=time.time())


class EngineLoad(NamedTuple):
    """Number of requests and tokens in the engine."""

    num_running: int
    num_waiting: int  # in the engine's queue, or held back by the frontend
    num_used_tokens: int
    num_generated: int  # tokens since the start
    num_retracted: int  # requests retracted before the newest statistics


class Frontend:
    """Admits calls and forwards operations to the torch thread. Runs on the event loop's thread."""

    def __init__(self, *, max_requests: int, version: str, adapters: LoadedAdapters) -> None:
        self.version = version
        self.adapters = adapters
        self.engine: EngineThread  # set once, before the first call
        self.paused = False
        self._max_requests = max_requests  # running, queued and held back
        self._num_held = 0
        self._num_updating = 0
        self._open = asyncio.Event()
        self._open.set()
        self._live: dict[str, Waiting] = {}  # by rid
        self._num_unfinished = 0
        self._drained = asyncio.Event()
        self._drained.set()
        self._update_lock = asyncio.Lock()

    def deliver(self, reports: list[TokenReport]) -> None:
        """Pass a step's reports to the waiting handlers."""
        for report in reports:
            if report.finish is not None:
                self._num_unfinished -= 1
                self.adapters.release([report.request])
            waiting = self._live.get(report.request.rid)
            if waiting is not None and waiting.job.request is report.request:
                waiting.advance(report)
        if not self._num_unfinished:
            self._drained.set()

    @asynccontextmanager
    async def generation(self, jobs: Sequence[Job]) -> AsyncGenerator[GenerateCall]:
        """Submit the jobs of a call, after any pause or update. Jobs unfinished at exit are aborted.

        Raises:
            QueueFull: the server has its maximum number of requests.
            ValueError: a request id is in use, or an adapter is not loaded.
        """
        started = time.perf_counter()
        if self._num_held + self._num_unfinished + len(jobs) > self._max_requests:
            raise QueueFull("The request queue is full.")
        requests = [job.request for job in jobs]
        self.adapters.acquire(requests)
        self._num_held += len(jobs)
        generation = GenerateCall(jobs, started)
        try:
            await self._pass()
            self._register(generation.waiting)
        except BaseException:
            self.adapters.release(requests)
            raise
        finally:
            self._num_held -= len(jobs)
        try:
            self.engine.submit(requests)
            yield generation
        finally:
            self._unregister(generation.waiting)

    async def _pass(self) -> None:
        while not self._open.is_set():
            await self._open.wait()

    def _register(self, waiting: Sequence[Waiting]) -> None:
        rids = [each.job.request.rid for each in waiting]
        taken = [rid for rid in rids if rid in self._live]
        if taken or len(set(rids)) < len(rids):
            raise ValueError(f"Duplicate request ID detected: {(taken or rids)[0]}")
        self._live.update(zip(rids, waiting, strict=True))
        self._num_unfinished += len(waiting)
        self._drained.clear()

    def _unregister(self, waiting: Sequence[Waiting]) -> None:
        rids = {each.job.request.rid for each in waiting if each.progress.finish is None}
        for each in waiting:
            del self._live[each.job.request.rid]
        if rids:
            self._abort(rids)

    def _abort(self, rids: Collection[str]) -> None:
        wanted = frozenset(rids)
        self.engine.post(lambda core: core.scheduler.abort(wanted))

    def abort(self, rid: str) -> None:
        """Abort one request if it was submitted; requests held back by a pause are not, as in SGLang."""
        if rid in self._live:
            self._abort((rid,))

    def abort_all(self) -> None:
        """Abort all requests in the engine."""
        self.engine.post(lambda core: core.scheduler.abort(None))

    async def pause(self, mode: str) -> None:
        """Pause generation and hold new calls back; with `abort`, return once all requests have ended."""
        self.paused = True
        self._open.clear()
        await self.engine.call(lambda core: core.pause(mode))
        if mode == "abort":
            await self._drained.wait()

    def proceed(self) -> None:
        """End a pause."""
        self.paused = False
        self.engine.post(lambda core: core.resume())
        self._reopen()

    def _reopen(self) -> None:
        if not self.paused and not self._num_updating:
            self._open.set()

    async def unpaused(self) -> None:
        """Wait until new calls are admitted."""
        await self._pass()

    async def update(self, order: Callable[[Core], Updated], *, version: str | None, abort_all: bool) -> Updated:
        """Run a weight update exclusively, and set the version if one is given.

        Raises:
            Exception: any exception of the operation.
        """
        updated = await self.alone(order, abort_all=abort_all)
        if updated.flushed and version is not None:
            self.version = version
        return updated

    async def alone(self, order: Callable[[Core], T], *, abort_all: bool = False) -> T:
        """Run an operation exclusively: at once while paused, else after holding new calls back and draining.

        Raises:
            Exception: any exception of the operation.
        """
        async with self._update_lock:
            self._num_updating += 1
            self._open.clear()
            try:
                if abort_all:
                    self.abort_all()
                if not self.paused:
                    await self._drained.wait()
                return await self.engine.call(order)
            finally:
                self._num_updating -= 1
                self._reopen()

    async def update_version(self, version: str, *, abort_all: bool) -> None:
        """Set the version of the weights."""
        if abort_all:
            self.abort_all()
        await self.engine.call(lambda core: core.scheduler.use_version(version))
        self.version = version

    async def flush(self, timeout_s: float) -> bool:
        """Flush the cache, after waiting up to `timeout_s` for idleness; return whether it was flushed."""
        if timeout_s > 0 and not self.paused:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._drained.wait()
            except TimeoutError:
                return False
        return await self.engine.call(lambda core: core.scheduler.flush())

    async def loads(self) -> EngineLoad:
        """Count requests and tokens."""
        num_held = self._num_held
        return await self.engine.call(
            lambda core: EngineLoad(
                num_running=len(core.scheduler.slots.requests),
                num_waiting=len(core.scheduler.waiting) + num_held,
                num_used_tokens=core.scheduler.slots.num_used_tokens,
                num_generated=core.scheduler.num_generated,
                num_retracted=core.scheduler.num_retracted,
            )
        )
