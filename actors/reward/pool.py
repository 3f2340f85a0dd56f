"""Pool of grader processes behind a bounded queue; processes may hang, crash and be killed."""

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from itertools import takewhile

import anyio
import structlog

from actors.reward.frames import MAX_FRAME_BYTES, FrameError, Grade, Graded, GraderSpec, Hello, encode_frame
from actors.reward.process import GraderDiedError, GraderProcess, GraderProcessError
from actors.reward.samples import GradedSample
from actors.reward.sandbox import Sandbox
from runtime.util.retrying import Backoff, retried

BATCH_S = 0.002  # expected grading time per frame: cheap graders amortize a frame, expensive ones get one each
MAX_BATCH = 32
TICK_S = 0.25
LATE_S = 0.25  # a tick later than this means that the process was suspended, not that the loop was busy
TIMEOUT = "timeout"  # error of a score whose grader was killed for exceeding timeout_s

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """Settings of a grader pool."""

    hello: Hello  # first frame to each process
    sandbox: Sandbox = field(default_factory=Sandbox)
    num_processes: int = 2
    timeout_s: float = 10.0  # per score, from the moment its grader may start
    max_tries: int = 3  # crashes of processes on one sample before the sample fails
    queue_size: int = 1024  # batches of samples; a full queue makes callers wait
    max_failed_starts: int = 8  # consecutive failures, per process
    max_frame_bytes: int = MAX_FRAME_BYTES  # of a request; a larger one fails its samples
    backoff: Backoff = field(default_factory=Backoff)  # pauses between starts


@dataclass(eq=False, kw_only=True)
class _Grading:
    """Samples of one grader call: a single sample, or a whole group."""

    grader: GraderSpec
    samples: tuple[GradedSample, ...]
    num_tries: int = 0
    abandoned: bool = False  # the caller no longer waits
    grades: list[Graded] = field(default_factory=list[Graded])
    done: anyio.Event = field(default_factory=anyio.Event)

    def finish(self, grades: Sequence[Graded]) -> None:
        self.grades = list(grades)
        self.done.set()


class RunningTime:
    """Measures how long this process was suspended, for example by SIGSTOP, from late ticks."""

    def __init__(self) -> None:
        self._lost_s = 0.0
        self._due: float | None = None  # time of the next tick

    async def run(self) -> None:
        """Measure late ticks until cancelled."""
        try:
            while True:
                self._due = anyio.current_time() + TICK_S
                await anyio.sleep(TICK_S)
                self._lost_s = self.lost_s
        finally:
            self._due = None

    @property
    def lost_s(self) -> float:
        """Total seconds of suspension, including one that has just ended."""
        late_s = 0.0 if self._due is None else anyio.current_time() - self._due
        return self._lost_s + (late_s if late_s > LATE_S else 0.0)


class GraderPool:
    """Grades samples in separate processes. Created by `open_pool`."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._send_gradings, self._gradings = anyio.create_memory_object_stream[list[_Grading]](settings.queue_size)
        self._mean_s: dict[GraderSpec, float] = {}
        self._counts: Counter[str] = Counter()
        self._grading_s = 0.0
        self.running = RunningTime()

    async def grade(self, grader: GraderSpec, samples: Sequence[GradedSample]) -> list[Graded]:
        """Grade samples over all processes; return one grade or error per sample, in order.

        The wait is bounded by the queue's length, and by timeout_s and max_tries per score.
        """
        parts = [tuple(samples)] if grader.group else [(sample,) for sample in samples]
        gradings = [_Grading(grader=grader, samples=part) for part in parts]
        size = self._batch_size(grader)
        try:
            for start in range(0, len(gradings), size):
                await self._send_gradings.send(gradings[start : start + size])
            for grading in gradings:
                if not grading.done.is_set():
                    await grading.done.wait()
        finally:
            for grading in gradings:
                grading.abandoned = not grading.done.is_set()
        return [graded for grading in gradings for graded in grading.grades]

    def stats(self) -> dict[str, float]:
        """Counts and grading seconds since the start."""
        names = ("scores", "failed_scores", "timeouts", "deaths", "starts")
        return {f"num_{name}": float(self._counts[name]) for name in names} | {"grading_s": self._grading_s}

    def close(self) -> None:
        """Refuse further samples."""
        self._send_gradings.close()
        self._gradings.close()

    async def keep_process(self, process: GraderProcess | None = None) -> None:
        """Keep one process running and busy. Never returns.

        Raises:
            GraderProcessError: the process failed to start max_failed_starts + 1 times in a row.
        """
        gradings: list[_Grading] = []  # taken from the queue, unfinished
        num_idle_deaths = 0  # consecutive, without a score in between
        while True:
            process = process or await self._start_again()
            self._counts["starts"] += 1
            num_scores = self._counts["scores"]
            await self._use(process, gradings)
            process = None
            num_idle_deaths = 0 if self._counts["scores"] > num_scores else num_idle_deaths + 1
            if num_idle_deaths > 1:
                await anyio.sleep(self._settings.backoff.pause_s(num_idle_deaths - 1))

    async def _start_again(self) -> GraderProcess:
        return await retried(
            lambda: GraderProcess.start(self._settings.hello, self._settings.sandbox),
            on=GraderProcessError,
            times=self._settings.max_failed_starts + 1,
            failed=_log_failed_start,
            backoff=self._settings.backoff,
        )

    async def _use(self, process: GraderProcess, gradings: list[_Grading]) -> None:
        """Grade until the process dies or is killed for a timeout; `gradings` then holds the unfinished ones."""
        hung, death = False, None
        try:
            async with anyio.create_task_group() as watch:
                watch.start_soon(process.watch_exit, watch.cancel_scope.cancel)
                watch.start_soon(process.show_printed)
                try:
                    hung = await self._grade_until_stuck(process, gradings)
                except GraderDiedError as error:
                    death = str(error)
                watch.cancel_scope.cancel()
        finally:
            await process.kill()
        if hung:
            self._counts["timeouts"] += 1
            self._fail(gradings.pop(0), TIMEOUT)
        else:
            self._counts["deaths"] += 1
            self._blame(gradings, death or process.ending())

    async def _grade_until_stuck(self, process: GraderProcess, gradings: list[_Grading]) -> bool:
        """Grade until one grading exceeds its timeout, then return True. Finished gradings leave the list."""
        while True:
            while not gradings:
                gradings.extend(await self._take())
            try:
                batch, frame = _leading_frame(gradings, self._settings.max_frame_bytes)
            except FrameError as error:
                self._fail(gradings.pop(0), f"too large for a grader process: {error}")
                continue
            if not await self._in_time(lambda frame=frame: process.send(frame), process.flush):
                return True
            for grading in batch:
                size = len(grading.samples)
                if process.num_received < size and not await self._in_time(lambda size=size: process.receive(size)):
                    return True
                self._finish(gradings.pop(0), process.take(len(grading.samples)))

    async def _in_time(
        self, do: Callable[[], Awaitable[None]], go_on: Callable[[], Awaitable[None]] | None = None
    ) -> bool:
        """Await an operation for at most timeout_s; time in which this process was suspended does not count.

        Args:
            do: the operation; may be cancelled.
            go_on: continues it after a cancellation; None means calling `do` again.

        Returns:
            Whether the operation completed in time.
        """
        left_s = self._settings.timeout_s
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

    async def _take(self) -> list[_Grading]:
        gradings = list(await self._gradings.receive())
        limit = self._batch_size(gradings[0].grader)
        with suppress(anyio.WouldBlock):
            while len(gradings) < limit:
                gradings += self._gradings.receive_nowait()
        return [grading for grading in gradings if not grading.abandoned]

    def _batch_size(self, grader: GraderSpec) -> int:
        mean_s = self._mean_s.get(grader)
        return 1 if mean_s is None else max(1, min(MAX_BATCH, int(BATCH_S / max(mean_s, 1e-6))))

    def _finish(self, grading: _Grading, grades: Sequence[Graded]) -> None:
        took_s = sum(graded.took_s for graded in grades)
        self._mean_s[grading.grader] = 0.9 * self._mean_s.get(grading.grader, took_s) + 0.1 * took_s
        self._grading_s += took_s
        self._counts["scores"] += len(grades)
        self._counts["failed_scores"] += sum(graded.error is not None for graded in grades)
        grading.finish(grades)

    def _blame(self, gradings: list[_Grading], death: str) -> None:
        """Attribute a crash to the first unfinished grading: the process answers in order. The others lose no try."""
        if not gradings:
            log.warning("grader_died", reason=death)
            return
        gradings[0].num_tries += 1
        final = gradings[0].num_tries >= self._settings.max_tries
        log.warning("grader_died", reason=death, num_tries=gradings[0].num_tries, final=final)
        if final:
            self._fail(gradings.pop(0), f"{death}, {self._settings.max_tries} times")

    def _fail(self, grading: _Grading, reason: str) -> None:
        self._counts["failed_scores"] += len(grading.samples)
        grading.finish([Graded(error=reason) for _ in grading.samples])


@asynccontextmanager
async def open_pool(settings: PoolSettings) -> AsyncGenerator[GraderPool]:
    """Open a pool once its first process is ready; the others start in the background. All end with the context.

    Raises:
        GraderUnusableError: a grader cannot be used; names it and the reason.
        GraderStartError: the first process did not start.
    """
    first = await GraderProcess.start(settings.hello, settings.sandbox)
    with closing(GraderPool(settings)) as pool:
        async with anyio.create_task_group() as keepers:
            keepers.start_soon(pool.running.run)
            keepers.start_soon(pool.keep_process, first)
            for _ in range(settings.num_processes - 1):
                keepers.start_soon(pool.keep_process)
            try:
                yield pool
            finally:
                keepers.cancel_scope.cancel()


def _leading_batch(gradings: Sequence[_Grading]) -> list[_Grading]:
    """The first gradings that one frame may carry: several samples for one grader, or a single group."""
    first = gradings[0].grader
    if first.group:
        return [gradings[0]]
    return list(takewhile(lambda grading: grading.grader == first, gradings))


def _leading_frame(gradings: Sequence[_Grading], max_bytes: int) -> tuple[list[_Grading], bytes]:
    """The first gradings that fit into one frame, and the frame.

    Raises:
        FrameError: the first grading alone does not fit.
    """
    batch = _leading_batch(gradings)
    while True:
        samples = tuple(sample for grading in batch for sample in grading.samples)
        try:
            return batch, encode_frame(Grade(grader=batch[0].grader, samples=samples), max_bytes=max_bytes)
        except FrameError:
            if len(batch) == 1:
                raise
        batch = batch[: len(batch) // 2]


def _log_failed_start(error: Exception, failures: int) -> None:
    log.warning("grader_start_failed", reason=str(error), in_a_row=failures)
