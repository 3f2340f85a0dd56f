"""Score requests of one grader, as an external worker receives them with the rights of its credential.

The worker creates no consumer and writes no dead letter: its account allows neither.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from messages import DecodeError, MessageT, Plane, ScoreRequested, ScoresGiven, decode_as, encode
from messages.subjects import key_subject, scores_token, stream_of
from runtime.bus.consumer import Deliveries, opened
from runtime.bus.credential import Credential
from runtime.bus.dead import DeadLetters
from runtime.bus.errors import PayloadLost, PayloadUnreadable
from runtime.bus.limits import BusLimits
from runtime.bus.nats.connection import Connection, open_connection
from runtime.bus.nats.store import Store
from runtime.bus.scoring import ACK_WAIT_S, queue_settings
from runtime.util.retrying import Backoff
from runtime.util.secrets import with_login

LIMITS: Final = BusLimits(reconnect_wait_s=1.0, ping_interval_s=5, max_pings=2)
BACKOFF: Final = Backoff(first_s=0.5, max_s=15.0)  # between searches for a queue that is away

Note = Callable[[str], None]


class ScoreRequests:
    """The connection of an external worker to one run. Opened by `open_score_requests`."""

    def __init__(self, connection: Connection, credential: Credential, note: Note) -> None:
        self._connection = connection
        self._store = Store(connection)
        self._run = credential.run
        self._token = credential.token
        self.deliveries = _ForeignDeliveries(connection, credential, note)

    @property
    def num_reconnects(self) -> int:
        """Number of times that the connection was made anew."""
        return self._connection.counters.reconnects

    def takes_scores(self, subject: str) -> bool:
        """Whether a subject takes answers of this worker's grader."""
        return scores_token(self._run, subject) == self._token

    async def answer(self, scores: ScoresGiven, *, to: str) -> None:
        """Send the answer to a score request. It is not confirmed: the caller acks the request afterwards.

        Raises:
            MessageRefused: the answer is larger than a message may be.
            Disconnected: the send buffer is full in an outage; a BusError.
        """
        encoded = encode(scores)
        await self._connection.send(to, encoded.payload, encoded.headers)

    async def fetch_by_key(self, message_type: type[MessageT], key: str) -> MessageT:
        """Fetch a stored payload by its key.

        Raises:
            PayloadLost: there is none under this key, or it cannot be decoded.
            BusUnavailable: no answer until the deadline.
        """
        subject = key_subject(self._run, message_type, key)
        stored = await self._store.get_by_subject(stream_of(self._run, Plane.DATA), subject)
        if stored is None:
            raise PayloadLost(f"no message under {subject}")
        try:
            return decode_as(message_type, stored.data, stored.headers)
        except DecodeError as error:
            raise PayloadUnreadable(f"{subject}: {error}") from error


@asynccontextmanager
async def open_score_requests(credential: Credential, note: Note) -> AsyncGenerator[ScoreRequests, None]:
    """Connect with a credential for the duration of a block, and receive the score requests of its grader.

    Args:
        credential: of a grader.
        note: takes a line about a request that cannot be used, or about a queue that is away.

    Raises:
        BusRefused: the server rejects the login.
        BusUnavailable: no server answers, or the connection closed for good.
    """
    async with open_connection(
        with_login(credential.url, credential.login),
        name=credential.name,
        limits=LIMITS,
        inboxes=credential.inbox,
        certificate=credential.certificate,
        ends_if_refused=True,
    ) as connection:
        requests = ScoreRequests(connection, credential, note)
        async with opened(requests.deliveries, ACK_WAIT_S):
            yield requests


class _ForeignDeliveries(Deliveries[ScoreRequested]):
    """Deliveries of a consumer that the run has created."""

    def __init__(self, connection: Connection, credential: Credential, note: Note) -> None:
        super().__init__(
            connection,
            _NotedLetters(connection, Store(connection), credential.run, note),
            plane=Plane.WORK,
            stream=credential.stream,
            settings=queue_settings(credential.run, credential.token),
            types=(ScoreRequested,),
            prefetch=0,
            prefetch_by_rate=True,
            keeps_prefetched=False,
        )
        self._durable = credential.durable
        self._note = note
        self._num_searches = 0  # since a request arrived
        self._num_received = 0

    async def open(self) -> None:
        """Start to pull. Each further call within one wait for a request follows a pause: the queue may be away."""
        received = self._connection.counters.received
        self._num_searches = self._num_searches + 1 if received == self._num_received else 1
        self._num_received = received
        if self._num_searches > 1:
            if self._num_searches.bit_count() == 1:  # 2, 4, 8, ...
                self._note("the run has no score requests for this grader now, or has ended; trying again")
            await asyncio.sleep(BACKOFF.pause_s(self._num_searches - 1))
        await self._pull.open(self._durable, self._connection.epoch)


class _NotedLetters(DeadLetters):
    """Reports unusable messages to the worker's user, because its account may store nothing."""

    def __init__(self, connection: Connection, store: Store, run: str, note: Note) -> None:
        super().__init__(connection, store, run)
        self._note = note

    async def bury(
        self, origin: str, *, subject: str, reason: str, headers: Mapping[str, str] | None, payload: bytes
    ) -> bool:
        """Report a message; return False, so that it is redelivered later, perhaps to another worker."""
        self._note(f"a score request cannot be used: {reason}")
        return False
