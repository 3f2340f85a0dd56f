"""A buffer whose snapshots are in chunks: whichever of them is lost, it goes on from the one before."""

from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from actors.buffer.storage.snapshots import NOWHERE, SnapshotStore
from messages import BatchReady, LogTrimmed, Message, Plane, SnapshotTaken
from runtime.bus.bus import Bus
from runtime.ledger.archive import archived_files
from runtime.ledger.fold import FOLD_VERSION, LEDGER_EVENTS, LedgerState, fold
from runtime.ledger.snapshots import newest_snapshot, read_snapshot, usable_snapshots
from tests.actors.buffer.storage.test_trimming import buffer, history_of, play, topology_of
from tests.fixtures.nats import eventually
from tests.support.rollout import next_event

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the smallest state too, and several."""
    monkeypatch.setattr("actors.buffer.storage.snapshots.IN_EVENT_BYTES", 0)
    monkeypatch.setattr(
        "actors.buffer.storage.snapshots.pack_state.__kwdefaults__", {"max_items": 2, "chunk_bytes": 99}
    )


async def folded(bus: Bus, run_dir: Path, *, to: int) -> bytes:
    """The state of the whole log up to an event."""
    state = LedgerState()
    for seq, event in await history_of(bus, run_dir):
        if isinstance(event, LEDGER_EVENTS) and seq <= to:
            fold(state, event, seq)
    return msgspec.json.encode(state)


async def lose(bus: Bus, event: SnapshotTaken) -> None:
    await bus._administration.delete_message(Plane.DATA, event.chunks[len(event.chunks) // 2])


@pytest.mark.parametrize("lost", ["none", "newest", "all"])
async def test_a_buffer_goes_on_from_the_newest_snapshot_that_it_can_read(bus: Bus, tmp_path: Path, lost: str) -> None:
    topology = topology_of(tmp_path, trim_min_events=1)
    async with buffer(bus, topology, tmp_path):
        await play(bus, tmp_path, steps=range(2), trimmed=True)
    older, newest = await usable_snapshots(bus)
    assert min(len(older.chunks), len(newest.chunks)) > 1
    for event in {"none": (), "newest": (newest,), "all": (older, newest)}[lost]:
        await lose(bus, event)
    before = (await bus.state(Plane.EVENT)).last_seq
    async with buffer(bus, topology, tmp_path):
        if lost != "none":  # another one is taken at once, for others that start
            taken, _ = await next_event(bus, SnapshotTaken, from_seq=before + 1)
            assert isinstance(taken, SnapshotTaken)
            assert msgspec.json.encode(await read_snapshot(bus, taken)) == await folded(bus, tmp_path, to=taken.covers)
        await play(bus, tmp_path, steps=range(2, 4), trimmed=True)
    batches = [event for _, event in await history_of(bus, tmp_path) if isinstance(event, BatchReady)]
    assert [ref.group_id for batch in batches for ref in batch.groups] == list(range(8))


async def test_a_buffer_that_dies_between_the_chunks_and_the_event_takes_another_snapshot(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, died = Bus.append, anyio.Event()

    async def dies(self: Bus, message: Message, **expected: Any) -> int:
        if isinstance(message, SnapshotTaken) and not died.is_set() and (await newest_snapshot(bus)) is not None:
            died.set()
            await anyio.sleep_forever()  # the first one is there: the second one's event is never appended
        return await append(self, message, **expected)

    monkeypatch.setattr(Bus, "append", dies)
    topology = topology_of(tmp_path, trim_min_events=1)
    async with anyio.create_task_group() as group, buffer(bus, topology, tmp_path):
        group.start_soon(lambda: play(bus, tmp_path, steps=range(2), trimmed=False))
        await died.wait()
        group.cancel_scope.cancel()
    (first,) = await usable_snapshots(bus)
    stored = (await bus.state(Plane.DATA)).last_seq
    assert stored > max(first.chunks)
    async with buffer(bus, topology, tmp_path):
        await play(bus, tmp_path, steps=range(2, 3), trimmed=True)
    newest = (await usable_snapshots(bus))[-1]
    assert min(newest.chunks) > stored
    state = await newest_snapshot(bus)
    assert state is not None
    assert msgspec.json.encode(state) == await folded(bus, tmp_path, to=newest.covers)


async def test_neither_stream_is_emptied_of_what_the_two_newest_snapshots_need(bus: Bus, tmp_path: Path) -> None:
    topology = topology_of(tmp_path, trim_min_events=1)
    async with buffer(bus, topology, tmp_path):
        await play(bus, tmp_path, steps=range(1), trimmed=True)
        (first,) = await usable_snapshots(bus)
        assert archived_files(tmp_path) == []  # the first one could be lost, too
        await play(bus, tmp_path, steps=range(1, 3), trimmed=True)
        second, third = (await usable_snapshots(bus))[-2:]

        async def is_purged() -> bool:
            return first.chunks[0] < (await bus.state(Plane.DATA)).first_seq

        await eventually(is_purged)
        assert (await bus.state(Plane.DATA)).first_seq <= min(second.chunks)
        assert 1 < (await bus.state(Plane.EVENT)).first_seq <= second.covers + 1
        assert (await read_snapshot(bus, second)).last_seq == second.covers
        assert (await read_snapshot(bus, third)).last_seq == third.covers
    trimmed, _ = await next_event(bus, LogTrimmed)
    assert isinstance(trimmed, LogTrimmed)


def taken(covers: int, *chunks: int, fold_version: int = FOLD_VERSION) -> SnapshotTaken:
    return SnapshotTaken(incarnation=1, covers=covers, fold_version=fold_version, chunks=chunks)


async def test_chunks_of_the_two_newest_snapshots_are_protected_and_of_one_where_room_is_short(bus: Bus) -> None:
    store = SnapshotStore(bus)
    assert store.needed_from(short=False) == NOWHERE
    for event in (taken(1, 5, 6), taken(2, 8, 9), taken(3, 11, 12)):
        store.folded(event)
    assert (store.needed_from(short=False), store.needed_from(short=True)) == (8, 11)
    store.folded(taken(4, fold_version=FOLD_VERSION - 1))  # of no use
    assert (store.needed_from(short=False), store.needed_from(short=True)) == (8, 11)
    store.folded(taken(5))  # its state is in the event
    assert (store.needed_from(short=False), store.needed_from(short=True)) == (11, NOWHERE)
