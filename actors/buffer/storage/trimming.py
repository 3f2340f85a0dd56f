"""Trims the log: archives the events that no process needs, then purges them."""

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

FULL_ABOVE: Final = 0.5  # share of the stream's bytes above which all is trimmed that the newest snapshot does not need
CITES_NOTHING: Final = (Stage.IN_FLIGHT, Stage.POOLED)  # the snapshot holds everything that such groups need


class Landmarks:
    """Log sequences of events that a starting actor reads. Folds events of the types in LANDMARKS."""

    def __init__(self) -> None:
        self.announced: dict[int, int] = {}  # by weight version
        self.halted = 0  # newest halt
        self.evaluation = 0  # newest evaluation issue
        self.phase = 0  # newest phase change

    def take(self, event: Message, seq: int) -> None:
        """Fold the next event of the log."""
        match event:
            case WeightsAnnounced():
                self.announced.setdefault(event.version, seq)  # a restarted trainer may publish a version number again
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
    """The parts of the log that the ledger needs."""

    below: int  # all events from this sequence on
    version: int  # announcements from this weight version on; 0: no version yet
    halt: bool  # the newest halt
    evaluation: bool  # the newest evaluation issue


WHOLE_LOG: Final = Needs(below=1, version=0, halt=False, evaluation=False)  # before the first snapshot


def needs_of(state: LedgerState, covers: int) -> Needs:
    """The parts of the log that a start from a snapshot needs.

    The filter's consumer needs no more: an unjudged completed group is either open in the ledger or irrelevant.

    Args:
        state: the ledger, folded at least up to the end of the snapshot.
        covers: log sequence of the last event in the snapshot.
    """
    citing = (state.in_stage(stage).values() for stage in Stage if stage not in CITES_NOTHING)
    cited = [group.event_seq for groups in citing for group in groups]
    cited += [ref.event_seq for batch in state.batches.values() for ref in batch.groups]
    running = state.evaluation
    return Needs(
        below=min([covers + 1, *cited]),
        version=state.version if running is None else min(state.version, running.version),
        halt=any(round <= state.halted_round for round in state.index.rounds),  # their tasks may be redelivered
        evaluation=running is not None,
    )


def with_earlier(newest: Needs, earlier: Needs) -> Needs:
    """The parts of the log that are needed if the newest snapshot cannot be read, and the one before it is used."""
    return msgspec.structs.replace(newest, below=min(newest.below, earlier.below))


def trim_point(needs: Needs, landmarks: Landmarks) -> int:
    """The lowest sequence to keep; 0 if a needed event was not found."""
    kept = [needs.below]
    if needs.version > 0:
        found = [seq for version, seq in landmarks.announced.items() if version >= needs.version]
        kept.append(min(found, default=0))
    if needs.halt:
        kept.append(landmarks.halted)
    if needs.evaluation:
        kept.append(landmarks.evaluation)
    if landmarks.phase:
        kept.append(landmarks.phase)  # tells which side may hold GPU memory
    return min(kept)


def fold_archive(run_dir: Path) -> tuple[LedgerState, int]:
    """Fold the archived part of a log from its first event on, up to the first gap.

    Returns:
        The state, and the sequence of the last folded event.
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
        bus: the bus.
        run_dir: run directory, with the archive.
        min_events: smallest number of events worth trimming.
    """

    def __init__(self, bus: Bus, run_dir: Path, min_events: int) -> None:
        self._bus = bus
        self._run_dir = run_dir
        self._min_events = min_events
        self._due: tuple[Needs, Needs] | None = None  # with the snapshot before the newest, and without it
        self._earlier = WHOLE_LOG
        self._requested = anyio.Event()
        self._at_work = False

    def is_busy(self) -> bool:
        """Whether trimming is running or requested."""
        return self._at_work or self._due is not None

    def snapshot_taken(self, state: LedgerState, covers: int, *, keep_from: int) -> None:
        """Request trimming after a snapshot.

        Args:
            state: the ledger.
            covers: log sequence of the last event in the snapshot.
            keep_from: log sequence of the oldest event that the dumps need.
        """
        needs = needs_of(state, covers)
        newest = msgspec.structs.replace(needs, below=min(needs.below, keep_from))
        self._due = with_earlier(newest, self._earlier), newest
        self._earlier = needs
        self._requested.set()

    async def run(self) -> None:
        """Trim on request, until cancelled."""
        while True:
            await self._requested.wait()
            self._requested = anyio.Event()
            due, self._due = self._due, None
            if due is not None:
                self._at_work = True
                try:
                    await self._trim(*due)
                except OSError as error:  # such as a full disk: nothing is purged, and the next snapshot tries again
                    log.warning("log_not_trimmed", reason=str(error))
                finally:
                    self._at_work = False

    async def _trim(self, needs: Needs, needs_of_newest: Needs) -> None:
        held = await self._bus.state(Plane.EVENT)
        least = self._min_events
        if held.used > FULL_ABOVE:
            needs, least = needs_of_newest, 1
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
