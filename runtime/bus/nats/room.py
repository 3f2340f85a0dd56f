"""Reserved space of the event stream for writers that can empty it. All other writers wait below it."""

import asyncio
from functools import cache
from time import monotonic
from typing import Final

import anyio
import structlog

from messages import (
    BatchTrained,
    CheckpointRequested,
    CheckpointSaved,
    CheckpointSetAside,
    LogTrimmed,
    Message,
    PayloadsMissing,
    PhaseChanged,
    PromptsLoaded,
    RunStopped,
    SelectionFailed,
    TrainerStarted,
    WeightsAnnounced,
)
from runtime.bus.errors import BusError, StreamFull
from runtime.bus.nats.connection import Connection
from runtime.bus.nats.streams import state_of

log = structlog.get_logger()

KEPT_SHARE: Final = 0.05  # of the stream's bytes; far more than several writers add between two checks
LOOK_EVERY_S: Final = 1.0
AMPLE_SHARE: Final = 0.25  # of the stream's bytes; with more left, events do not wait for the next check
AMPLE_S: Final = 10.0  # age at which even such a check no longer counts
LOOK_AGAIN_S: Final = 0.1  # minimum interval between checks while there is no room
OVERHEAD_BYTES: Final = 512  # estimate for headers and subject
NO_LIMIT: Final = float("inf")
MAKES_ROOM: Final = (  # other events of buffer and trainer without which the log cannot be trimmed, and the end
    RunStopped,
    PromptsLoaded,
    CheckpointRequested,
    SelectionFailed,
    LogTrimmed,
    TrainerStarted,
    BatchTrained,
    PayloadsMissing,
    WeightsAnnounced,
    PhaseChanged,
    CheckpointSaved,
    CheckpointSetAside,
)


@cache
def _makes_room(message_type: type[Message]) -> bool:
    return issubclass(message_type, MAKES_ROOM) or message_type.topic.startswith("ledger.")


class Room:
    """Room of one connection in the event stream. The server cannot reserve space, so clients limit themselves."""

    def __init__(self, connection: Connection, stream: str) -> None:
        self._connection = connection
        self._stream = stream
        self._looking = asyncio.Lock()
        self._looked_at = -LOOK_EVERY_S
        self._left = 0.0  # bytes that may be added before the next check
        self._ample = 0.0  # bytes, of which more must be left for an event not to wait for the next check
        self._is_due = anyio.Event()  # set to check in the background

    async def keep_current(self) -> None:
        """Check in the background while events pass and much room is left. Never returns."""
        while True:
            await self._is_due.wait()
            self._is_due = anyio.Event()
            async with self._looking:
                if monotonic() - self._looked_at >= LOOK_EVERY_S:
                    await self._look()

    def take(self, message: Message, num_bytes: int) -> bool:
        """Whether an event may be added now. Nearly always true, and not a coroutine, because every event calls it."""
        if _makes_room(type(message)):
            return True
        num_bytes += OVERHEAD_BYTES
        age_s = monotonic() - self._looked_at
        if age_s >= LOOK_EVERY_S:
            self._is_due.set()
        if num_bytes > self._left or age_s >= (AMPLE_S if self._left > self._ample else LOOK_EVERY_S):
            return False
        self._left -= num_bytes
        return True

    async def wait_and_take(self, num_bytes: int) -> None:
        """Wait until an event fits outside the reserved space.

        Raises:
            StreamFull: no room until the deadline of a publish.
        """
        limits, failures = self._connection.limits, 0
        deadline = self._connection.time() + limits.publish_timeout_s
        while not await self._look_and_take(num_bytes + OVERHEAD_BYTES):
            full = StreamFull(
                f"{self._stream} is over {1 - KEPT_SHARE:.0%} full; the rest is kept for events that allow trimming. "
                f"Nothing was trimmed within {limits.publish_timeout_s:g} s. If it stays full, raise bus.event_bytes"
            )
            if not failures:
                log.warning("events_wait_for_room", stream=self._stream)
            self._connection.counters.publish_retries += 1
            if not await self._connection.pause(deadline, failures, full):
                raise full
            failures += 1

    async def _look_and_take(self, num_bytes: int) -> bool:
        async with self._looking:
            age_s = monotonic() - self._looked_at
            if age_s >= LOOK_EVERY_S or (num_bytes > self._left and age_s >= LOOK_AGAIN_S):
                await self._look()
            if num_bytes > self._left:
                return False
            self._left -= num_bytes
            return True

    async def _look(self) -> None:
        """Update the room from the stream's state. If it is unknown, nothing waits: the server decides."""
        left, ample = NO_LIMIT, NO_LIMIT
        if self._connection.is_connected:
            with anyio.move_on_after(self._connection.limits.attempt_timeout_s):
                try:
                    held = await state_of(self._connection, self._stream)
                except BusError as error:
                    log.debug("room_unknown", stream=self._stream, reason=str(error))
                else:
                    ample = 0.0
                    if held.max_bytes > 0:
                        left, ample = (1 - KEPT_SHARE) * held.max_bytes - held.bytes, AMPLE_SHARE * held.max_bytes
        self._left, self._ample = left, ample
        self._looked_at = monotonic()
