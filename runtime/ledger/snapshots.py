"""Snapshots of the ledger: the folded state as compressed JSON lines, in an event or in chunks on the data plane.

The first line is the state without its live groups, batches and evaluation items. Each further line holds some of
these: at most MAX_ITEMS numbers, names and references, so that no call of the encoder or decoder takes long. Encoding
and decoding run in a worker thread. Between two lines the event loop gets its turn.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import anyio
import msgspec
import structlog
from anyio import to_thread

from messages import SampleSummary, SnapshotChunk, SnapshotTaken
from runtime.bus.bus import Bus
from runtime.bus.errors import BusUnavailable, PayloadLost
from runtime.bus.limits import KIB
from runtime.ledger.fold import FOLD_VERSION, LedgerState
from runtime.ledger.state import EvalItem, Group
from runtime.ledger.steps import Batch

log = structlog.get_logger()

MAX_ITEMS: Final = 2048  # per line; a group that has more gets a line of its own
CHUNK_BYTES: Final = 256 * KIB  # of a stored chunk; below the default max_payload of every server
READ_BYTES: Final = 16 * KIB  # compressed, at a time
LEVEL: Final = 1  # compression level: higher ones save a tenth and take four times as long
OBSERVER_TIMEOUT_S: Final = 3.0  # for a reader that may have no data plane

KeyT = TypeVar("KeyT")
ItemT = TypeVar("ItemT")


class SnapshotDamaged(PayloadLost):
    """The chunks are not those that the snapshot's event names, or they hold no state."""


class Lines(msgspec.Struct, omit_defaults=True):
    """A line after the first."""

    groups: dict[int, Group] = {}  # in order of issue
    batches: dict[int, Batch] = {}  # by step
    items: dict[str, dict[int, EvalItem]] = {}  # of the running evaluation


class PackedState(NamedTuple):
    """An encoded state."""

    chunks: tuple[bytes, ...]  # compressed
    digest: str  # hex SHA-256 of all chunks

    @property
    def size(self) -> int:
        """Bytes of all chunks."""
        return sum(map(len, self.chunks))


def lines_of(state: LedgerState, max_items: int = MAX_ITEMS) -> Iterator[LedgerState | Lines]:
    """The lines of a snapshot, before encoding. The state must not change meanwhile."""
    evaluation = state.evaluation
    bare = evaluation and msgspec.structs.replace(evaluation, items={name: {} for name in evaluation.items})
    yield msgspec.structs.replace(state, groups={}, batches={}, evaluation=bare)
    for groups in _parts(state.groups, num_items, max_items):
        yield Lines(groups=groups)
    for batches in _parts(state.batches, lambda batch: 1 + len(batch.groups), max_items):
        yield Lines(batches=batches)
    for name, items in ({} if evaluation is None else evaluation.items).items():
        for some in _parts(items, _num_in_item, max_items):
            yield Lines(items={name: some})


def num_items(group: Group) -> int:
    """Number of references, indices and rewards in a group: what the time to encode it grows with."""
    spilled = sum(_num_items(each.sample) + len(each.segments) for each in (*group.spilled, *group.anew))
    return 1 + len(group.indices) + spilled + sum(map(_num_items, group.carried))


def _num_items(sample: SampleSummary) -> int:
    return 1 + len(sample.segments) + len(sample.rewards) + len(sample.metadata) + len(sample.columns)


def _num_in_item(item: EvalItem) -> int:
    return 1 + len(item.rewards) + sum(map(_num_items, item.samples))


def _parts(items: Mapping[KeyT, ItemT], size: Callable[[ItemT], int], limit: int) -> Iterator[dict[KeyT, ItemT]]:
    part, used = dict[KeyT, ItemT](), 0
    for key, item in items.items():
        needed = size(item)
        if part and used + needed > limit:
            yield part
            part, used = {}, 0
        part[key], used = item, used + needed
    if part:
        yield part


def pack_state(state: LedgerState, *, max_items: int = MAX_ITEMS, chunk_bytes: int = CHUNK_BYTES) -> PackedState:
    """Encode and compress a state. For a worker thread; the state must not change meanwhile."""
    chunks, digest = tuple(_chunks(_encoded(state, max_items), chunk_bytes)), hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return PackedState(chunks, digest.hexdigest())


def _encoded(state: LedgerState, max_items: int) -> Iterator[bytes]:
    encoder = msgspec.json.Encoder()
    for line in lines_of(state, max_items):
        yield encoder.encode(line) + b"\n"


def _chunks(lines: Iterable[bytes], chunk_bytes: int) -> Iterator[bytes]:
    compressor, waiting = zlib.compressobj(LEVEL), bytearray()
    for line in lines:
        waiting += compressor.compress(line)
        while len(waiting) >= chunk_bytes:
            yield bytes(waiting[:chunk_bytes])
            del waiting[:chunk_bytes]
    waiting += compressor.flush()
    for start in range(0, len(waiting), chunk_bytes):
        yield bytes(waiting[start : start + chunk_bytes])


def unpack_state(chunks: Sequence[bytes], digest: str) -> LedgerState:
    """Decode what `pack_state` returned. For a worker thread.

    Raises:
        SnapshotDamaged: a chunk differs from the packed one.
    """
    found = hashlib.sha256()
    for chunk in chunks:
        found.update(chunk)
    if found.hexdigest() != digest:
        raise SnapshotDamaged(f"the chunks have the SHA-256 {found.hexdigest()}, the event says {digest}")
    try:
        return _joined(_lines(chunks))
    except (zlib.error, msgspec.DecodeError, StopIteration, KeyError) as error:
        raise SnapshotDamaged(f"the chunks hold no state: {error!r}") from error


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    decompressor, rest = zlib.decompressobj(), b""
    for chunk in chunks:
        for start in range(0, len(chunk), READ_BYTES):
            *lines, rest = (rest + decompressor.decompress(chunk[start : start + READ_BYTES])).split(b"\n")
            yield from lines
    if not decompressor.eof or rest:
        raise zlib.error("the chunks end too early")


def _joined(lines: Iterator[bytes]) -> LedgerState:
    state = msgspec.json.decode(next(lines), type=LedgerState)
    evaluated = {} if state.evaluation is None else state.evaluation.items
    decoder = msgspec.json.Decoder(Lines)
    for line in lines:
        more = decoder.decode(line)
        state.groups.update(more.groups)
        state.batches.update(more.batches)
        for name, items in more.items.items():
            evaluated[name].update(items)
    return state


# in events


def with_content(event: SnapshotTaken, packed: PackedState) -> SnapshotTaken:
    """The event with its state inside, without chunks on the data plane."""
    return msgspec.structs.replace(event, content=b"".join(packed.chunks), digest=packed.digest)


def content_of(event: SnapshotTaken) -> LedgerState:
    """The state of an event that holds it.

    Raises:
        SnapshotDamaged: the event holds no such state.
    """
    return unpack_state((event.content,), event.digest)


async def usable_snapshots(bus: Bus, *, buries: bool = False) -> list[SnapshotTaken]:
    """The snapshots in the log that this version can fold on, oldest first. Their chunks may be lost.

    Args:
        bus: the bus.
        buries: whether unusable events are dead-lettered.
    """
    async with bus.read(SnapshotTaken, buries=buries) as snapshots:
        found = [received.message async for received in snapshots.so_far()]
    return [event for event in found if event.fold_version == FOLD_VERSION]


async def read_snapshot(bus: Bus, event: SnapshotTaken, *, buries: bool = False) -> LedgerState:
    """Read the state of a snapshot.

    Args:
        bus: the bus.
        event: a snapshot of this FOLD_VERSION.
        buries: whether an undecodable chunk is dead-lettered.

    Raises:
        PayloadLost: a chunk is lost, or differs from the one that was stored.
        BusUnavailable: no server until the deadline.
    """
    chunks = [(await bus.fetch(SnapshotChunk, seq, buries=buries)).content for seq in event.chunks]
    return await to_thread.run_sync(unpack_state, chunks or [event.content], event.digest, abandon_on_cancel=True)


async def newest_readable(bus: Bus, snapshots: Sequence[SnapshotTaken], *, buries: bool = False) -> LedgerState | None:
    """The state of the newest snapshot that can be read; None if there is none. The errors of others are logged.

    Raises:
        BusUnavailable: no server until the deadline.
    """
    for event in reversed(snapshots):
        try:
            return await read_snapshot(bus, event, buries=buries)
        except PayloadLost as error:
            log.warning("snapshot_unreadable", covers=event.covers, error=str(error))
    return None


async def newest_snapshot(bus: Bus) -> LedgerState | None:
    """The state of the newest usable snapshot, for readers whose log lacks its first part; None if there is none.

    Raises:
        BusUnavailable: no server until the deadline.
    """
    return await newest_readable(bus, await usable_snapshots(bus))


async def newest_snapshot_seen(bus: Bus) -> LedgerState | None:
    """As newest_snapshot, for an observer, which may have no data plane: it then gets the newest state in an event."""
    snapshots = await usable_snapshots(bus)
    try:
        with anyio.fail_after(OBSERVER_TIMEOUT_S):
            return await newest_readable(bus, snapshots)
    except (BusUnavailable, TimeoutError) as error:
        log.warning("data_plane_unreachable", error=str(error))
    return await newest_readable(bus, [event for event in snapshots if not event.chunks])
