"""Dead letters: what cannot be used is kept aside, once, and an event says so."""

from collections.abc import Mapping

import structlog

from messages import DeadLetter, MessageDeadLettered, Plane, encode
from messages.subjects import subject_of
from runtime.bus.errors import SequenceMismatch
from runtime.bus.nats.connection import Connection
from runtime.bus.nats.store import Store

log = structlog.get_logger()

FRAME_BYTES = 64 * 1024  # room for headers, subject and reason beside the payload


class DeadLetters:
    """Writes a run's dead-letter stream."""

    def __init__(self, connection: Connection, store: Store, run: str) -> None:
        self._connection = connection
        self._store = store
        self._run = run

    async def bury(
        self, origin: str, *, subject: str, reason: str, headers: Mapping[str, str] | None, payload: bytes
    ) -> None:
        """Keep a message aside and tell of it, unless somebody who met it too has done so.

        Args:
            origin: where it lies, such as "event.17"; one letter is kept per origin.
        """
        room = (self._connection.max_payload - FRAME_BYTES) * 3 // 4  # base64
        if len(payload) > room:
            reason = f"{reason} (first {room} of {len(payload)} bytes kept)"
        self._connection.counters.dead_letters += 1
        log.warning("message_dead_lettered", origin=origin, subject=subject, reason=reason)
        letter = DeadLetter(
            origin=origin, subject=subject, reason=reason, headers=dict(headers or {}), payload=payload[:room]
        )
        encoded = encode(letter)
        subject_of_letter = subject_of(self._run, letter)
        try:
            seq = await self._store.put(subject_of_letter, encoded.payload, encoded.headers, expected_last=0)
        except SequenceMismatch as error:
            if not origin.startswith(f"{Plane.WORK}."):
                return
            seq = error.last  # a task comes here again only if who met it died, perhaps before it told of it
        event = MessageDeadLettered(subject=subject, reason=reason, dead_seq=seq)
        encoded = encode(event)
        await self._store.put(subject_of(self._run, event), encoded.payload, encoded.headers)
