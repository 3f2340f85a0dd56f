"""The buffer on a real bus: what it does when the log holds what it cannot read, and when another buffer writes."""

from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import anyio
import msgspec
import pytest

from actors.buffer.actor import BufferActor
from actors.buffer.deciding.decide import events_of
from actors.buffer.ledger_log import LEDGER_OWN, LedgerLog
from actors.trainer.data.history import History
from messages import (
    BatchReady,
    BufferStarted,
    CheckpointSaved,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupRef,
    GroupsIssued,
    HaltAnswered,
    HaltRequested,
    Message,
    RolloutRequested,
    RoundHalted,
    SampleStatus,
    SampleSummary,
    SegmentRef,
    SegmentsSpilled,
    SnapshotTaken,
    SpillsGiven,
    SpillsRequested,
)
from messages.codec import TYPE_HEADER, VERSION_HEADER, encode
from messages.subjects import filter_of, ledger_filter, subject_of
from runtime.bus.bus import Bus
from runtime.bus.consumer import Deliveries
from runtime.bus.errors import BusError, Fenced, UnknownDecision
from runtime.bus.events import Received
from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, fold
from runtime.ledger.snapshots import newest_snapshot
from runtime.ledger.state import MAX_ENDINGS_LOST
from runtime.settings.topology import Topology
from tests.build.events import trained
from tests.fixtures.nats import TEST_STREAMS, NatsServer, eventually
from tests.support.buffer import buffer, complete, put_raw, small_topology
from tests.support.rollout import announcement, next_event

pytestmark = pytest.mark.anyio


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    return small_topology(tmp_path)


async def test_groups_are_issued_when_weights_are_announced(bus: Bus, topology: Topology) -> None:
    async with buffer(bus, topology):
        await bus.publish(announcement(1))
        issued, _ = await next_event(bus, GroupsIssued)
        assert isinstance(issued, GroupsIssued)
        assert [group.group_id for group in issued.groups] == [0, 1]
        for group_id in (0, 1):
            await complete(bus, group_id)
        batch, _ = await next_event(bus, BatchReady)
    assert isinstance(batch, BatchReady)
    assert [ref.group_id for ref in batch.groups] == [0, 1]


async def test_whoever_works_on_an_attempt_after_a_crash_learns_what_was_spilled(bus: Bus, topology: Topology) -> None:
    stored = SampleSummary(
        index=1, status=SampleStatus.ABORTED, segments=(SegmentRef(seq=3, position=0),), response_len=9
    )
    who: dict[str, Any] = {"group_id": 0, "lease": "l", "round": 0, "instance": "rollout", "samples": (stored,)}
    async with buffer(bus, topology):
        await bus.publish(announcement(1))
        await next_event(bus, GroupsIssued)
        await bus.publish(SegmentsSpilled(attempt=0, **who))

        async def spills(attempt: int) -> tuple[SampleSummary, ...]:
            request = SpillsRequested(group_id=0, attempt=attempt)
            return (await bus.call("buffer", request, SpillsGiven, timeout_s=40)).samples

        async def folded() -> bool:
            return await spills(0) == (stored,)

        await eventually(folded)
        assert await spills(1) == ()


async def test_a_person_halts_the_running_round_once(bus: Bus, topology: Topology) -> None:
    async def halt() -> HaltAnswered:
        return await bus.call("buffer", HaltRequested(), HaltAnswered, timeout_s=40)

    async with buffer(bus, topology):
        await next_event(bus, BufferStarted)
        assert await halt() == HaltAnswered(reason="no group is being generated; the run waits for the first weights")
        await bus.publish(announcement(1))
        _, seq = await next_event(bus, GroupsIssued)
        assert await halt() == HaltAnswered(round=0, num_groups=2)
        halted, _ = await next_event(bus, RoundHalted)
        assert halted == RoundHalted(incarnation=1, round=0, by_hand=True)
        again = await halt()
        assert (again.round, again.reason.partition("waits for ")[2]) == (
            -1,
            "2 groups of a round that was halted by hand to end; 2 groups for the batch of step 1: 2 being generated",
        )
        for group_id in (0, 1):
            who: dict[str, Any] = {"lease": "l", "round": 0, "instance": "rollout", "samples": ()}
            await bus.publish(GroupAborted(group_id=group_id, attempt=0, **who))
        issued, _ = await next_event(bus, GroupsIssued, from_seq=seq + 1)
    assert isinstance(issued, GroupsIssued)
    assert (issued.round, [(group.group_id, group.attempt) for group in issued.groups]) == (1, [(0, 1), (1, 1)])


async def test_a_halt_that_the_server_stores_slowly_is_answered_as_done(
    bus: Bus, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LedgerLog.append

    async def slowly(log: LedgerLog, event: Message) -> int:
        seq = await store(log, event)
        if isinstance(event, RoundHalted):
            await anyio.sleep(4 * HALT_S)
        return seq

    HALT_S = 0.1
    monkeypatch.setattr("actors.buffer.actor.HALT_TIMEOUT_S", HALT_S)
    monkeypatch.setattr(LedgerLog, "append", slowly)
    async with buffer(bus, topology):
        await bus.publish(announcement(1))
        await next_event(bus, GroupsIssued)
        answer = await bus.call("buffer", HaltRequested(), HaltAnswered, timeout_s=40)
    assert answer == HaltAnswered(round=0, num_groups=2)


async def test_a_halt_counts_no_group_of_a_round_that_was_halted_before(bus: Bus, topology: Topology) -> None:
    rollout = msgspec.structs.replace(topology.rollout, over_sampling_batch_size=3)
    async with buffer(bus, msgspec.structs.replace(topology, rollout=rollout)):
        await bus.publish(announcement(1))
        await next_event(bus, GroupsIssued)
        for group_id in (0, 1):
            await complete(bus, group_id)
        _, seq = await next_event(bus, RoundHalted)  # group 2 still ends
        await bus.publish(trained(0))
        await bus.publish(announcement(2, step=1))
        await next_event(bus, GroupsIssued, from_seq=seq + 1)
        answer = await bus.call("buffer", HaltRequested(), HaltAnswered, timeout_s=40)
    assert answer == HaltAnswered(round=1, num_groups=3)


async def test_a_halt_is_not_stored_after_a_decision_that_came_first(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main loop appends and folds a decision while the bus refuses the halt, which was decided before it."""
    own = LedgerLog(bus, tmp_path, TEST_STREAMS.event_bytes)
    append, first = bus.append, RoundHalted(incarnation=1, round=0)

    async def overtaken(event: Message, *, expected_last: int) -> int:
        if expected_last == 0:
            await own.fold(Received(first, await append(first, expected_last=0), datetime.now(UTC), 0))
        return await append(event, expected_last=expected_last)

    monkeypatch.setattr(bus, "append", overtaken)
    assert await own.append(RoundHalted(incarnation=1, round=1, by_hand=True)) == 0
    assert await bus.last_ledger_seq() == own.state.last_seq == 1


async def test_what_the_ledger_holds_unreadably_stops_no_decision(bus: Bus, topology: Topology) -> None:
    """Neither of a known type nor what is no message at all; see the next test for one of a later version."""
    async with buffer(bus, topology):
        _, started = await next_event(bus, BufferStarted)
        await put_raw(bus, filter_of(bus.run, RoundHalted))
        await put_raw(bus, ledger_filter(bus.run).replace(">", "of_no_version"))
        await bus.publish(announcement(1))
        await next_event(bus, GroupsIssued, from_seq=started)
    async with buffer(bus, topology):  # and neither does the next buffer stumble over it
        for group_id in (0, 1):
            await complete(bus, group_id)
        await next_event(bus, BatchReady)


async def test_a_decision_of_a_later_version_ends_the_buffer(bus: Bus, topology: Topology) -> None:
    """What it would fold without it is false."""
    headers = {TYPE_HEADER: "groups_split", VERSION_HEADER: "2"}
    await bus._store.put(ledger_filter(bus.run).replace(">", "groups_split"), b"{}", headers)
    with (
        anyio.fail_after(200),
        pytest.raises(UnknownDecision, match="'groups_split': version 2 of the messages wrote it"),
    ):
        await BufferActor(topology, bus, Path()).run()


@pytest.mark.parametrize("ending", [GroupCompleted, GroupAborted, GroupFailed])
async def test_a_task_of_which_nobody_can_read_how_it_ended_is_put_again(
    bus: Bus, topology: Topology, ending: type[Message]
) -> None:
    async with buffer(bus, topology):
        await bus.publish(announcement(1))
        await next_event(bus, GroupsIssued)
        async with bus.consume(RolloutRequested, durable="rollout") as deliveries:
            with anyio.fail_after(200):
                first = [await anext(deliveries), await anext(deliveries)]
                for delivery in first:
                    await delivery.ack()
                await put_raw(bus, filter_of(bus.run, ending).replace(">", "1.0"))
                again = await anext(deliveries)
            assert (again.message.group_id, again.message.attempt) == (1, 0)
            await again.ack()
            assert await deliveries.next(0.3) is None
        for group_id in (0, 1):
            await complete(bus, group_id)
        await next_event(bus, BatchReady)


async def test_an_ending_that_stays_unreadable_fails_its_group(bus: Bus, topology: Topology) -> None:
    subject, state = filter_of(bus.run, GroupCompleted).replace(">", "1.0"), LedgerState()
    async with buffer(bus, topology):
        await bus.publish(announcement(1))
        await next_event(bus, GroupsIssued)
        async with bus.consume(RolloutRequested, durable="rollout") as deliveries:
            with anyio.fail_after(200):
                numbers = [await number_of_next(deliveries), await number_of_next(deliveries)]
                for _ in range(MAX_ENDINGS_LOST):
                    await put_raw(bus, subject)
                    numbers.append(await number_of_next(deliveries))
    assert sorted(numbers[:2]) == [0, 1]
    assert numbers[2:-1] == [1] * (MAX_ENDINGS_LOST - 1)
    assert numbers[-1] > 1  # another group in its place
    async with bus.read(*LEDGER_EVENTS) as events:
        async for received in events.so_far():
            fold(state, received.message, received.seq)
    assert [(reason[:8], count) for reason, count in state.failed.items()] == [("ending: ", 1)]
    assert state.books().closed


async def number_of_next(deliveries: Deliveries[RolloutRequested]) -> int:
    delivery = await anext(deliveries)
    await delivery.ack()
    return delivery.message.group_id


async def test_an_unreadable_event_at_the_end_of_the_log_hides_no_decision(
    own_nats_server: NatsServer, own_bus: Bus, topology: Topology
) -> None:
    """It comes together with the event before it, which says that more is on its way."""
    async with buffer(own_bus, topology):
        await next_event(own_bus, BufferStarted)
        own_nats_server.pause()
        encoded = encode(announcement(1))
        subject = subject_of(own_bus.run, announcement(1))
        await own_bus._connection.send(subject, encoded.payload, encoded.headers)
        await own_bus._connection.send(subject, b"{")
        await own_bus._connection._client._flush_pending()
        own_nats_server.resume()
        await next_event(own_bus, GroupsIssued)


async def test_a_snapshot_over_the_size_of_a_message_is_stored_in_chunks(bus: Bus, topology: Topology) -> None:
    """Each group left behind by a halt fits a message, all of them together do not."""
    long = SampleSummary(index=0, status=SampleStatus.ABORTED, score={"why": Random(0).randbytes(2_500_000).hex()})
    halted: dict[str, Any] = {"attempt": 0, "lease": "l", "round": 0, "instance": "rollout", "samples": (long,)}
    saved = CheckpointSaved(step=1, incarnation=1, path="", oldest_step=1, took_s=0)
    wide = msgspec.structs.replace(topology.rollout, over_sampling_batch_size=4)
    async with buffer(bus, msgspec.structs.replace(topology, rollout=wide)):
        await bus.publish(announcement(1))
        await next_event(bus, GroupsIssued)
        for group_id in (0, 1):
            await complete(bus, group_id)
        _, seq = await next_event(bus, RoundHalted)
        for group_id in (2, 3):
            await bus.publish(GroupAborted(group_id=group_id, **halted))
        await bus.publish(saved)
        await bus.publish(announcement(2, step=1))
        taken, _ = await next_event(bus, SnapshotTaken, from_seq=seq)
        await next_event(bus, GroupsIssued, from_seq=seq)
        assert isinstance(taken, SnapshotTaken)
        assert len(taken.chunks) > 10
        state = await newest_snapshot(bus)
        assert state is not None
        assert {group_id: group.carried[0].score for group_id, group in state.groups.items() if group.carried} == {
            2: long.score,
            3: long.score,
        }


async def test_of_two_buffers_the_older_one_ends_as_fenced(bus: Bus, topology: Topology) -> None:
    async def started() -> bool:
        return (await bus.last_ledger_seq()) > 0

    ended_by: list[BusError] = []

    async def older() -> None:
        try:
            await BufferActor(topology, bus, Path()).run()
        except BusError as error:
            ended_by.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(older)
        await eventually(started)
        async with buffer(bus, topology):
            await eventually(lambda: bool(ended_by))
    assert [type(error) for error in ended_by] == [Fenced]


async def test_a_buffer_that_was_overtaken_appends_nothing(bus: Bus, topology: Topology, tmp_path: Path) -> None:
    late = LedgerLog(bus, tmp_path, TEST_STREAMS.event_bytes)
    await bus.append(BufferStarted(incarnation=1), expected_last=0)
    assert await late.append(BufferStarted(incarnation=1)) == 0


async def test_the_events_of_a_batch_follow_each_other(
    bus: Bus, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.buffer.deciding.decide.MAX_BATCHED", 1)
    async with buffer(bus, topology), bus.read(BatchReady, RoundHalted, GroupsIssued) as events:
        await bus.publish(announcement(1))
        await next_event(bus, GroupsIssued)
        for group_id in (0, 1):
            await complete(bus, group_id)
        await bus.publish(announcement(2, step=1))  # the next round may begin
        found = [received.message for _ in range(4) if (received := await events.next(40)) is not None]
    assert [(type(event), getattr(event, "index", 0)) for event in found] == [
        (GroupsIssued, 0),
        (BatchReady, 0),
        (BatchReady, 1),
        (GroupsIssued, 0),
    ]
    assert [ref.group_id for event in found if isinstance(event, BatchReady) for ref in event.groups] == [0, 1]


async def test_a_batch_of_100_000_groups_goes_over_the_bus_and_is_one_again(bus: Bus, tmp_path: Path) -> None:
    own = LedgerLog(bus, tmp_path, TEST_STREAMS.event_bytes)
    own.state.first_group = 100_000  # older groups are trusted
    refs = tuple(GroupRef(group_id=number, attempt=0, event_seq=number + 1) for number in range(100_000))
    history = History()
    async with bus.read(*LEDGER_OWN) as events:
        for part in events_of(BatchReady(incarnation=0, step=0, groups=refs)):
            assert not history.batches
            seq = await own.append(part)
            received = await events.next(40)
            assert received is not None
            assert received.seq == seq > 0
            await own.fold(received)
            history.fold(received.message, seq)
    assert own.state.batches[0].groups == history.batches[0].groups == refs
