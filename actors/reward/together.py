"""One grader process in use by calls of async functions, which run together."""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from actors.reward.frames import Grade, encode_frame
from actors.reward.gradings import TICK_S, Grading, RunningTime
from actors.reward.process import GraderProcess
from runtime.functions.child import UserProcessError
from runtime.functions.frames import FrameError

GRACE_S: Final = 5.0  # after its timeout a call must have ended; the process itself ends calls before that


class CallsTogether:
    """Sends calls to one process until it ends. Nothing is lost: `left` and `suspects` go to the next process.

    If a process ends with several calls in flight, any of them may be the cause. All become suspects, in two groups.
    The next process runs one group of suspects after the other, before further calls. A group that ends its process is
    halved again, until a single call is to blame.
    """

    def __init__(
        self,
        process: GraderProcess,
        take: Callable[[], Awaitable[list[Grading]]],
        finished: Callable[[Grading], None],
        *,
        at_once: int,
        max_frame_bytes: int,
        running: RunningTime,
        left: deque[Grading],
        suspects: deque[list[Grading]],
    ) -> None:
        """Start without calls.

        Args:
            process: the process; it was started for async functions.
            take: waits for further calls.
            finished: called after a call has its grades.
            at_once: number of calls in flight.
            max_frame_bytes: of a call; a larger one fails.
            running: the time that this process itself ran.
            left: calls that earlier processes did not answer; first to run.
            suspects: groups of calls of which one may have ended an earlier process.
        """
        self._process = process
        self._take = take
        self._finished = finished
        self._max_frame_bytes = max_frame_bytes
        self._running = running
        self._left, self._suspects = left, suspects
        self._room = anyio.Semaphore(at_once)
        self._flight: dict[int, tuple[Grading, float]] = {}  # call and the time it was sent, by number
        self._num_sent = 0
        self._ended_itself = False
        self._death: str | None = None

    async def run(self) -> tuple[list[Grading], str | None]:
        """Use the process until it ends.

        Returns:
            The calls in flight that may have ended it, and the way it ended. None: it took too long to answer. No
            call is to blame if the process named another one.
        """
        late = False
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._process.watch_exit, tasks.cancel_scope.cancel)
                tasks.start_soon(self._process.forward)
                tasks.start_soon(self._receive_all_until, tasks.cancel_scope.cancel)
                tasks.start_soon(self._send_all)
                late = await self._until_late()
                tasks.cancel_scope.cancel()
        finally:
            await self._process.kill()
        death = None if late else self._death or self._process.ending()
        in_flight = [grading for grading, _ in self._flight.values() if not grading.abandoned]
        if self._ended_itself:
            self._left.extendleft(reversed(in_flight))
            in_flight = []
        return in_flight, death

    async def _send_all(self) -> None:
        try:
            while True:
                while self._suspects:
                    await self._send_group(self._suspects[0])
                    self._suspects.popleft()
                await self._room.acquire()
                while not self._left:
                    self._left.extend(await self._take())
                grading = self._left[0]
                if grading.abandoned:
                    self._left.popleft()
                    self._room.release()
                else:
                    await self._send(grading)
        except UserProcessError:
            return  # `watch_exit` ends the use, after what the process wrote is read

    async def _send_group(self, suspects: list[Grading]) -> None:
        sent = [suspect for suspect in suspects if not suspect.abandoned]
        for suspect in sent:
            await self._room.acquire()
            await self._send(suspect)
        for suspect in sent:
            await suspect.wait()

    async def _send(self, grading: Grading) -> None:
        self._num_sent += 1
        call = self._num_sent
        message = Grade(grader=grading.grader, samples=grading.samples, call=call, timeout_s=grading.timeout_s)
        try:
            frame = encode_frame(message, max_bytes=self._max_frame_bytes)
        except FrameError as error:
            grading.fail(f"too large for a grader process: {error}", "refused")
            self._finished(grading)
            self._room.release()
        else:
            self._flight[call] = grading, self._now()
            await self._process.send(frame)
        finally:
            if self._left and self._left[0] is grading:
                self._left.popleft()

    async def _receive_all_until(self, ended: Callable[[], None]) -> None:
        try:
            while True:
                answer = await self._process.receive_call()
                grading, _ = self._flight.get(answer.call, (None, 0.0))
                if grading is None or len(answer.grades) != len(grading.samples):
                    raise self._process.broken("grades that no call asked for")
                del self._flight[answer.call]
                grading.finish(answer.grades)
                self._finished(grading)
                self._room.release()
                if answer.last:
                    self._ended_itself = True
        except UserProcessError as error:
            self._death = str(error)
            ended()

    async def _until_late(self) -> bool:
        """Wait until a call should have been ended by the process long ago."""
        while True:
            await anyio.sleep(TICK_S)
            now = self._now()
            if any(now - sent_at > grading.timeout_s + GRACE_S for grading, sent_at in self._flight.values()):
                return True

    def _now(self) -> float:
        return anyio.current_time() - self._running.lost_s


def halved(in_flight: list[Grading], suspects: deque[list[Grading]]) -> deque[list[Grading]]:
    """The groups of suspects after a process ended.

    Args:
        in_flight: the calls that may have ended it.
        suspects: the groups before.

    Returns:
        The unfinished calls in flight, in two halves, then the other unfinished suspects.
    """
    rest = [[one for one in group if not one.is_done and one not in in_flight] for group in suspects]
    again = [one for one in in_flight if not one.is_done]
    middle = (len(again) + 1) // 2
    return deque(group for group in (again[:middle], again[middle:], *rest) if group)
