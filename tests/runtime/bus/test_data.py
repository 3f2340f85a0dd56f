"""Payloads by sequence number."""

from pathlib import Path

import anyio
import pytest

from messages import ColumnPublished, MessageDeadLettered, Plane, SegmentsPublished
from messages.subjects import subject_of
from runtime.bus.bus import Bus
from runtime.bus.errors import PayloadLost, PayloadUnreadable
from runtime.bus.limits import StreamLimits
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


async def test_more_payloads_at_once_than_the_server_holds_are_all_stored(tmp_path: Path) -> None:
    """nats-server refuses a publish while it holds 10,000 messages or 128 MiB, by default, that it has yet to store."""
    server = NatsServer(tmp_path, jetstream="max_buffered_msgs: 2")
    server.spawn()
    try:
        await server.wait_ready()
        async with Bus.connect(server.url, "run", name="test") as bus, anyio.create_task_group() as group:
            await bus.ensure_streams(StreamLimits())
            for number in range(200):
                group.start_soon(bus.publish, segments(number))
            await eventually(lambda: bus.stats()["bus/published"] >= 200)
            assert (await bus.state(Plane.DATA)).messages == 200
            assert bus.stats()["bus/publish_retries"] > 0
    finally:
        server.kill()


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
