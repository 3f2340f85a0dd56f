"""Reading as an external viewer: stored messages alone, without a consumer. It writes nothing."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Final

from messages import DecodeError, Message, Plane, decode
from messages.subjects import check_run_name, inbox_prefix, stream_of
from runtime.bus.events import Received
from runtime.bus.limits import MIB, BusLimits
from runtime.bus.nats.connection import Connection, open_connection
from runtime.bus.nats.store import PENDING, TIME, Store

BATCH: Final = 256  # messages of one request
BATCH_BYTES: Final = 4 * MIB


class Viewing:
    """Reads the log of one run in order, from any sequence on. Opened by `viewing`."""

    def __init__(self, connection: Connection, run: str) -> None:
        self.num_skipped = 0  # events that this version cannot decode
        self._store = Store(connection)
        self._stream = stream_of(run, Plane.EVENT)

    async def batch(self, from_seq: int) -> tuple[list[Received[Message]], int]:
        """The next events from a sequence on, and the sequence after them. No event and the same sequence: none yet.

        Raises:
            BusError: the server does not answer, or refuses.
        """
        events: list[Received[Message]] = []
        for stored in await self._store.after(self._stream, from_seq, batch=BATCH, max_bytes=BATCH_BYTES):
            from_seq = stored.seq + 1
            try:
                message = decode(stored.data, stored.headers)
            except DecodeError:
                self.num_skipped += 1
                continue
            pending = int(stored.headers.get(PENDING, 0))
            events.append(Received(message, stored.seq, datetime.fromisoformat(stored.headers[TIME]), pending))
        return events, from_seq


@asynccontextmanager
async def viewing(
    url: str, run: str, *, name: str, limits: BusLimits, certificate: str | None = None
) -> AsyncGenerator[Viewing, None]:
    """Connect as a viewer for the duration of a block.

    Args:
        url: nats://[user:password@]host:port.
        run: name of the run.
        name: user name of the viewer, which its inboxes have too.
        limits: deadlines and buffer bounds.
        certificate: PEM certificate of a run's own server, which alone is trusted.

    Raises:
        BusUnavailable: no server answers, it rejects the login, or the connection closes for good.
    """
    check_run_name(run)
    inboxes = inbox_prefix(run, name)
    async with open_connection(url, name=name, limits=limits, inboxes=inboxes, certificate=certificate) as connection:
        yield Viewing(connection, run)
