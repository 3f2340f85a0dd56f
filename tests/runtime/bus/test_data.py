"""Payloads by sequence number."""

import anyio
import pytest

from messages import ColumnPublished, MessageDeadLettered, Plane, SegmentsPublished
from messages.subjects import subject_of
from runtime.bus.bus import Bus
from runtime.bus.errors import PayloadLost, PayloadUnreadable
from tests.fixtures.nats import NatsServer, eventually, segments

pytestmark = pytest.mark.anyio


async def test_payloads_come_back_by_sequence_many_at_a_time(bus: Bus) -> None:
    seqs = [await bus.publish(segments(number)) for number in range(200)]
    found: dict[int, int] = {}

    async def fetch(seq: int) -> None:
        found[seq] = (await bus.fetch(SegmentsPublished, seq)).group_id

    async with anyio.create_task_group() as group:
        for seq in seqs:
            group.start_soon(fetch, seq)
    assert found == {seq: number for number, seq in enumerate(seqs)}


async def test_a_purged_payload_is_lost(bus: Bus) -> None:
    first, second = await bus.publish(segments(1)), await bus.publish(segments(2))
    await bus.purge(Plane.DATA, below_seq=second)
    with pytest.raises(PayloadLost, match=f"no message {first}"):
        await bus.fetch(SegmentsPublished, first)
    assert (await bus.fetch(SegmentsPublished, second)).group_id == 2


async def test_a_payload_that_never_was_is_lost(bus: Bus) -> None:
    with pytest.raises(PayloadLost):
        await bus.fetch(SegmentsPublished, 7)


async def test_an_undecodable_payload_is_lost_and_set_aside(bus: Bus) -> None:
    subject = subject_of(bus.run, segments(1))
    headers = {"Physarum-Type": "segments_published", "Content-Type": "application/msgpack"}
    seq = await bus._store.put(subject, b"\xc1", headers)
    with pytest.raises(PayloadUnreadable):
        await bus.fetch(SegmentsPublished, seq)
    async with bus.read(MessageDeadLettered) as events:
        assert events.pending == 1


async def test_a_payload_of_another_type_is_not_taken(bus: Bus) -> None:
    seq = await bus.publish(segments(1))
    with pytest.raises(PayloadUnreadable, match="expected ColumnPublished"):
        await bus.fetch(ColumnPublished, seq)


async def test_fetching_waits_for_a_killed_server(own_bus: Bus, own_nats_server: NatsServer) -> None:
    seq = await own_bus.publish(segments(5))
    own_nats_server.kill()
    await eventually(lambda: not own_bus._connection.is_connected)
    async with anyio.create_task_group() as group:

        async def fetch() -> None:
            assert (await own_bus.fetch(SegmentsPublished, seq)).group_id == 5

        group.start_soon(fetch)
        own_nats_server.spawn()
        await own_nats_server.wait_ready()
