"""Archive of the log's older part in the run directory, written before the log is purged.

Each file holds a range of the log: one JSON line per event, compressed. A file gets its final name once it is complete.
After a crash before the purge, a range is in the archive and in the log. Readers read each event once.
"""

import gzip
import re
import uuid
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
from anyio import to_thread

from messages import DecodeError, Message, Plane, decode
from messages.codec import CONTENT_TYPE_HEADER, JSON, TYPE_HEADER
from messages.plain import clipped, is_plain_json
from runtime.bus.bus import Bus
from runtime.bus.events import Events, Received, StoredMessage
from runtime.ledger.fold import LedgerState
from runtime.ledger.snapshots import newest_snapshot_seen
from runtime.util.files import complete

ARCHIVE: Final = "archive"  # in the run directory
PARTIAL: Final = ".partial"
FILE_NAME: Final = re.compile(r"events-(\d+)-(\d+)\.jsonl\.gz")
LEVEL: Final = 3  # compression level: a tenth of the size in a fifth of the default level's time
HEADER_CHARS: Final = 300  # bound of an unknown header value
LINES_AT_ONCE: Final = 512  # per call of a worker thread


class ArchiveDamaged(OSError):
    """A file of the archive cannot be read to its end."""

    def __init__(self, path: Path, line: int, error: Exception) -> None:
        super().__init__(f"{path}, at line {line}: {error}")


class ArchivedEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of an archive file: a stored event."""

    seq: int  # sequence in the log
    time: datetime
    type: str  # message type; empty if the event had none
    event: msgspec.Raw = msgspec.Raw(b"null")  # the payload, unchanged
    raw: bytes | None = None  # the payload in base64 if it is not JSON, instead of `event`
    content_type: str = JSON


class ArchivedFile(msgspec.Struct, frozen=True, order=True):
    """A complete archive file."""

    first_seq: int
    last_seq: int
    path: Path


def archived_files(run_dir: Path) -> list[ArchivedFile]:
    """The complete archive files of a run, in log order."""
    directory = run_dir / ARCHIVE
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    matches = [match for match in map(FILE_NAME.fullmatch, names) if match is not None]
    return sorted(ArchivedFile(int(match[1]), int(match[2]), directory / match[0]) for match in matches)


async def archive(bus: Bus, run_dir: Path, *, below_seq: int) -> tuple[Path, int]:
    """Copy the events of the log below a sequence into an archive file.

    Returns:
        The file and the number of its events.

    Raises:
        OSError: the file cannot be written; no archive file is added.
        BusUnavailable: the log cannot be read.
    """
    directory = run_dir / ARCHIVE
    partial = directory / f"{uuid.uuid4().hex}{PARTIAL}"  # two nodes that share the directory may have equal pids
    first, last, num_events = 0, 0, 0
    await to_thread.run_sync(_make_directory, directory)
    with gzip.open(partial, "wb", LEVEL) as file:
        lines: list[bytes] = []
        async for stored in bus.stored(Plane.EVENT, below_seq=below_seq):
            first, last, num_events = first or stored.seq, stored.seq, num_events + 1
            lines.append(_line_of(stored))
            if len(lines) >= LINES_AT_ONCE:
                await to_thread.run_sync(file.writelines, lines)
                lines = []
        await to_thread.run_sync(file.writelines, lines)
    path = directory / f"events-{first:012}-{last:012}.jsonl.gz"
    await to_thread.run_sync(complete, partial, path)  # after the purge there is no other copy
    return path, num_events


def archived_events(
    run_dir: Path, *, from_seq: int = 1, below_seq: int | None = None, on_skip: Callable[[], None] = lambda: None
) -> Iterator[Received[Message]]:
    """The archived events of a range of the log, each once, in order.

    Args:
        run_dir: directory of the run.
        from_seq: first sequence.
        below_seq: sequence after the last one; None: there is no end.
        on_skip: called for each event that cannot be decoded, which is left out.
    """
    last = from_seq - 1
    for file in archived_files(run_dir):
        if file.last_seq <= last or (below_seq is not None and file.first_seq >= below_seq):
            continue
        for stored in _read(file.path):
            if below_seq is not None and stored.seq >= below_seq:
                break
            if stored.seq <= last:
                continue
            last = stored.seq
            received = _decoded(stored)
            if received is None:
                on_skip()
            else:
                yield received


def first_archived(run_dir: Path) -> Iterator[Received[Message]]:
    """The events of the oldest archive file: the start of the run."""
    file = next(iter(archived_files(run_dir)), None)
    return iter(()) if file is None else archived_events(run_dir, below_seq=file.last_seq + 1)


async def start_state(bus: Bus, run_dir: Path) -> LedgerState | None:
    """The state to start folding from if the log's first part is neither in the log nor archived here; else None.

    This is the case on nodes other than the node with the archive. None also if no snapshot is usable.
    """
    last_seq = max((file.last_seq for file in archived_files(run_dir)), default=0)
    if (await bus.state(Plane.EVENT)).first_seq <= last_seq + 1:
        return None
    return await newest_snapshot_seen(bus)


@asynccontextmanager
async def history(bus: Bus, run_dir: Path) -> "AsyncGenerator[RunEvents, None]":
    """Read a run's events from the first one, for the duration of the block. Unusable ones are skipped."""
    async with bus.read(buries=False, skips=True) as events:
        yield RunEvents(events, run_dir)


class ArchivedBefore:
    """Archived events that lie between the events that a reader gets from the log."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._last_seq = 0

    async def events(self, seq: int) -> AsyncGenerator[Received[Message], None]:
        """The archived events between the previous call's sequence and this one.

        Raises:
            ArchiveDamaged: they cannot be read. The next call does not read them again.
        """
        from_seq, self._last_seq = self._last_seq + 1, seq
        if seq > from_seq:
            archived = archived_events(self._run_dir, from_seq=from_seq, below_seq=seq)
            while batch := await to_thread.run_sync(_take, archived):
                for event in batch:
                    yield event


class RunEvents:
    """A run's events from the first one: the archive, then the log.

    Args:
        events: all events in the log.
        run_dir: directory of the run, whose archive may not exist.
    """

    def __init__(self, events: Events[Message], run_dir: Path) -> None:
        self.first_seq = 0  # sequence of the first event read; 0: none yet. If above 1, the earlier events are lost
        self._events = events
        self._archived = ArchivedBefore(run_dir)

    async def so_far(self) -> AsyncGenerator[Received[Message], None]:
        """The events stored by now."""
        async for received in self._events.so_far():
            async for event in self._with_archived(received):
                yield event

    async def _with_archived(self, received: Received[Message]) -> AsyncGenerator[Received[Message], None]:
        async for event in self._archived.events(received.seq):
            yield self._noted(event)
        yield self._noted(received)

    def _noted(self, received: Received[Message]) -> Received[Message]:
        self.first_seq = self.first_seq or received.seq
        return received


def _take(archived: Iterator[Received[Message]]) -> list[Received[Message]]:
    return list(islice(archived, LINES_AT_ONCE))


def _make_directory(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob(f"*{PARTIAL}"):  # left by a killed process
        left.unlink()


def _line_of(stored: StoredMessage) -> bytes:
    kind = clipped(stored.headers.get(TYPE_HEADER, ""), HEADER_CHARS)
    content_type = clipped(stored.headers.get(CONTENT_TYPE_HEADER, JSON), HEADER_CHARS)
    is_json = content_type == JSON
    written = JSON if is_json else content_type  # msgspec omits a default only if it is the identical object
    line = ArchivedEvent(seq=stored.seq, time=stored.time, type=kind, content_type=written)
    if is_json and b"\n" not in stored.payload and is_plain_json(stored.payload):
        line = msgspec.structs.replace(line, event=msgspec.Raw(stored.payload))
    else:
        line = msgspec.structs.replace(line, raw=stored.payload)
    return msgspec.json.encode(line) + b"\n"


def _read(path: Path) -> Iterator[ArchivedEvent]:
    decoder, number = msgspec.json.Decoder(ArchivedEvent), 0
    try:
        with gzip.open(path, "rb") as file:
            for line in file:
                number += 1
                yield decoder.decode(line)
    except (
        EOFError,
        zlib.error,
        gzip.BadGzipFile,
        ValueError,
        RecursionError,
    ) as error:  # a DecodeError is a ValueError
        raise ArchiveDamaged(path, number, error) from error


def _decoded(stored: ArchivedEvent) -> Received[Message] | None:
    payload = bytes(stored.event) if stored.raw is None else stored.raw
    try:
        message = decode(payload, {TYPE_HEADER: stored.type, CONTENT_TYPE_HEADER: stored.content_type})
    except DecodeError:
        return None
    return Received(message, stored.seq, stored.time, 1)
