"""Snapshots: wherever a log is cut, a snapshot and the rest fold to the state of the whole log."""

from collections.abc import Iterator
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.buffer.deciding.decide import EvalPlan, Schedule
from messages import Message, Plane, SampleStatus, SampleSummary, SegmentRef, SnapshotChunk, SnapshotTaken
from runtime.bus.bus import Bus
from runtime.bus.errors import BusUnavailable
from runtime.ledger.fold import FOLD_VERSION, LedgerState, fold
from runtime.ledger.snapshots import (
    CHUNK_BYTES,
    MAX_ITEMS,
    Lines,
    PackedState,
    SnapshotDamaged,
    lines_of,
    newest_snapshot,
    newest_snapshot_seen,
    num_items,
    pack_state,
    unpack_state,
)
from tests.actors.buffer.test_whole_runs import World
from tests.build.events import aborted, issued, snapshot

pytestmark = pytest.mark.anyio


def encoded(state: LedgerState) -> bytes:
    return msgspec.json.encode(state)


def folded(state: LedgerState, log: list[Message], first_seq: int = 1) -> LedgerState:
    for seq, event in enumerate(log[first_seq - 1 :], start=first_seq):
        fold(state, event, seq)
    return state


def log_of(seed: int) -> list[Message]:
    """A run with evaluations, halts, spills and deaths, or its beginning."""
    evals = (EvalPlan(name="test", interval=1, num_items=3),)
    schedule = Schedule(
        num_steps=5, rollout_batch_size=2, over_sampling_batch_size=4, max_staleness=seed % 3, evals=evals
    )
    world = World(schedule, Random(seed), 1)
    for _ in range(300):
        if world.finished:
            break
        if world.random.random() < 0.5 or not world.act():
            world.decide()
    return world.log


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), cut=st.floats(0, 1), max_items=st.integers(1, 20), chunk_bytes=st.integers(1, 300))
def test_a_snapshot_at_any_cut_and_the_rest_fold_to_the_state_of_the_whole_log(
    seed: int, cut: float, max_items: int, chunk_bytes: int
) -> None:
    log = log_of(seed)
    covers = int(cut * len(log))
    begun = folded(LedgerState(), log[:covers])
    packed = pack_state(begun, max_items=max_items, chunk_bytes=chunk_bytes)
    assert all(0 < len(chunk) <= chunk_bytes for chunk in packed.chunks)
    read = unpack_state(packed.chunks, packed.digest)
    assert encoded(read) == encoded(begun)
    assert encoded(folded(read, log, covers + 1)) == encoded(folded(LedgerState(), log))


SMALL = pack_state(folded(LedgerState(), [issued(*range(200))]), max_items=10, chunk_bytes=100)


@pytest.mark.parametrize("part", range(len(SMALL.chunks)))
def test_a_chunk_that_is_lost_torn_changed_or_of_another_snapshot_is_found(part: int) -> None:
    chunks, other = list(SMALL.chunks), pack_state(LedgerState()).chunks[0]
    torn = chunks[part][:-1]
    changed = bytes([chunks[part][0] ^ 1]) + chunks[part][1:]
    for some in ((), (torn,), (changed,), (other,), (chunks[part],) * 2):
        with pytest.raises(SnapshotDamaged):
            unpack_state([*chunks[:part], *some, *chunks[part + 1 :]], SMALL.digest)


def test_chunks_of_the_right_digest_that_hold_no_state_are_found() -> None:
    import hashlib
    import zlib

    for content in (b"", b"x", zlib.compress(b""), zlib.compress(b"[]\n"), zlib.compress(b'{"evaluation":{}}\n')):
        with pytest.raises(SnapshotDamaged, match="hold no state"):
            unpack_state((content,), hashlib.sha256(content).hexdigest())


# size


def many_groups(num_groups: int) -> LedgerState:
    """Groups in flight; of each hundred, one was halted before and has 8 samples of 20 segments."""
    state, refill = LedgerState(), 5000
    for round, first in enumerate(range(0, num_groups, refill)):
        fold(state, issued(*range(first, first + refill), round=round), round + 1)
    for number, group_id in enumerate(range(0, num_groups, 100)):
        samples = tuple(
            SampleSummary(
                index=index,
                status=SampleStatus.ABORTED,
                segments=tuple(SegmentRef(seq=group_id * 200 + part + 1, position=index) for part in range(20)),
                response_len=20_000,
            )
            for index in range(8)
        )
        fold(state, msgspec.structs.replace(aborted(group_id), samples=samples), 1000 + number)
    return state


@pytest.mark.slow
def test_a_snapshot_of_a_hundred_thousand_groups_is_small_and_made_in_small_steps() -> None:
    state = many_groups(100_000)
    lines = list(lines_of(state))
    groups = [line.groups for line in lines if isinstance(line, Lines)]
    assert max(sum(map(num_items, some.values())) for some in groups) <= MAX_ITEMS
    assert len(msgspec.json.encode(lines[0])) < 2000  # without what grows
    assert max(len(msgspec.json.encode(line)) for line in lines) < 1_000_000
    packed = pack_state(state)
    assert max(map(len, packed.chunks)) <= CHUNK_BYTES
    assert packed.size < 3_000_000  # 37 MB of JSON
    read = unpack_state(packed.chunks, packed.digest)
    assert len(read.groups) == 100_000
    assert read.books() == state.books()
    assert read.groups[99_900].carried == state.groups[99_900].carried


# on a bus


async def stored(bus: Bus, state: LedgerState, *, fold_version: int = FOLD_VERSION) -> SnapshotTaken:
    """A snapshot with chunks on the data plane."""
    packed = pack_state(state, max_items=5, chunk_bytes=100)
    seqs = [await bus.publish(chunk) for chunk in chunks_of(packed, state.last_seq)]
    event = SnapshotTaken(
        incarnation=1, covers=state.last_seq, fold_version=fold_version, chunks=tuple(seqs), digest=packed.digest
    )
    await bus.publish(event)
    return event


def chunks_of(packed: PackedState, covers: int) -> Iterator[SnapshotChunk]:
    for part, content in enumerate(packed.chunks):
        yield SnapshotChunk(covers=covers, part=part, num_parts=len(packed.chunks), content=content)


def states() -> tuple[LedgerState, LedgerState, LedgerState]:
    """Of a log, its first one, two and three events."""
    log: list[Message] = [issued(*range(20)), issued(*range(20, 50), round=1), issued(*range(50, 90), round=2)]
    first, second, third = (folded(LedgerState(), log[:number]) for number in (1, 2, 3))
    return first, second, third


async def test_the_newest_snapshot_whose_chunks_can_be_read_is_used(bus: Bus) -> None:
    first, second, third = states()
    await bus.publish(snapshot(first))  # small: the state is in the event
    older, newest = await stored(bus, second), await stored(bus, third)
    await stored(bus, third, fold_version=FOLD_VERSION - 1)
    for reads in (newest_snapshot, newest_snapshot_seen):
        read = await reads(bus)
        assert read is not None
        assert encoded(read) == encoded(third)
    await bus._administration.delete_message(Plane.DATA, newest.chunks[1])
    read = await newest_snapshot(bus)
    assert read is not None
    assert encoded(read) == encoded(second)
    await bus.purge(Plane.DATA, below_seq=older.chunks[0] + 1)
    read = await newest_snapshot_seen(bus)
    assert read is not None
    assert encoded(read) == encoded(first)
    assert (await bus.state(Plane.DEAD)).messages == 0


async def test_an_observer_without_the_data_plane_starts_from_what_the_log_holds(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = states()
    await stored(bus, second)
    await bus._connection.retry(f"$JS.API.STREAM.DELETE.{bus._data_stream}", b"", None, 5)
    monkeypatch.setattr("runtime.ledger.snapshots.OBSERVER_TIMEOUT_S", 0.2)
    assert await newest_snapshot_seen(bus) is None
    await bus.publish(snapshot(first))
    await bus.publish(msgspec.structs.replace(snapshot(second), content=b"", chunks=(1,)))
    read = await newest_snapshot_seen(bus)
    assert read is not None
    assert encoded(read) == encoded(first)


async def test_an_actor_waits_for_the_data_plane(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not take a server that is away for a lost snapshot."""

    async def away(*_: object, **__: object) -> SnapshotChunk:
        raise BusUnavailable("away")

    first, second, _ = states()
    await bus.publish(snapshot(first))
    await stored(bus, second)
    monkeypatch.setattr(bus, "fetch", away)
    with pytest.raises(BusUnavailable):
        await newest_snapshot(bus)
