"""One process in use by calls of async functions, which run together: `overlapping.py` is the other side."""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

import anyio

from runtime.functions.child import Child, UserProcessError
from runtime.functions.frames import ANSWERED, CALL, NUMBER, STUCK, FrameError, framed
from runtime.util.running_time import RunningTime

TICK_S: Final = 0.25
GRACE_S: Final = 5.0  # after its timeout a call must have ended; the process itself ends calls before that


class Call(Protocol):
    """A call, which may be sent again to another process."""

    timeout_s: float
    abandoned: bool  # its caller no longer waits
    is_done: bool

    async def wait(self) -> None: ...
    def payload(self) -> bytes: ...
    def end(self, kind: bytes, content: bytes) -> None: ...  # raises ValueError: the content is no answer
    def refuse(self, error: FrameError) -> None: ...  # its payload is too large


CallT = TypeVar("CallT", bound=Call)


class CallsTogether(Generic[CallT]):
    """Sends calls to one process until it ends. Nothing is lost: `left` and `suspects` go to the next process.

    If a process ends with several calls in flight, any of them may be the cause. All become suspects, in two groups.
    The next process runs one group of suspects after the other, before further calls. A group that ends its process is
    halved again, until a single call is to blame.
    """

    def __init__(
        self,
        process: Child,
        take: Callable[[], Awaitable[list[CallT]]],
        finished: Callable[[CallT], None],
        *,
        at_once: int,
        max_frame_bytes: int,
        running: RunningTime,
        left: deque[CallT],
        suspects: deque[list[CallT]],
    ) -> None:
        """Start without calls.

        Args:
            process: the process; its calls run together.
            take: waits for further calls.
            finished: called after a call has ended.
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
        self._flight: dict[int, tuple[CallT, float]] = {}  # call and the time it was sent, by number
        self._num_sent = 0
        self._ended_itself = False
        self._death: str | None = None

    async def run(self) -> tuple[list[CallT], str | None]:
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
        in_flight = [call for call, _ in self._flight.values() if not call.abandoned]
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
                call = self._left[0]
                if call.abandoned:
                    self._left.popleft()
                    self._room.release()
                else:
                    await self._send(call)
        except UserProcessError:
            return  # `watch_exit` ends the use, after what the process wrote is read

    async def _send_group(self, suspects: list[CallT]) -> None:
        sent = [suspect for suspect in suspects if not suspect.abandoned]
        for suspect in sent:
            await self._room.acquire()
            await self._send(suspect)
        for suspect in sent:
            await suspect.wait()

    async def _send(self, call: CallT) -> None:
        self._num_sent += 1
        number = self._num_sent
        try:
            frame = framed(CALL.pack(number, call.timeout_s) + call.payload(), self._max_frame_bytes)
        except FrameError as error:
            call.refuse(error)
            self._finished(call)
            self._room.release()
        else:
            self._flight[number] = call, self._now()
            await self._process.send(frame)
        finally:
            if self._left and self._left[0] is call:
                self._left.popleft()

    async def _receive_all_until(self, ended: Callable[[], None]) -> None:
        try:
            while True:
                self._receive(await self._process.receive_frame())
        except UserProcessError as error:
            self._death = str(error)
            ended()

    def _receive(self, frame: bytes) -> None:
        """End the call that a frame answers. Raises UserProcessError if there is none, or this is no answer."""
        kind, place = frame[:1], len(ANSWERED) + NUMBER.size
        number = int.from_bytes(frame[len(ANSWERED) : place], "big")
        call, _ = self._flight.get(number, (None, 0.0))
        if call is None:
            raise self._process.broken("an answer that no call asked for")
        try:
            call.end(kind, frame[place:])
        except (RecursionError, OverflowError, ValueError) as error:
            raise self._process.broken(error) from error
        self._ended_itself |= kind == STUCK
        del self._flight[number]
        self._finished(call)
        self._room.release()

    async def _until_late(self) -> bool:
        """Wait until a call should have been ended by the process long ago."""
        while True:
            await anyio.sleep(TICK_S)
            now = self._now()
            if any(now - sent_at > call.timeout_s + GRACE_S for call, sent_at in self._flight.values()):
                return True

    def _now(self) -> float:
        return anyio.current_time() - self._running.lost_s


def halved(in_flight: Sequence[CallT], suspects: deque[list[CallT]]) -> deque[list[CallT]]:
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
