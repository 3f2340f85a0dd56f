"""Dead letters: an unusable message is stored once, and an event reports it."""

from collections.abc import Mapping
from typing import Final

import structlog

from messages import DeadLetter, Message, MessageDeadLettered, encode
from messages.plain import clipped
from messages.subjects import subject_of
from runtime.bus.errors import PublishTimeout, SequenceMismatch, StreamFull
from runtime.bus.limits import MIB
from runtime.bus.nats.connection import Connection
from runtime.bus.nats.store import Store

log = structlog.get_logger()

KEPT_BYTES: Final = MIB  # stored bytes of a dead letter's payload
FRAME_BYTES: Final = 64 * 1024  # room for headers, subject and reason in JSON
SUBJECT_CHARS: Final = 1024
REASON_CHARS: Final = 1024
HEADERS_CHARS: Final = 4096  # total of names and values; a character is at most six bytes in JSON
PATIENCE_S: Final = 10.0  # redelivery delay of a message that could not be dead-lettered


class DeadLetters:
    """Writes a run's dead-letter stream."""

    def __init__(self, connection: Connection, store: Store, run: str) -> None:
        self._connection = connection
        self._store = store
        self._run = run

    async def bury(
        self, origin: str, *, subject: str, reason: str, headers: Mapping[str, str] | None, payload: bytes
    ) -> bool:
        """Store a message as a dead letter and report it, unless another reader has done so.

        No content of the message makes this raise: long values are cut, invalid text is replaced.

        Args:
            origin: where the message is stored, such as "event.17"; one letter and one event are written per origin.
            subject: subject of the message.
            reason: why it is unusable.
            headers: headers of the message.
            payload: bytes of the message; of a long one, only the beginning is stored.

        Returns:
            Whether both are stored; false while the streams are full.

        Raises:
            BusUnavailable: no server.
        """
        subject, reason = clipped(subject, SUBJECT_CHARS), clipped(reason, REASON_CHARS)
        room = min(KEPT_BYTES, (self._connection.max_payload - FRAME_BYTES) * 3 // 4)  # base64
        if len(payload) > room:
            reason = f"{reason} (first {room} of {len(payload)} bytes kept)"
        self._connection.counters.dead_letters += 1
        log.warning("message_dead_lettered", origin=origin, subject=subject, reason=reason)
        letter = DeadLetter(
            origin=origin, subject=subject, reason=reason, headers=_few(headers or {}), payload=payload[:room]
        )
        try:
            seq = await self._put_once(letter)
            await self._put_once(MessageDeadLettered(origin=origin, subject=subject, reason=reason, dead_seq=seq))
        except (StreamFull, PublishTimeout) as error:
            log.warning("message_not_dead_lettered", origin=origin, error=str(error))
            return False
        return True

    async def _put_once(self, message: Message) -> int:
        """Store a message under its unique subject, or find it there; return its sequence."""
        encoded = encode(message)
        try:
            return await self._store.put(
                subject_of(self._run, message), encoded.payload, encoded.headers, expected_last=0
            )
        except SequenceMismatch as error:
            return error.last


def _few(headers: Mapping[str, str]) -> dict[str, str]:
    """Cut headers to HEADERS_CHARS in total."""
    kept: dict[str, str] = {}
    room = HEADERS_CHARS
    for name, value in headers.items():
        if room <= 0:
            break
        name, value = clipped(name, room // 4), clipped(value, room // 2)
        kept[name] = value
        room -= len(name) + len(value) + 8
    return kept
