"""The buffer's view of the log: folded from the newest snapshot on, appended to under optimistic concurrency."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import structlog
from anyio import to_thread
from anyio.lowlevel import checkpoint

from actors.buffer.storage.trimming import fold_archive
from messages import BufferStarted, Message, Plane, SnapshotTaken
from runtime.bus.bus import Bus
from runtime.bus.errors import SequenceMismatch, StreamFull
from runtime.bus.events import Events, Received
from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, fold_in_parts
from runtime.ledger.snapshots import newest_readable, usable_snapshots
from runtime.process.actor import InputError

log = structlog.get_logger()

READ_TIMEOUT_S: Final = 30.0  # for an event that the log holds
WIDENED_BY: Final = 0.05  # share of the planned size; done once, when a start finds a full log
LEDGER_OWN: Final = tuple(event for event in LEDGER_EVENTS if event.topic.startswith("ledger."))


class LedgerLog:
    """Folds the log; appends to the ledger only when all of it is folded.

    Args:
        bus: the bus.
        run_dir: run directory, with the archive.
        planned_bytes: size of the log according to the run's topology.
        verdicts: whether a filter judges completed groups.
        tells_source: whether a data source gets the outcomes of groups.
    """

    def __init__(
        self, bus: Bus, run_dir: Path, planned_bytes: int, *, verdicts: bool = True, tells_source: bool = False
    ) -> None:
        self.state = LedgerState()
        self.unreadable: frozenset[int] = frozenset()  # log sequences covered by snapshots whose chunks are lost
        self.earlier: tuple[SnapshotTaken, ...] = ()  # snapshots before the loaded one, oldest first
        self._bus = bus
        self._run_dir = run_dir
        self._planned_bytes = planned_bytes
        self._verdicts, self._tells_source = verdicts, tells_source
        self._own_seq = 0  # log sequence of the newest ledger event that was read or skipped

    async def load(self) -> None:
        """Load the newest snapshot that can be read; without one, fold the archive.

        Raises:
            InputError: a part of the log is missing.
        """
        snapshots = await usable_snapshots(self._bus, buries=True)
        state = await newest_readable(self._bus, snapshots, buries=True)
        covers = 0 if state is None else state.last_seq
        self.unreadable = frozenset(event.covers for event in snapshots if event.covers > covers)
        self.earlier = tuple(event for event in snapshots if event.covers < covers)
        if state is None or (await self._bus.state(Plane.EVENT)).first_seq > covers + 1:
            self.state = await self._whole_history()
        else:
            log.info("snapshot_loaded", covers=covers)
            self.state = state

    async def _whole_history(self) -> LedgerState:
        """Fold the archived part of the log; it is empty before the first snapshot.

        Raises:
            InputError: events between the archive and the log are missing.
        """
        state, last_seq = await to_thread.run_sync(fold_archive, self._run_dir, abandon_on_cancel=True)
        first_seq = (await self._bus.state(Plane.EVENT)).first_seq
        if first_seq > last_seq + 1:
            raise InputError(
                f"the event log begins at event {first_seq}, has no snapshot that this version can load, and "
                f"{self._run_dir} does not hold the earlier events: restore that directory, or choose another run.name"
            )
        return state

    async def take_over(self, events: Events[Message], fold_next: Callable[[], Awaitable[object]]) -> None:
        """Fold the log to its end and append this buffer's start there; that fences every older buffer.

        Args:
            events: the log after the folded state.
            fold_next: folds the next event.
        """
        state, known = self.state, self.state.last_seq
        while True:
            while events.pending:
                await fold_next()
            if (first_seq := (await self._bus.state(Plane.EVENT)).first_seq) > known + 1:
                raise RuntimeError(f"an older buffer trimmed the log to {first_seq} while it was read from {known + 1}")
            incarnation = state.incarnation + 1
            started = BufferStarted(incarnation=incarnation, verdicts=self._verdicts, tells_source=self._tells_source)
            seq = await self._enter(started)
            if not seq:  # an older buffer appended first; fold its event
                await fold_next()
                continue
            while state.last_seq < seq:
                await fold_next()
            log.info("ledger_taken_over", incarnation=incarnation)
            return

    async def _enter(self, started: BufferStarted) -> int:
        """Append this buffer's start. A full log is trimmed meanwhile; if that does not help, it is widened once.

        Only a buffer makes room in the log, so a full log without a buffer would end the run. This project's other
        writers stop before the log is full (runtime/bus/nats/room.py); external writers may not.

        Raises:
            InputError: the log is full in spite of being widened.
        """
        wider = int(self._planned_bytes * (1 + WIDENED_BY))
        try:
            return await self.append(started)
        except StreamFull as error:
            await self._bus.widen(Plane.EVENT, to_bytes=wider)
            log.warning("log_widened", reason=str(error), to_bytes=wider)
        try:
            return await self.append(started)
        except StreamFull as error:
            raise InputError(
                f"the event log is full, although it was enlarged by {WIDENED_BY:.0%}, and none of its events can be "
                f"trimmed: set bus.event_bytes above {wider}"
            ) from error

    async def fold(self, received: Received[Message]) -> None:
        """Fold the next event of the log. Between parts of a large one other coroutines run."""
        for _ in fold_in_parts(self.state, received.message, received.seq):
            await checkpoint()
        if isinstance(received.message, LEDGER_OWN):
            self._own_seq = received.seq

    async def append(self, event: Message) -> int:
        """Append an event to the fully folded ledger; return its sequence.

        Returns 0 if unread ledger events come first, or if events were folded while the bus refused the event: it was
        decided on an older state.
        """
        known = self.state.last_seq
        while True:
            try:
                return await self._bus.append(event, expected_last=self._own_seq)
            except SequenceMismatch as error:
                if await self._is_unread(error.last) or self.state.last_seq > known:
                    log.warning("ledger_overtaken", decision=type(event).__name__, last=error.last)
                    return 0
                self._own_seq = error.last  # unreadable: skip it

    async def _is_unread(self, seq: int) -> bool:
        """Whether the ledger holds a readable, unfolded event up to this sequence."""
        async with self._bus.read(*LEDGER_OWN, from_seq=self.state.last_seq + 1) as ahead:
            while ahead.pending:
                received = await ahead.next(READ_TIMEOUT_S)
                if received is not None:
                    return received.seq <= seq
                if ahead.pending:
                    return True  # the bus is slow: let the main loop wait for the event
        return False
