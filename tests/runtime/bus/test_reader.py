"""Reading the log: total order, nothing skipped, nothing twice, whatever happens to the server."""

import anyio
import pytest

from messages import DeadLetter, GroupFailed, Message, MessageDeadLettered, Plane, RoundHalted, WeightsApplied
from messages.subjects import plane_filter, stream_of, subject_of
from runtime.bus.bus import Bus
from runtime.bus.events import Events
from runtime.bus.nats.store import api_call
from runtime.bus.reader import LogReader
from tests.fixtures.nats import NatsServer, eventually, group_failed

pytestmark = pytest.mark.anyio
HALTED = RoundHalted(incarnation=1, round=3)


async def all_now(events: Events[Message]) -> list[Message]:
    with anyio.fail_after(200):
        return [received.message async for received in events.so_far()]


async def test_two_thousand_events_over_a_killed_server(own_bus: Bus, own_nats_server: NatsServer) -> None:
    numbers: list[int] = []
    seqs: list[int] = []
    half = anyio.Event()

    async def follow() -> None:
        async with own_bus.read(GroupFailed) as events:
            async for received in events:
                numbers.append(received.message.group_id)
                seqs.append(received.seq)
                if len(numbers) == 700:
                    half.set()
                if len(numbers) == 2000:
                    return

    async def write() -> None:
        for number in range(2000):
            await own_bus.publish(group_failed(number))

    async with anyio.create_task_group() as group:
        group.start_soon(follow)
        group.start_soon(write)
        await half.wait()
        await own_nats_server.restart()
    assert numbers == list(range(2000))
    assert seqs == sorted(set(seqs))


async def test_reading_starts_at_a_sequence_and_takes_the_asked_types_only(bus: Bus) -> None:
    await bus.publish(group_failed(1))
    await bus.publish(HALTED)
    await bus.publish(group_failed(2))
    async with bus.read(GroupFailed, from_seq=2) as events:
        assert events.pending == 1
        assert await all_now(events) == [group_failed(2)]
        assert await events.next(0.05) is None
    async with bus.read() as events:
        assert await all_now(events) == [group_failed(1), HALTED, group_failed(2)]


async def test_pending_counts_what_is_still_to_be_read(bus: Bus) -> None:
    for number in range(5):
        await bus.publish(group_failed(number))
    async with bus.read(GroupFailed) as events:
        pending = [received.pending for _ in range(5) if (received := await events.next(30)) is not None]
    assert pending == [4, 3, 2, 1, 0]


async def test_times_are_those_of_the_log(bus: Bus) -> None:
    await bus.publish(group_failed(1))
    await bus.publish(group_failed(2))
    async with bus.read(GroupFailed) as events:
        first, second = await events.next(30), await events.next(30)
    assert first is not None
    assert second is not None
    assert first.time < second.time


async def test_a_reader_outlives_its_consumer(bus: Bus) -> None:
    await bus.publish(group_failed(1))
    async with bus.read(GroupFailed) as events:
        assert await events.next(30) is not None
        stream = stream_of(bus.run, Plane.EVENT)
        names = await api_call(bus._connection, f"CONSUMER.NAMES.{stream}")
        for name in names["consumers"]:
            await api_call(bus._connection, f"CONSUMER.DELETE.{stream}.{name}")
        await bus.publish(group_failed(2))
        received = await events.next(30)
        assert received is not None
        assert received.message == group_failed(2)


async def test_an_event_that_was_dropped_on_the_way_is_read_again(bus: Bus) -> None:
    reader = LogReader(
        bus._connection, stream_of(bus.run, Plane.EVENT), [plane_filter(bus.run, Plane.EVENT)], from_seq=1
    )
    for number in range(5):
        await bus.publish(group_failed(number))
    await reader.open()
    assert await reader.next(30) is not None
    await eventually(lambda: bool(reader._pull.buffered))
    reader._pull.buffered.popleft()
    seqs: list[int] = []
    while len(seqs) < 4:
        item = await reader.next(30)
        assert item is not None
        seqs.append(item[1].stream_seq)
    assert seqs == [2, 3, 4, 5]
    await reader.close()


async def test_two_readers_keep_their_own_place(bus: Bus) -> None:
    async with bus.read(GroupFailed) as one, bus.read(GroupFailed) as other:
        await bus.publish(group_failed(1))
        for events in (one, other):
            received = await events.next(30)
            assert received is not None
            assert received.message == group_failed(1)


async def test_only_events_are_read(bus: Bus) -> None:
    with pytest.raises(ValueError, match="read takes events"):
        bus.read(DeadLetter)


async def test_what_cannot_be_decoded_is_set_aside_once_and_passed_over(bus: Bus) -> None:
    subject = subject_of(bus.run, group_failed(1))
    await bus._store.put(subject, b"{not json", {"Physarum-Type": "group_failed"})
    await bus.publish(group_failed(2))
    for _ in range(2):  # two readers, one letter
        async with bus.read(GroupFailed) as events:
            received = await events.next(30)
            assert received is not None
            assert received.message == group_failed(2)
    async with bus.read(MessageDeadLettered) as events:
        told = await events.next(30)
        assert told is not None
        assert events.pending == 0
    assert told.message.subject == subject
    assert "malformed" in told.message.reason
    assert (await bus.state(Plane.DEAD)).messages == 1


async def test_reading_to_the_end_ends_when_the_last_event_is_unusable(bus: Bus) -> None:
    subject = subject_of(bus.run, WeightsApplied(version=1, instance="r", num_engines=1, took_s=0.1))
    await bus._store.put(subject, b"{}", {"Physarum-Type": "no_such_type"})
    async with bus.read(WeightsApplied) as events:
        assert await all_now(events) == []


async def test_a_reader_leaves_no_consumer_behind(bus: Bus) -> None:
    async def num_consumers() -> int:
        info = await api_call(bus._connection, f"STREAM.INFO.{stream_of(bus.run, Plane.EVENT)}")
        return info["state"]["consumer_count"]

    async with bus.read(GroupFailed):
        assert await num_consumers() == 1

    async def are_gone() -> bool:
        return await num_consumers() == 0

    await eventually(are_gone)


async def test_a_reader_whose_pending_messages_are_gone_after_an_outage_comes_to_an_end(
    own_bus: Bus, own_nats_server: NatsServer
) -> None:
    """It began before the outage; while it was away they were deleted, as keys expire."""
    for number in range(3):
        await own_bus.publish(group_failed(number))
    filters = [plane_filter(own_bus.run, Plane.EVENT)]
    reader = LogReader(own_bus._connection, stream_of(own_bus.run, Plane.EVENT), filters, from_seq=1)
    await reader.open()
    assert reader.num_pending == 3
    await own_nats_server.restart()
    await own_bus.purge(Plane.EVENT, below_seq=4)
    with anyio.fail_after(200):
        while reader.num_pending:
            assert await reader.next() is None
        await own_bus.publish(group_failed(3))
        found = await reader.next()
    assert found is not None
    assert found[1].stream_seq == 4
    await reader.close()


async def test_a_reader_begun_while_the_server_is_down_reads_on_when_it_is_back(
    own_bus: Bus, own_nats_server: NatsServer
) -> None:
    await own_bus.publish(group_failed(0))
    own_nats_server.kill()
    begun = anyio.Event()

    async def start_again() -> None:
        await begun.wait()
        own_nats_server.spawn()
        await own_nats_server.wait_ready()
        await own_bus.publish(group_failed(1))

    async with anyio.create_task_group() as group:
        group.start_soon(start_again)
        begun.set()
        async with own_bus.read(GroupFailed) as events:
            with anyio.fail_after(200):
                assert [(await anext(events)).message for _ in range(2)] == [group_failed(0), group_failed(1)]
