"""Pool of grader processes behind a bounded queue; processes may hang, crash and be killed."""

from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from itertools import takewhile

import anyio
import msgspec
import structlog

from actors.reward.causes import CAUSES, Cause, late
from actors.reward.grades import GATHER_S, MAX_FRAME_BYTES, Grade, Graded, GraderSpec, Hello, gathers
from actors.reward.gradings import CallLimits, Grading
from actors.reward.process import GraderProcess, GraderProcessError
from actors.reward.samples import GradedSample
from runtime.functions.child import UserProcessError
from runtime.functions.frames import FrameError, framed
from runtime.functions.sandbox import Sandbox
from runtime.functions.together import TICK_S, CallsTogether, halved
from runtime.util.formatting import count_of
from runtime.util.retrying import Backoff, retried
from runtime.util.running_time import RunningTime

BATCH_S = GATHER_S  # expected grading time per frame: cheap graders amortize a frame, expensive ones get one each
MAX_BATCH = 32
CALLS_PER_PROCESS = 4  # of plain functions: enough to keep a process busy, and leaves work for other actors

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """Settings of a grader pool."""

    hello: Hello  # first frame to each process
    sandbox: Sandbox = field(default_factory=Sandbox)
    num_processes: int = 2  # for plain functions, and as many for async functions
    at_once: int = 64  # calls of async functions that run together in a process
    timeout_s: float = 10.0  # per score, from the moment its grader may start
    max_tries: int = 3  # crashes of processes on one sample before the sample fails
    queue_size: int = 1024  # batches of samples; a full queue makes callers wait
    max_failed_starts: int = 8  # consecutive failures, per process
    max_frame_bytes: int = MAX_FRAME_BYTES  # of a request; a larger one fails its samples
    backoff: Backoff = field(default_factory=Backoff)  # pauses between starts


class GraderPool:
    """Grades samples in separate processes. Created by `open_pool`."""

    def __init__(self, settings: PoolSettings, asynchronous: Collection[GraderSpec] = ()) -> None:
        """Start without processes.

        Args:
            settings: its settings.
            asynchronous: the graders whose calls run together.
        """
        self._settings = settings
        self._send_gradings, self._gradings = anyio.create_memory_object_stream[list[Grading]](settings.queue_size)
        self._send_calls, self._calls = anyio.create_memory_object_stream[list[Grading]](settings.queue_size)
        self._asynchronous = asynchronous
        self._limits = CallLimits(timeout_s=settings.timeout_s)
        self._mean_s: dict[GraderSpec, float] = {}
        self._counts: Counter[str] = Counter()
        self._grading_s = 0.0
        self.running = RunningTime(anyio.current_time, TICK_S)

    def calls_at_once(self, grader: GraderSpec) -> int:
        """Number of calls of a grader that keep its processes busy."""
        together = grader in self._asynchronous
        return self._settings.num_processes * (self._settings.at_once if together else CALLS_PER_PROCESS)

    async def grade(
        self,
        grader: GraderSpec,
        samples: Sequence[GradedSample],
        limits: CallLimits | None = None,
        *,
        splits: bool = False,
    ) -> list[Graded]:
        """Grade samples over all processes; return one grade or error per sample, in order.

        The wait is bounded by the queue's length, and by the timeout and max_tries per score.

        Args:
            grader: the grader.
            samples: the samples; one call takes all of them if the grader takes groups.
            limits: of its calls; None: those of the pool.
            splits: whether samples of a failed call are graded again in smaller ones. Then it is not repeated, and its
                failure is not counted.
        """
        limits = limits or self._limits
        parts = [tuple(samples)] if grader.group else [(sample,) for sample in samples]
        gradings = [Grading(grader=grader, samples=part, timeout_s=limits.timeout_s, splits=splits) for part in parts]
        queue = self._send_calls if grader in self._asynchronous else self._send_gradings
        size = 1 if limits.rate is not None else self._batch_size(grader)
        try:
            for start in range(0, len(gradings), size):
                if limits.rate is not None:
                    await limits.rate.wait()
                await queue.send(gradings[start : start + size])
            for grading in gradings:
                await grading.wait()
        finally:
            for grading in gradings:
                grading.abandoned = not grading.is_done
        return [graded for grading in gradings for graded in grading.grades]

    def stats(self) -> dict[str, float]:
        """Counts and grading seconds since the start."""
        names = ("scores", "failed_scores", "timeouts", "deaths", "starts", *(f"{cause}_scores" for cause in CAUSES))
        return {f"num_{name}": float(self._counts[name]) for name in names} | {"grading_s": self._grading_s}

    def close(self) -> None:
        """Refuse further samples."""
        for stream in (self._send_gradings, self._gradings, self._send_calls, self._calls):
            stream.close()

    async def keep_time(self) -> None:
        """Measure how long this process is suspended. Never returns."""
        while True:
            self.running.tick()
            await anyio.sleep(TICK_S)

    async def keep_process(self, process: GraderProcess | None = None) -> None:
        """Keep one process running and busy. Never returns.

        Raises:
            GraderProcessError: the process failed to start max_failed_starts + 1 times in a row.
        """
        gradings: list[Grading] = []  # taken from the queue, unfinished
        await self._keep(self._settings.hello, lambda process: self._use(process, gradings), process)

    async def keep_process_of_async(self) -> None:
        """Keep one process for async functions running and busy. Never returns. Raises as `keep_process` does."""
        left, suspects = deque[Grading](), deque[list[Grading]]()

        async def use(process: GraderProcess) -> None:
            nonlocal suspects
            calls = CallsTogether(
                process,
                self._calls.receive,
                self._count,
                at_once=self._settings.at_once,
                max_frame_bytes=self._settings.max_frame_bytes,
                running=self.running,
                left=left,
                suspects=suspects,
            )
            in_flight, death = await calls.run()
            self._counts["deaths" if death else "timeouts"] += 1
            self._blame_of_async(in_flight, death)
            suspects = halved(in_flight, suspects)

        await self._keep(msgspec.structs.replace(self._settings.hello, together=True), use)

    async def _keep(
        self, hello: Hello, use: Callable[[GraderProcess], Awaitable[None]], process: GraderProcess | None = None
    ) -> None:
        """Start a process whenever the one before has ended, and use it until it ends."""
        num_idle_deaths = 0  # consecutive, without a score in between
        while True:
            process = process or await self._start_again(hello)
            self._counts["starts"] += 1
            num_scores = self._counts["scores"]
            await use(process)
            process = None
            num_idle_deaths = 0 if self._counts["scores"] > num_scores else num_idle_deaths + 1
            if num_idle_deaths > 1:
                await anyio.sleep(self._settings.backoff.pause_s(num_idle_deaths - 1))

    def _blame_of_async(self, in_flight: Sequence[Grading], death: str | None) -> None:
        """Attribute the end of a process to its call, if it was the only one in flight."""
        log.warning("grader_died", reason=death or "timeout", num_calls=len(in_flight))
        if len(in_flight) == 1:
            (grading,) = in_flight
            grading.num_tries += 1
            if death is None:
                self._fail(grading, late(grading.timeout_s), "timeout")
            elif self._tried_enough(grading):
                self._fail(grading, f"{death}, {count_of(self._settings.max_tries, 'time')}", "sandbox_lost")

    async def _start_again(self, hello: Hello) -> GraderProcess:
        return await retried(
            lambda: GraderProcess.start(hello, self._settings.sandbox),
            on=GraderProcessError,
            times=self._settings.max_failed_starts + 1,
            failed=_log_failed_start,
            backoff=self._settings.backoff,
        )

    async def _use(self, process: GraderProcess, gradings: list[Grading]) -> None:
        """Grade until the process dies or is killed for a timeout; `gradings` then holds the unfinished ones."""
        hung, death = False, None
        try:
            async with anyio.create_task_group() as watch:
                watch.start_soon(process.watch_exit, watch.cancel_scope.cancel)
                watch.start_soon(process.forward)
                try:
                    hung = await self._grade_until_stuck(process, gradings)
                except UserProcessError as error:
                    death = str(error)
                watch.cancel_scope.cancel()
        finally:
            await process.kill()
        self._counts["timeouts" if hung else "deaths"] += 1
        reason = "timeout" if hung else death or process.ending()
        if suspects := _suspects(gradings):
            log.warning("grader_died", reason=reason, num_calls=len(suspects))
            for suspect in suspects:
                suspect.alone = True
        elif hung:
            grading = gradings.pop(0)
            self._fail(grading, late(grading.timeout_s), "timeout")
        else:
            self._blame(gradings, reason)

    async def _grade_until_stuck(self, process: GraderProcess, gradings: list[Grading]) -> bool:
        """Grade until one grading exceeds its timeout, then return True. Finished gradings leave the list."""
        while True:
            while not gradings:
                gradings.extend(await self._take())
            try:
                batch, frame = _leading_frame(gradings, self._settings.max_frame_bytes)
            except FrameError as error:
                self._fail(gradings.pop(0), f"too large for a grader process: {error}", "refused")
                continue
            timeout_s = batch[0].timeout_s
            if not await self._in_time(timeout_s, lambda frame=frame: process.send(frame), lambda: process.send(b"")):
                return True
            for grading in batch:
                size = len(grading.samples)
                if process.num_received < size and not await self._in_time(
                    grading.timeout_s, lambda size=size: process.receive(size)
                ):
                    return True
                self._finish(gradings.pop(0), process.take(len(grading.samples)))

    async def _in_time(
        self,
        timeout_s: float,
        do: Callable[[], Awaitable[None]],
        go_on: Callable[[], Awaitable[None]] | None = None,
    ) -> bool:
        """Await an operation for at most timeout_s; time in which this process was suspended does not count.

        Args:
            timeout_s: seconds.
            do: the operation; may be cancelled.
            go_on: continues it after a cancellation; None means calling `do` again.

        Returns:
            Whether the operation completed in time.
        """
        left_s = timeout_s
        while True:
            lost_s = self.running.lost_s
            with anyio.move_on_after(left_s) as limit:
                await do()
            if not limit.cancelled_caught:
                return True
            left_s = self.running.lost_s - lost_s
            if not left_s:
                return False
            log.warning("grading_stood_still", lost_s=left_s)
            do = go_on or do

    async def _take(self) -> list[Grading]:
        gradings = list(await self._gradings.receive())
        limit = self._batch_size(gradings[0].grader)
        with suppress(anyio.WouldBlock):
            while len(gradings) < limit:
                gradings += self._gradings.receive_nowait()
        return [grading for grading in gradings if not grading.abandoned]

    def _batch_size(self, grader: GraderSpec) -> int:
        mean_s = self._mean_s.get(grader)
        return 1 if mean_s is None else max(1, min(MAX_BATCH, int(BATCH_S / max(mean_s, 1e-6))))

    def _finish(self, grading: Grading, grades: Sequence[Graded]) -> None:
        took_s = sum(graded.took_s for graded in grades)
        self._mean_s[grading.grader] = 0.9 * self._mean_s.get(grading.grader, took_s) + 0.1 * took_s
        grading.finish(grades)
        self._count(grading)

    def _count(self, grading: Grading) -> None:
        """Count the grades of a finished call."""
        self._grading_s += sum(graded.took_s for graded in grading.grades)
        if grading.splits and grading.grades[0].of_call:
            return
        self._counts["scores"] += len(grading.grades)
        for graded in grading.grades:
            if graded.error is not None:
                self._counts["failed_scores"] += 1
                self._counts[f"{graded.cause}_scores"] += 1

    def _blame(self, gradings: list[Grading], death: str) -> None:
        """Attribute a crash to the first unfinished grading: the process answers in order. The others lose no try."""
        if not gradings:
            log.warning("grader_died", reason=death)
            return
        gradings[0].num_tries += 1
        final = self._tried_enough(gradings[0])
        log.warning("grader_died", reason=death, num_tries=gradings[0].num_tries, final=final)
        if final:
            self._fail(gradings.pop(0), f"{death}, {count_of(self._settings.max_tries, 'time')}", "sandbox_lost")

    def _tried_enough(self, grading: Grading) -> bool:
        return grading.splits or grading.num_tries >= self._settings.max_tries

    def _fail(self, grading: Grading, reason: str, cause: Cause) -> None:
        if grading.splits:
            grading.fail(reason, cause)
            return
        self._counts["failed_scores"] += len(grading.samples)
        self._counts[f"{cause}_scores"] += len(grading.samples)
        grading.fail(reason, cause)


@asynccontextmanager
async def open_pool(settings: PoolSettings) -> AsyncGenerator[GraderPool]:
    """Open a pool once its first process is ready; the others start in the background. All end with the context.

    If all graders are async functions, one process is kept for plain functions, such as built-in ones of rows.

    Raises:
        GraderUnusableError: a grader cannot be used; names it and the reason.
        GraderStartError: the first process did not start.
    """
    first = await GraderProcess.start(settings.hello, settings.sandbox)
    with closing(GraderPool(settings, first.asynchronous)) as pool:
        async with anyio.create_task_group() as keepers:
            keepers.start_soon(pool.keep_time)
            keepers.start_soon(pool.keep_process, first)
            for _ in range(settings.num_processes if first.asynchronous else 0):
                keepers.start_soon(pool.keep_process_of_async)
            graders = settings.hello.graders
            all_async = bool(graders) and len(first.asynchronous) == len(graders)
            for _ in range(0 if all_async else settings.num_processes - 1):
                keepers.start_soon(pool.keep_process)
            try:
                yield pool
            finally:
                keepers.cancel_scope.cancel()


def _leading_batch(gradings: Sequence[Grading]) -> list[Grading]:
    """The first gradings that one frame may carry: several samples for one grader, or a single group."""
    first = gradings[0].grader
    if first.group or gradings[0].alone:
        return [gradings[0]]
    return list(takewhile(lambda grading: grading.grader == first and not grading.alone, gradings))


def _suspects(gradings: Sequence[Grading]) -> list[Grading]:
    """The unfinished gradings of which any may have ended a process; none if it is known to be the first.

    Several answers of a built-in grader are written at once, so that some may be lost with the process.
    """
    batch = _leading_batch(gradings) if gradings else []
    return batch if len(batch) > 1 and gathers(batch[0].grader) else []


def _leading_frame(gradings: Sequence[Grading], max_bytes: int) -> tuple[list[Grading], bytes]:
    """The first gradings that fit into one frame, and the frame.

    Raises:
        FrameError: the first grading alone does not fit.
    """
    batch = _leading_batch(gradings)
    while True:
        samples = tuple(sample for grading in batch for sample in grading.samples)
        try:
            return batch, framed(msgspec.msgpack.encode(Grade(grader=batch[0].grader, samples=samples)), max_bytes)
        except FrameError:
            if len(batch) == 1:
                raise
        batch = batch[: len(batch) // 2]


def _log_failed_start(error: Exception, failures: int) -> None:
    log.warning("grader_start_failed", reason=str(error), in_a_row=failures)
