"""The ledger's log as its owner has it: read from the newest snapshot on, and appended to while nobody else does."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec
import structlog
from anyio import to_thread

from actors.buffer.storage.trimming import fold_archive
from messages import BufferStarted, Message, Plane, SnapshotTaken
from runtime.bus.bus import Bus
from runtime.bus.errors import SequenceMismatch, StreamFull
from runtime.bus.events import Events, Received
from runtime.host.actor import InputError
from runtime.ledger.fold import FOLD_VERSION, LEDGER_EVENTS, LedgerState, fold

log = structlog.get_logger()

READ_TIMEOUT_S: Final = 30.0  # for an event that is known to be in the log
WIDENED_BY: Final = 0.05  # of its planned size and once, where a full log has nothing that could be trimmed at a start
LEDGER_OWN: Final = tuple(event for event in LEDGER_EVENTS if event.topic.startswith("ledger."))


class LedgerLog:
    """Folds the log and appends to the ledger as far as it is folded.

    Args:
        run_dir: where the archive is.
        planned_bytes: the size of the log as the run's topology gives it.
    """

    def __init__(self, bus: Bus, run_dir: Path, planned_bytes: int) -> None:
        self.state = LedgerState()
        self._bus = bus
        self._run_dir = run_dir
        self._planned_bytes = planned_bytes
        self._own_seq = 0  # log sequence of the newest event that a buffer wrote, of those read or passed over

    async def load(self) -> None:
        """Begin with the newest snapshot, or with what is archived.

        Raises:
            InputError: a part of the log is missing.
        """
        newest = None
        async with self._bus.read(SnapshotTaken) as snapshots:
            while snapshots.pending:
                received = await snapshots.next()
                if received is not None and received.message.fold_version == FOLD_VERSION:
                    newest = received.message
        if newest is None:
            self.state = await self._whole_history()
        else:
            log.info("snapshot_loaded", covers=newest.covers)
            self.state = msgspec.json.decode(newest.state, type=LedgerState)

    async def _whole_history(self) -> LedgerState:
        """The archived part of the log, folded; before the first snapshot there is none."""
        state, last_seq = await to_thread.run_sync(fold_archive, self._run_dir, abandon_on_cancel=True)
        first_seq = (await self._bus.state(Plane.EVENT)).first_seq
        if first_seq > last_seq + 1:
            raise InputError(
                f"the log begins at event {first_seq} and has no snapshot that this version can load; "
                f"what was before is not in {self._run_dir}: bring it back, or choose another run.name"
            )
        return state

    async def take_over(self, events: Events[Message], fold_next: Callable[[], Awaitable[object]]) -> None:
        """Fold the log to its end and enter this buffer there, so that an older one can append no more.

        Args:
            events: the log from where the state ends.
            fold_next: folds the next one of them.
        """
        state, known = self.state, self.state.last_seq
        while True:
            while events.pending:
                await fold_next()
            if (first_seq := (await self._bus.state(Plane.EVENT)).first_seq) > known + 1:
                raise RuntimeError(f"an older buffer trimmed the log to {first_seq} while it was read from {known + 1}")
            incarnation = state.incarnation + 1
            seq = await self._enter(BufferStarted(incarnation=incarnation))
            if not seq:  # an older buffer was quicker; read what it wrote
                await fold_next()
                continue
            while state.last_seq < seq:
                await fold_next()
            log.info("ledger_taken_over", incarnation=incarnation)
            return

    async def _enter(self, started: BufferStarted) -> int:
        """Append the start. A full log is trimmed below its snapshot while this waits; else it is widened a little.

        Without a buffer nobody would ever make room, so that a full log would be the end of the run. Other writers of
        this product stop before the log is full (runtime/bus/nats/room.py); others may not.

        Raises:
            InputError: it is full although it was widened.
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
                f"the event log is full, with {WIDENED_BY:.0%} more than its planned size, and nothing of it can be "
                f"trimmed: set bus.event_bytes above {wider}"
            ) from error

    def fold(self, received: Received[Message]) -> None:
        """Take the next event of the log."""
        fold(self.state, received.message, received.seq)
        if isinstance(received.message, LEDGER_OWN):
            self._own_seq = received.seq

    async def append(self, event: Message) -> int:
        """Append to the ledger as it is folded; return the sequence, or 0 when there is more of it to be read first."""
        while True:
            try:
                return await self._bus.append(event, expected_last=self._own_seq)
            except SequenceMismatch as error:
                if await self._is_unread(error.last):
                    log.warning("ledger_overtaken", decision=type(event).__name__, last=error.last)
                    return 0
                self._own_seq = error.last  # nobody can read what lies there: it is passed over

    async def _is_unread(self, seq: int) -> bool:
        """Whether the ledger holds an event up to this sequence that can be read and is not folded yet."""
        async with self._bus.read(*LEDGER_OWN, from_seq=self.state.last_seq + 1) as ahead:
            while ahead.pending:
                received = await ahead.next(READ_TIMEOUT_S)
                if received is not None:
                    return received.seq <= seq
                if ahead.pending:
                    return True  # the bus is slow: wait for it where all events are read
        return False
