"""Follows a run for an observer: all its events from the first one on, live or after its end. It writes no event."""

import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Final

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from messages import Message, RunFailed, RunFinished, RunStopped
from runtime.bus.errors import BusError
from runtime.bus.events import Received
from runtime.bus.nats.accounts import ClientKind
from runtime.bus.nats.server import ServerSettings
from runtime.bus.viewing import Viewing, viewing
from runtime.ledger.archive import ArchiveDamaged, archived_events
from runtime.node.external_clients import NameTaken, add_client, read_clients
from runtime.node.reopen import (
    BUS_DIRECTORY,
    LIMITS,
    STORE,
    FoundRun,
    NoLog,
    certificate_in,
    live_url,
    server_in,
)
from runtime.util.formatting import count_of
from runtime.util.retrying import Backoff
from runtime.util.secrets import Login, Secret, split_login, with_login

log = structlog.get_logger()

OBSERVER: Final = "observer"  # name of the credential of the observers that belong to a run
VIEW: Final = msgspec.structs.replace(LIMITS, attempt_timeout_s=2.0)
EXPIRES: Final = timedelta(days=3650)
BATCHES: Final = 2  # read ahead of the caller
BEHIND: Final = 2_000  # events after the caller's newest one with which it reads the past again, as after a SIGSTOP
EVENTS: Final = 512  # of one batch from the archive
# Seconds between reads of the log while there is nothing new. A message for each event would cost the run's server and
# its processes more: they share cores, and each message wakes all observers.
READ_EVERY_S: Final = 0.5
AGAIN: Final = Backoff(first_s=0.2, max_s=2.0)
ENDS: Final = (RunFinished, RunFailed, RunStopped)

Batch = list[Received[Message]]


def observer_login(run: FoundRun) -> Login:
    """Return a login of the observers that belong to a run. Make it at the first call.

    The run's server accepts it from its next start on, or within a second while it runs. A node daemon that calls this
    before it starts its server has it accepted from the beginning.

    Raises:
        ClientsUnreadable: the file of external clients cannot be used.
        ValueError: an external client of another kind has this name.
        OSError: the file cannot be written.
    """
    directory = run.directory / BUS_DIRECTORY
    now = datetime.now(UTC).replace(microsecond=0)
    try:
        client = add_client(directory, OBSERVER, ClientKind.VIEWER, expires=now + EXPIRES)
    except NameTaken:
        client = read_clients(directory).named(OBSERVER)
        if client is None or client.kind is not ClientKind.VIEWER:
            raise ValueError(
                f"the external client {OBSERVER} is not of the kind {ClientKind.VIEWER}: revoke it, observers use "
                "this name"
            ) from None
    return Login(user=client.name, password=Secret(client.password))


class Followed:
    """The events of a run, one after the other, or in batches. Opened by `followed`."""

    def __init__(self, run: FoundRun, from_seq: int, *, waits: bool, ends: bool) -> None:
        self.live = False  # whether a node daemon runs the run, as last seen
        self.first_seq = 0  # sequence of the first event. Above from_seq: the earlier ones are lost; 0: no event yet
        self._newest_seq = -1  # of the log, as last seen; -1: unknown
        self._has_caught_up = False
        self._damaged: list[str] = []  # a line per archive file
        self._num_skipped = 0  # events of the log or its archive that this version cannot decode
        self._run = run
        self._next = from_seq
        self._waits = waits
        self._ends = ends
        send, receive = anyio.create_memory_object_stream[Batch](BATCHES)
        self._send: MemoryObjectSendStream[Batch] = send
        self._receive: MemoryObjectReceiveStream[Batch] = receive

    @property
    def problems(self) -> list[str]:
        """Why events are missing: at most one line per archive file, and one for the log."""
        if not self._num_skipped:
            return [*self._damaged]
        events = count_of(self._num_skipped, "event")
        return [*self._damaged, f"{events} of the log cannot be decoded by this version: they are missing"]

    def share_read(self, seq: int) -> float | None:
        """Return the share of the log up to a sequence; None once a caller that has come so far has caught up.

        Before, what the events say of the run is its past.
        """
        behind = self._newest_seq - seq
        if self._newest_seq >= 0 and behind <= (BEHIND if self._has_caught_up else 0):
            self._has_caught_up = self._has_caught_up or behind <= 0
            return None
        self._has_caught_up = False
        return 0.0 if self._newest_seq <= 0 else min(1.0, seq / self._newest_seq)

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """The events in lists that are not empty. Quicker than one by one."""
        async for batch in self._receive:
            yield batch

    async def __aiter__(self) -> AsyncGenerator[Received[Message], None]:
        async for batch in self._receive:
            for received in batch:
                yield received

    def close(self) -> None:
        """Give both ends of the buffer back."""
        self._send.close()
        self._receive.close()

    async def read(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Read until the end of the run. Reports as started once the log is open.

        Raises:
            NoLog, BusError: the log of a run that no daemon runs cannot be read, or the log could not be opened.
        """
        failures, was_open = 0, False
        with self._send:
            while True:
                try:
                    async with self._opened() as view:
                        if not was_open:
                            was_open = True
                            task_status.started()
                        failures = 0
                        if await self._read_on(view):
                            return
                except (BusError, NoLog) as error:
                    if not was_open or not self.live:
                        raise
                    failures += 1
                    log.warning("log_out_of_reach", error=str(error), in_a_row=failures)
                await anyio.sleep(AGAIN.pause_s(failures))

    @asynccontextmanager
    async def _opened(self) -> AsyncGenerator[Viewing, None]:
        run = self._run
        async with AsyncExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="physarum-log-")))
            url = await live_url(run, scratch, self._look)
            self.live = url is not None
            if url is None:
                login = Login(user=OBSERVER, password=Secret.random())
                settings = ServerSettings(store_dir=scratch / STORE, login=login)
                url = await stack.enter_async_context(server_in(scratch, settings))
                certificate = None
            else:
                url, certificate = await self._as_viewer(url), certificate_in(run.directory)
            yield await stack.enter_async_context(
                viewing(url, run.name, name=OBSERVER, limits=VIEW, certificate=certificate)
            )

    async def _look(self, url: str) -> None:
        url, certificate = await self._as_viewer(url), certificate_in(self._run.directory)
        async with viewing(url, self._run.name, name=OBSERVER, limits=VIEW, certificate=certificate) as view:
            await view.batch(self._next)

    async def _as_viewer(self, url: str) -> str:
        """Put the viewer's login into a URL. The owner of an external server gives the login, so it stays."""
        servers, login = split_login(url)
        if login is None or self._run.bus_url is not None:
            return url
        return with_login(servers, await anyio.to_thread.run_sync(observer_login, self._run))

    async def _read_on(self, view: Viewing) -> bool:
        """Read until the caller wants no more, and return True."""
        while True:
            skipped = view.num_skipped
            events, next_seq = await view.batch(self._next)
            self._num_skipped += view.num_skipped - skipped
            last = events[-1] if events else None
            if last is not None:
                self._note_newest(last, next_seq)
            if next_seq > self._next:
                await self._pass_on(events)
                self._next = next_seq
                if self._ends and last is not None and not last.pending and isinstance(last.message, ENDS):
                    return True
                continue
            self._newest_seq = max(0, self._newest_seq)
            if not self.live or not self._waits:
                return True
            await anyio.sleep(READ_EVERY_S)

    def _note_newest(self, last: Received[Message], next_seq: int) -> None:
        newest = last.seq + last.pending
        self._newest_seq = newest if newest >= next_seq else last.seq  # those after it cannot be decoded

    async def _pass_on(self, events: Batch) -> None:
        """Pass on events of the log, each after the archived ones before it."""
        begin, expected = 0, self._next
        for index, received in enumerate(events):
            if received.seq != expected:
                await self._hand_over(events[begin:index])
                await self._fill(received.seq)
                begin = index
            expected = received.seq + 1
        await self._hand_over(events[begin:])

    async def _fill(self, seq: int) -> None:
        """Pass on the archived events before one of the log."""

        def skip() -> None:
            self._num_skipped += 1

        archived = archived_events(self._run.directory, from_seq=self._next, below_seq=seq, on_skip=skip)
        try:
            while batch := await anyio.to_thread.run_sync(lambda: list(islice(archived, EVENTS))):
                await self._hand_over(batch)
        except ArchiveDamaged as error:
            log.error("archive_damaged", error=str(error))
            self._damaged.append(f"{error}: events are missing")

    async def _hand_over(self, batch: Batch) -> None:
        if not batch:
            return
        self.first_seq = self.first_seq or batch[0].seq
        self._next = batch[-1].seq + 1
        await self._send.send(batch)


@asynccontextmanager
async def followed(
    run: FoundRun, *, from_seq: int = 1, waits: bool = True, ends: bool = False
) -> AsyncGenerator[Followed, None]:
    """Follow the events of a run for the duration of a block: the archived ones, the log, then new ones.

        async with followed(find_run(name), ends=True) as events:
            async for received in events:
                take(received.message, received.seq, received.time)

    An observer process that the run starts, and a command beside a run, use it alike. It reads as a viewer, with a
    login of its own (`observer_login`), and cannot write an event, disturb a consumer or dead-letter a message. A
    caller that falls behind is waited for: at most BATCHES batches are held for it. When the connection is lost, or the
    daemon starts again elsewhere, it goes on after the last event, in order and without gaps. While no daemon runs the
    run, it reads a copy of the stored events, and ends.

    Args:
        run: as `find_run` finds it: by its name, or by its directory.
        from_seq: first sequence to read, for a caller that keeps its place.
        waits: whether to wait for new events while a daemon runs the run. If not, it ends with the newest one.
        ends: whether to end after the event with which a run ends, if none follows it. A process that the daemon
            stops needs no such end: it would also see the end of an earlier start.

    Raises:
        NoLog: no bus answers and there is no store to copy; both in an exception group.
        BusError: the server of a copy failed.
    """
    events = Followed(run, from_seq, waits=waits, ends=ends)
    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(events.read)
            yield events
            tasks.cancel_scope.cancel()
    finally:
        events.close()
