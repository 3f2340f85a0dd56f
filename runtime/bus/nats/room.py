"""The last part of the event stream is for those who can empty it: all other writers wait below it."""

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
    SelectionFailed,
    TrainerStarted,
    WeightsAnnounced,
)
from runtime.bus.errors import BusError, StreamFull
from runtime.bus.nats.connection import Connection
from runtime.bus.nats.streams import state_of

log = structlog.get_logger()

KEPT_SHARE: Final = 0.05  # of the stream's bytes; what several writers add between two looks is far less
LOOK_EVERY_S: Final = 1.0
LOOK_AGAIN_S: Final = 0.1  # at most so often, while there is no room
OVERHEAD_BYTES: Final = 512  # of headers and subject
NO_LIMIT: Final = float("inf")
MAKES_ROOM: Final = (  # what ledger and trainer say beside decisions: only after it may the log be trimmed
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
    """What one connection may add to the event stream. The server knows no writers, so they hold themselves back."""

    def __init__(self, connection: Connection, stream: str) -> None:
        self._connection = connection
        self._stream = stream
        self._looking = asyncio.Lock()
        self._looked_at = -LOOK_EVERY_S
        self._left = 0.0  # bytes that may be added before the next look

    def take(self, message: Message, num_bytes: int) -> bool:
        """Whether an event may be added now, as nearly all may. No coroutine: it is asked for each of them."""
        if _makes_room(type(message)):
            return True
        num_bytes += OVERHEAD_BYTES
        if num_bytes > self._left or monotonic() - self._looked_at >= LOOK_EVERY_S:
            return False
        self._left -= num_bytes
        return True

    async def wait_and_take(self, num_bytes: int) -> None:
        """Wait until there is room for an event outside the part that is kept.

        Raises:
            StreamFull: until the deadline of a publish.
        """
        limits, failures = self._connection.limits, 0
        deadline = asyncio.get_running_loop().time() + limits.publish_timeout_s
        while not await self._look_and_take(num_bytes + OVERHEAD_BYTES):
            full = StreamFull(
                f"{self._stream} is over {1 - KEPT_SHARE:.0%} full, and the rest is kept for those who can empty it; "
                f"not so within {limits.publish_timeout_s:g} s. If no checkpoint empties it, raise bus.event_bytes"
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
        """What cannot be seen holds nobody back: the server has the last word."""
        self._left = NO_LIMIT
        if self._connection.is_connected:
            with anyio.move_on_after(self._connection.limits.attempt_timeout_s):
                try:
                    held = await state_of(self._connection, self._stream)
                except BusError as error:
                    log.debug("room_unknown", stream=self._stream, reason=str(error))
                else:
                    limit = held.max_bytes if held.max_bytes > 0 else NO_LIMIT
                    self._left = (1 - KEPT_SHARE) * limit - held.bytes
        self._looked_at = monotonic()
