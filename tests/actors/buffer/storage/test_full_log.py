"""A run whose log is full goes on: the buffer makes room before it adds to it."""

from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import msgspec
import pytest

from actors.registry import hosted
from messages import (
    BufferStarted,
    CheckpointRequested,
    LogTrimmed,
    Message,
    Plane,
    PromptsLoaded,
    RunFinished,
    SnapshotTaken,
)
from messages.subjects import plane_filter
from runtime.bus.bus import Bus
from runtime.bus.errors import PublishTimeout, StreamFull
from runtime.bus.limits import KIB
from runtime.process.actor import InputError
from runtime.process.hosting import host
from runtime.util.errors import flatten
from tests.actors.buffer.storage.test_pressure import at_work
from tests.actors.buffer.storage.test_trimming import topology_of
from tests.fixtures.nats import TEST_LIMITS, TEST_STREAMS, NatsServer, group_failed
from tests.support.rollout import next_event

pytestmark = pytest.mark.anyio

LOG_BYTES = 256 * KIB


@pytest.fixture
async def impatient(bus: Bus, nats_server: NatsServer) -> AsyncGenerator[Bus]:
    """Another connection to the same run, which does not wait long for a full stream."""
    limits = msgspec.structs.replace(TEST_LIMITS, publish_timeout_s=2.0)
    async with Bus.connect(nats_server.url, bus.run, name="impatient", limits=limits) as other:
        yield other


async def fill(impatient: Bus) -> None:
    """Store foreign events, large ones and then small ones, until not even a small one finds room."""
    subject = plane_filter(impatient.run, Plane.EVENT).replace(">", "foreign")
    for size in (16 * KIB, KIB, 16):
        with pytest.raises((StreamFull, PublishTimeout)):  # a busy server may be slow to say so
            await put_on_and_on(impatient, subject, size)
    assert (await impatient.state(Plane.EVENT)).used > 0.99


async def put_on_and_on(bus: Bus, subject: str, size: int) -> None:
    while True:
        await bus._store.put(subject, b"x" * size, {})


async def publish_on_and_on(bus: Bus) -> None:
    while True:
        await bus.publish(group_failed(1, reason="x" * KIB))


async def next_start(other: Bus, directory: Path, *, until: type[Message] = PromptsLoaded) -> int:
    """Sequence at which a buffer that starts now is entered. It is stopped after an event of a type."""
    topology = topology_of(directory, trim_min_events=10_000, event_bytes=LOG_BYTES)
    before = (await other.state(Plane.EVENT)).last_seq
    async with anyio.create_task_group() as group:
        group.start_soon(host, other, [hosted("buffer", topology, directory)])
        _, started = await next_event(other, BufferStarted, from_seq=before + 1)
        await next_event(other, PromptsLoaded, from_seq=started)
        await next_event(other, until)
        group.cancel_scope.cancel()
    return started


@pytest.mark.slow
async def test_a_full_log_is_trimmed_below_its_snapshot_before_anything_is_added(
    bus: Bus, impatient: Bus, tmp_path: Path
) -> None:
    await bus.ensure_streams(msgspec.structs.replace(TEST_STREAMS, event_bytes=LOG_BYTES))
    async with at_work(bus, tmp_path):
        await next_event(bus, RunFinished, timeout_s=40)
    await next_event(bus, SnapshotTaken)
    await fill(impatient)
    await next_start(bus, tmp_path, until=LogTrimmed)  # not the impatient one: a busy machine trims for seconds
    assert (await bus.state(Plane.EVENT)).max_bytes == LOG_BYTES


@pytest.mark.slow
async def test_a_full_log_without_a_snapshot_is_widened_a_little_and_once(
    bus: Bus, impatient: Bus, tmp_path: Path
) -> None:
    await bus.ensure_streams(msgspec.structs.replace(TEST_STREAMS, event_bytes=LOG_BYTES))
    await fill(impatient)
    await next_start(impatient, tmp_path)
    assert LOG_BYTES < (await bus.state(Plane.EVENT)).max_bytes <= LOG_BYTES * 1.05
    await fill(impatient)
    with pytest.raises(ExceptionGroup) as failed:
        await next_start(impatient, tmp_path)
    assert any(isinstance(error, InputError) and "bus.event_bytes" in str(error) for error in flatten(failed.value))
    assert (await bus.state(Plane.EVENT)).max_bytes <= LOG_BYTES * 1.05


async def test_other_writers_stop_before_the_log_is_full(bus: Bus, impatient: Bus) -> None:
    await bus.ensure_streams(msgspec.structs.replace(TEST_STREAMS, event_bytes=LOG_BYTES))
    with pytest.raises(StreamFull, match="the rest is kept for events that allow trimming"):
        await publish_on_and_on(impatient)
    assert 0.9 < (await bus.state(Plane.EVENT)).used < 0.96
    seq = await impatient.append(BufferStarted(incarnation=1), expected_last=0)
    await impatient.publish(CheckpointRequested(step=1, stream="event", used=0.95))
    await bus.purge(Plane.EVENT, below_seq=seq)
    await impatient.publish(group_failed(1))
