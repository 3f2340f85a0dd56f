"""Folds a run for an observer: from the newest snapshot of the fold on, or from the first event.

A snapshot is a file in the run directory, or in the user's cache where this process cannot write there. It saves time
and decides nothing: any process may replace or remove it, and one that cannot be used is ignored.
"""

import hashlib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final

import anyio
import msgspec
from anyio import to_thread

import actors.observer
import messages
import runtime.ledger
import runtime.report
from actors.observer.following import Followed, followed
from actors.observer.observed import Observed
from messages import Message
from runtime.bus.events import Received
from runtime.ledger.changes import Change
from runtime.node.claims.run_id import RunMismatch, id_in
from runtime.node.reopen import FoundRun
from runtime.report.rows import MetricRow
from runtime.util.files import user_cache, write_atomically

SNAPSHOT_EVERY: Final = 100_000  # events
SNAPSHOT_FILE: Final = "observer.snapshot"  # in the run directory
CACHE: Final = "observer"  # snapshots in the user's cache
MAX_BYTES: Final = 256 * 1024 * 1024
CACHED: Final = 16  # snapshots in the user's cache; older ones are removed
MAX_LINE: Final = 4096  # bytes of the first line
FIRST_EVENT_S: Final = 60.0  # until the log has the newest event of a snapshot

Batch = list[Received[Message]]
Take = Callable[[Received[Message], list[MetricRow], list[Change]], None]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a snapshot. The state follows."""

    run: str
    run_id: str
    code: str  # digest of the code that folded the events
    num_steps: int
    step_groups: int
    kept_rows: int
    seq: int = 0  # of the newest event
    digest: str = ""  # hex SHA-256 of the state


OTHERWISE: Final = {  # what it means that a field has another value than the reader's
    "run": "it is of another run",
    "run_id": "it is of another run with the same name",
    "code": "another version of this package wrote it",
    "num_steps": "it is for another number of train steps",
    "step_groups": "it is for steps of another size",
    "kept_rows": "it is for curves of another length",
}


class SnapshotUnusable(Exception):
    """A snapshot cannot be used; the text says why."""


class Snapshots:
    """Reads and writes the snapshots of one run. For a worker thread."""

    def __init__(self, run: FoundRun, observed: Observed) -> None:
        try:
            known = id_in(run.directory)
        except (RunMismatch, OSError):
            known = None
        self.problem = ""  # why the last call failed
        self._unusable = set[Path]()  # files that are replaced whatever their first line says
        self._header = Header(
            run=run.name,
            run_id="" if known is None else known.id,
            code=code_digest(),
            num_steps=observed.num_steps,
            step_groups=observed.step_groups,
            kept_rows=observed.kept_rows,
        )
        self._places = (run.directory / SNAPSHOT_FILE, user_cache(CACHE) / f"{run.name}-{self._header.run_id}.snapshot")

    def read(self) -> Observed | None:
        """Return the newest usable state; None if there is none."""
        self.problem, best = "", None
        for path in self._places:
            try:
                found = self._read(path)
            except FileNotFoundError:
                continue
            except (SnapshotUnusable, OSError) as error:
                self.problem = f"{path} is not used: {error}"
                self._unusable.add(path)
            else:
                best = found if best is None or found.seq > best.seq else best
        return best

    def _read(self, path: Path) -> Observed:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise SnapshotUnusable(f"it has over {MAX_BYTES:,} bytes")
        line, _, state = content.partition(b"\n")
        try:
            header = msgspec.json.decode(line, type=Header)
        except (ValueError, RecursionError) as error:
            raise SnapshotUnusable(f"its first line cannot be read: {error}") from error
        for name, problem in OTHERWISE.items():
            if getattr(header, name) != getattr(self._header, name):
                raise SnapshotUnusable(problem)
        if header.digest != hashlib.sha256(state).hexdigest():
            raise SnapshotUnusable("its SHA-256 differs from that in its first line")
        try:
            observed = Observed.decoded(state)
        except (ValueError, RecursionError) as error:
            raise SnapshotUnusable(f"it holds no state: {error}") from error
        if observed.seq != header.seq:
            raise SnapshotUnusable(f"its state is that of event {observed.seq}, its first line says {header.seq}")
        return observed

    def write(self, seq: int, state: bytes) -> bool:
        """Write the state of an event, unless a file has a newer one. Return whether it could be written."""
        if not self._header.run_id:
            self.problem = "the run has no id"
            return False
        header = msgspec.structs.replace(self._header, seq=seq, digest=hashlib.sha256(state).hexdigest())
        content = msgspec.json.encode(header) + b"\n" + state
        for path in self._places:
            try:
                if path in self._unusable or self._seq_in(path) < seq:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(path, content)
                    self._unusable.discard(path)
            except OSError as error:
                self.problem = str(error)
            else:
                _remove_oldest(path.parent)
                return True
        return False

    def _seq_in(self, path: Path) -> int:
        """Return the sequence of the snapshot in a file; 0 if this reader could not use it."""
        try:
            with path.open("rb") as file:
                found = msgspec.json.decode(file.readline(MAX_LINE), type=Header)
        except (FileNotFoundError, ValueError, RecursionError):
            return 0
        return found.seq if msgspec.structs.replace(found, seq=0, digest="") == self._header else 0


def _remove_oldest(directory: Path) -> None:
    """Remove the oldest snapshots of the user's cache."""
    if directory == user_cache(CACHE):
        with suppress(OSError):  # another observer removes files too; the next write tries again
            found = sorted(directory.glob("*.snapshot"), key=lambda path: path.lstat().st_mtime, reverse=True)
            for path in found[CACHED:]:
                path.unlink(missing_ok=True)


@cache
def code_digest() -> str:
    """Return a digest of the code that folds events: with other code, the same log may fold to another state."""
    digest = hashlib.sha256()
    for package in (messages, runtime.ledger, runtime.report, actors.observer):
        folder = Path(str(package.__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + b"\n" + path.read_bytes())
    return digest.hexdigest()


class Observing:
    """The events of a run, folded as they come. Opened by `observing`."""

    def __init__(
        self,
        observed: Observed,
        events: Followed,
        snapshots: Snapshots,
        begin: Batch,
        note: Callable[[str], None],
        take: Take | None,
    ) -> None:
        self.events = events
        self._take = take
        self._note = note
        self._observed = observed
        self._snapshots = snapshots
        self._begin = begin  # events that were read, but not folded yet
        self._earlier = tuple(observed.problems)
        self._kept = observed.num_events // SNAPSHOT_EVERY  # number of snapshots that are written or not needed

    @property
    def share_read(self) -> float | None:
        """The share of the log that is folded; None once it is caught up with."""
        return self.events.share_read(self._observed.seq)

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """Fold the events in batches; yield each batch afterwards."""
        if self._begin:
            await self._fold(self._begin)
            yield self._begin
        async for batch in self.events.batches():
            await self._fold(batch)
            yield batch
        self._note_problems()

    async def _fold(self, batch: Batch) -> None:
        observed = self._observed
        for received in batch:
            changes: list[Change] | None = None if self._take is None else []
            rows = observed.apply(received.message, received.seq, received.unix_time, changes)
            if self._take is not None and changes is not None:
                self._take(received, rows, changes)
        self._note_problems()
        number = observed.num_events // SNAPSHOT_EVERY
        if number > self._kept and observed.first_seq == 1 and not observed.problems:
            self._kept, state, write = number, observed.encoded(), self._snapshots.write
            if not await to_thread.run_sync(write, observed.seq, state):
                self._kept = 2**63  # no place for snapshots
                self._note(f"no snapshot of this run is written: {self._snapshots.problem}")

    def _note_problems(self) -> None:
        self._observed.problems = [*self._earlier, *self.events.problems]


@asynccontextmanager
async def observing(
    run: FoundRun,
    observed: Observed,
    *,
    note: Callable[[str], None],
    waits: bool = True,
    take: Take | None = None,
) -> AsyncGenerator[Observing, None]:
    """Follow a run as `followed` does for the duration of a block, and fold its events.

    An empty fold begins from the newest snapshot. Every SNAPSHOT_EVERY events the state is written as a snapshot, if
    no event is missing.

    Args:
        run: as `find_run` finds it.
        observed: the fold; one that is not empty goes on after its newest event.
        note: called with a line per snapshot that cannot be used or written.
        waits: whether to wait for new events while a daemon runs the run.
        take: called with each event after it was folded, with the rows of metrics that it completed, and with what it
            changed in the ledger. No snapshot is used then, so that it gets all events.

    Raises:
        NoLog, BusError, OSError: as `followed` does.
    """
    snapshots = await to_thread.run_sync(Snapshots, run, observed)
    if take is None and not observed.num_events:
        found = await to_thread.run_sync(snapshots.read)
        if snapshots.problem:
            note(snapshots.problem)
        if found is not None:
            async with followed(run, from_seq=found.seq, waits=waits) as events:
                begin: Batch | None = None
                with anyio.move_on_after(FIRST_EVENT_S) as waiting:
                    begin = await anext(events.batches(), None)
                if begin is not None and (begin[0].seq, begin[0].unix_time) == (found.seq, found.time):
                    observed.become(found)
                    yield Observing(observed, events, snapshots, begin[1:], note, take)
                    return
            late = f"event {found.seq}, its newest one, did not come within {FIRST_EVENT_S:g} s"
            other = f"the log has another event {found.seq} than its newest one"
            note(f"a snapshot is not used: {late if waiting.cancelled_caught else other}")
    async with followed(run, from_seq=observed.seq + 1, waits=waits) as events:
        yield Observing(observed, events, snapshots, [], note, take)
