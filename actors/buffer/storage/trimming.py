"""How far the log may be trimmed, and doing so: what nobody needs is archived, then purged."""

from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog

from messages import EvalIssued, LogTrimmed, Message, PhaseChanged, Plane, RoundHalted, WeightsAnnounced
from runtime.bus.bus import Bus
from runtime.ledger.archive import archive, archived_events, archived_files
from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, Stage, fold

log = structlog.get_logger()

FULL_ABOVE: Final = 0.5  # of the stream's bytes: then any number of events is worth it
CITES_NOTHING: Final = (Stage.IN_FLIGHT, Stage.POOLED)  # the snapshot has all that such a group needs


class Landmarks:
    """Log sequences of events that a starting actor looks for. A fold of LANDMARKS."""

    def __init__(self) -> None:
        self.announced: dict[int, int] = {}  # by weight version
        self.halted = 0  # newest
        self.evaluation = 0  # newest
        self.phase = 0  # newest

    def take(self, event: Message, seq: int) -> None:
        """Take the next event of the log."""
        match event:
            case WeightsAnnounced():
                self.announced.setdefault(event.version, seq)  # a replaced trainer may use a number again
            case RoundHalted():
                self.halted = seq
            case EvalIssued():
                self.evaluation = seq
            case PhaseChanged():
                self.phase = seq
            case _:
                pass


LANDMARKS: Final = (WeightsAnnounced, RoundHalted, EvalIssued, PhaseChanged)


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What of the log is needed, as far as the ledger knows."""

    below: int  # from here on everything
    version: int  # the announcements from this one on; 0: of none yet
    halt: bool  # the newest
    evaluation: bool  # the newest


def needs_of(state: LedgerState, covers: int) -> Needs:
    """What a start from a snapshot needs of the log beside it.

    The filter's consumer needs no more: a completed group that it has not judged is live, or nobody waits for it.

    Args:
        state: folded at least as far as the snapshot covers.
        covers: log sequence of the last event that the snapshot contains.
    """
    cited = [group.event_seq for group in state.groups.values() if group.stage not in CITES_NOTHING]
    cited += [ref.event_seq for batch in state.batches.values() for ref in batch.groups]
    running = state.evaluation
    in_flight = [group.round for group in state.groups.values() if group.stage is Stage.IN_FLIGHT]
    return Needs(
        below=min([covers + 1, *cited]),
        version=state.version if running is None else min(state.version, running.version),
        halt=any(round <= state.halted_round for round in in_flight),  # their tasks may be delivered again
        evaluation=running is not None,
    )


def trim_point(needs: Needs, landmarks: Landmarks) -> int:
    """The sequence below which nothing is needed; 0 if an event that is needed was not found."""
    kept = [needs.below]
    if needs.version > 0:
        found = [seq for version, seq in landmarks.announced.items() if version >= needs.version]
        kept.append(min(found, default=0))
    if needs.halt:
        kept.append(landmarks.halted)
    if needs.evaluation:
        kept.append(landmarks.evaluation)
    if landmarks.phase:
        kept.append(landmarks.phase)  # who may hold memory now
    return min(kept)


def fold_archive(run_dir: Path) -> tuple[LedgerState, int]:
    """What the archived part of a log folds to from its first event on, and the sequence of its last one.

    A part that is missing ends it.
    """
    state, last_seq = LedgerState(), 0
    for file in archived_files(run_dir):
        if file.first_seq <= last_seq + 1:
            last_seq = max(last_seq, file.last_seq)
    for received in archived_events(run_dir, below_seq=last_seq + 1):
        if isinstance(received.message, LEDGER_EVENTS):
            fold(state, received.message, received.seq)
    return state, last_seq


class Trimmer:
    """Trims the log in the background, as far as the newest snapshot allows.

    Args:
        min_events: fewer are left where they are.
    """

    def __init__(self, bus: Bus, run_dir: Path, min_events: int) -> None:
        self._bus = bus
        self._run_dir = run_dir
        self._min_events = min_events
        self._due: Needs | None = None
        self._asked = anyio.Event()
        self._at_work = False

    def is_busy(self) -> bool:
        """Whether it trims, or is about to."""
        return self._at_work or self._due is not None

    def snapshot_taken(self, state: LedgerState, covers: int, *, keep_from: int) -> None:
        """Have the log trimmed as far as it may be now.

        Args:
            keep_from: log sequence of the oldest event that somebody else needs.
        """
        needs = needs_of(state, covers)
        self._due = msgspec.structs.replace(needs, below=min(needs.below, keep_from))
        self._asked.set()

    async def run(self) -> None:
        """Trim whenever it is asked for, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked = anyio.Event()
            needs, self._due = self._due, None
            if needs is not None:
                self._at_work = True
                try:
                    await self._trim(needs)
                except OSError as error:  # a full disk, for one: nothing is purged, the next snapshot tries again
                    log.warning("log_not_trimmed", reason=str(error))
                finally:
                    self._at_work = False

    async def _trim(self, needs: Needs) -> None:
        held = await self._bus.state(Plane.EVENT)
        least = 1 if held.used > FULL_ABOVE else self._min_events
        if needs.below - held.first_seq < least:
            return
        landmarks = Landmarks()
        async with self._bus.read(*LANDMARKS, buries=False) as events:
            async for received in events.so_far():
                landmarks.take(received.message, received.seq)
        below_seq = trim_point(needs, landmarks)
        if below_seq - held.first_seq < least:
            return
        path, num_events = await archive(self._bus, self._run_dir, below_seq=below_seq)
        await self._bus.purge(Plane.EVENT, below_seq=below_seq)
        archived = str(path.relative_to(self._run_dir))
        await self._bus.publish(LogTrimmed(below_seq=below_seq, num_events=num_events, path=archived))
        log.info("log_trimmed", below_seq=below_seq, num_events=num_events, path=archived)
