"""Storing: nothing acked is lost, every wait ends, a retry is the same message."""

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest

from messages import Plane, PromptsLoaded, ScoreRequested
from runtime.bus.bus import Bus
from runtime.bus.errors import AlreadyQueued, BusError, BusUnavailable, PublishTimeout, StreamFull
from runtime.bus.limits import BusLimits
from runtime.bus.nats.connection import AttemptTimeout, Connection, Headers, RawMessage
from tests.fixtures.nats import TEST_LIMITS, TEST_STREAMS, NatsServer, eventually, group_failed, score_request

pytestmark = pytest.mark.anyio
SHORT = BusLimits(publish_timeout_s=0.4, attempt_timeout_s=0.2)


class Clock:
    """The clock of a connection's deadlines, which a test sets forward."""

    def __init__(self, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        self._bus = bus
        real = bus._connection.time
        monkeypatch.setattr(bus._connection, "time", lambda: real() + self.ahead_s)

    @asynccontextmanager
    async def ends_after(self, retries: int) -> AsyncIterator[None]:
        """Let the deadline of a publish in this block pass after so many retries."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._advance, self._bus.stats()["bus/publish_retries"] + retries)
            yield
            tasks.cancel_scope.cancel()

    async def _advance(self, retries: float) -> None:
        await eventually(lambda: self._bus.stats()["bus/publish_retries"] >= retries)
        self.ahead_s += self._bus._connection.limits.publish_timeout_s


@pytest.fixture
async def other_bus(bus: Bus, nats_server: NatsServer) -> AsyncGenerator[Bus, None]:
    """A second connection to the same run."""
    async with Bus.connect(nats_server.url, bus.run, name="other", limits=TEST_LIMITS) as other:
        yield other


async def test_sequences_count_up(bus: Bus) -> None:
    assert [await bus.publish(group_failed(number)) for number in range(3)] == [1, 2, 3]


async def test_publishes_may_run_at_the_same_time(bus: Bus) -> None:
    seqs: list[int] = []

    async def publish(number: int) -> None:
        seqs.append(await bus.publish(group_failed(number)))

    async with anyio.create_task_group() as group:
        for number in range(100):
            group.start_soon(publish, number)
    assert sorted(seqs) == list(range(1, 101))


async def test_nothing_acked_is_lost_when_the_server_is_killed(own_bus: Bus, own_nats_server: NatsServer) -> None:
    acked: dict[int, int] = {}

    async def publish(first: int) -> None:
        for number in range(first, first + 100):
            acked[number] = await own_bus.publish(group_failed(number))

    async with anyio.create_task_group() as group:
        for first in range(0, 1600, 100):
            group.start_soon(publish, first)
        for share in (0.25, 0.6):
            await eventually(lambda share=share: len(acked) > 1600 * share)
            await own_nats_server.restart()
    stored: list[int] = []
    async with own_bus.read() as events:
        while events.pending:
            received = await events.next(30)
            assert received is not None
            stored.append(received.message.group_id)
    assert set(stored) == set(range(1600))
    assert len(stored) <= 1600 + 2 * 16  # at most what was under way at each kill came twice
    assert own_bus.stats()["bus/publish_retries"] > 0


async def test_a_publish_during_an_outage_waits_for_its_end(own_bus: Bus, own_nats_server: NatsServer) -> None:
    own_nats_server.kill()
    async with anyio.create_task_group() as group:
        group.start_soon(own_bus.publish, group_failed(1))
        await eventually(lambda: own_bus.stats()["bus/publish_retries"] > 0)
        own_nats_server.spawn()
        await own_nats_server.wait_ready()
    assert (await own_bus.state(Plane.EVENT)).messages == 1


async def test_a_publish_to_no_server_ends(own_bus: Bus, own_nats_server: NatsServer) -> None:
    async with Bus.connect(own_nats_server.url, own_bus.run, name="short", limits=SHORT) as bus:
        own_nats_server.kill()
        with anyio.fail_after(200), pytest.raises(PublishTimeout, match="not confirmed within"):
            await bus.publish(group_failed(1))


async def test_an_answer_that_is_late_does_not_store_twice(own_nats_server: NatsServer) -> None:
    limits = BusLimits(attempt_timeout_s=0.1)
    async with Bus.connect(own_nats_server.url, "run", name="test", limits=limits) as bus:
        await bus.ensure_streams(TEST_STREAMS)
        own_nats_server.pause()
        async with anyio.create_task_group() as group:
            group.start_soon(bus.publish, group_failed(1))
            await eventually(lambda: bus.stats()["bus/publish_retries"] >= 2)
            own_nats_server.resume()
        assert (await bus.state(Plane.EVENT)).messages == 1


async def test_time_in_which_a_publisher_stands_still_does_not_count(own_nats_server: NatsServer) -> None:
    """It was stopped past its deadline, during an attempt whose answer never came."""
    limits = BusLimits(attempt_timeout_s=0.2, publish_timeout_s=3.0)
    async with Bus.connect(own_nats_server.url, "run", name="test", limits=limits) as bus:
        await bus.ensure_streams(TEST_STREAMS)
        own_nats_server.pause()
        async with anyio.create_task_group() as group:
            group.start_soon(bus.publish, group_failed(1))
            await eventually(lambda: bus.stats()["bus/publish_retries"] >= 1)  # the next attempt is under way
            time.sleep(3.5)  # noqa: ASYNC251 - as SIGSTOP would
            own_nats_server.resume()
        assert (await bus.state(Plane.EVENT)).messages == 1


async def test_a_standstill_between_two_attempts_does_not_count(
    own_nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = Connection.pause

    async def stopped(connection: Connection, deadline: float, failures: int, error: BusError) -> bool:
        goes_on = await pause(connection, deadline, failures, error)
        if failures == 0:
            time.sleep(3.5)  # noqa: ASYNC251 - as SIGSTOP would
            own_nats_server.resume()
        return goes_on

    monkeypatch.setattr(Connection, "pause", stopped)
    limits = BusLimits(attempt_timeout_s=0.2, publish_timeout_s=3.0)
    async with Bus.connect(own_nats_server.url, "run", name="test", limits=limits) as bus:
        await bus.ensure_streams(TEST_STREAMS)
        own_nats_server.pause()
        await bus.publish(group_failed(1))
        assert (await bus.state(Plane.EVENT)).messages == 1


async def test_a_run_without_streams_is_unavailable(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Bus.connect(nats_server.url, "no-such-run", name="test", limits=TEST_LIMITS) as bus:
        async with Clock(bus, monkeypatch).ends_after(2):
            with pytest.raises(BusUnavailable, match="no stream accepted it"):
                await bus.publish(group_failed(1))


async def test_a_full_stream_makes_the_writer_wait_and_then_fail(
    bus: Bus, other_bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = PromptsLoaded(data="x" * 6_000, num_prompts=1, num_too_long=0, took_s=0)  # nobody else may fill the stream
    await bus.ensure_streams(msgspec.structs.replace(TEST_STREAMS, event_bytes=10_000))
    await other_bus.publish(large)
    async with Clock(other_bus, monkeypatch).ends_after(3):
        with pytest.raises(StreamFull, match="maximum bytes"):
            await other_bus.publish(large)
    assert other_bus.stats()["bus/publish_retries"] >= 3


async def test_a_last_attempt_without_time_for_an_answer_hides_no_reason(
    bus: Bus, other_bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bus.ensure_streams(msgspec.structs.replace(TEST_STREAMS, event_bytes=10_000))
    large = PromptsLoaded(data="x" * 6_000, num_prompts=1, num_too_long=0, took_s=0)
    await other_bus.publish(large)
    connection, clock = other_bus._connection, Clock(other_bus, monkeypatch)
    request, times = connection.request, list[float]()

    async def answered_once(subject: str, payload: bytes, headers: Headers | None, timeout_s: float) -> RawMessage:
        times.append(timeout_s)
        if len(times) == 1:
            return await request(subject, payload, headers, timeout_s)
        clock.ahead_s += TEST_LIMITS.publish_timeout_s
        raise AttemptTimeout("no answer")

    monkeypatch.setattr(connection, "request", answered_once)
    with pytest.raises(StreamFull, match="maximum bytes"):
        await other_bus.publish(large)
    assert len(times) == 2


async def test_a_full_stream_takes_the_message_once_there_is_room(bus: Bus) -> None:
    await bus.ensure_streams(msgspec.structs.replace(TEST_STREAMS, event_bytes=10_000))
    await bus.publish(group_failed(1, reason="x" * 6_000))
    async with anyio.create_task_group() as group:
        group.start_soon(bus.publish, group_failed(2, reason="x" * 6_000))
        await eventually(lambda: bus.stats()["bus/publish_retries"] > 0)
        await bus.purge(Plane.EVENT, below_seq=2)
    assert (await bus.state(Plane.EVENT)).last_seq == 2


async def test_work_that_is_still_queued_is_not_queued_twice(bus: Bus) -> None:
    await bus.publish(score_request("a"))
    with pytest.raises(AlreadyQueued):
        await bus.publish(score_request("a"))
    await bus.publish(score_request("b"))
    assert (await bus.state(Plane.WORK)).messages == 2


async def test_work_that_was_done_can_be_put_again(bus: Bus) -> None:
    await bus.publish(score_request("a"))
    async with bus.consume(ScoreRequested, durable="score") as deliveries:
        for _ in range(2):
            delivery = await deliveries.next(30)
            assert delivery is not None
            await delivery.ack()
            await eventually(lambda: _is_empty(bus))
            await bus.publish(score_request("a"))


async def _is_empty(bus: Bus) -> bool:
    return (await bus.state(Plane.WORK)).messages == 0


async def test_a_queued_task_whose_answer_was_late_is_ours(own_nats_server: NatsServer) -> None:
    limits = msgspec.structs.replace(TEST_LIMITS, attempt_timeout_s=0.1)
    async with Bus.connect(own_nats_server.url, "run", name="test", limits=limits) as bus:
        # no memory of ids: the retry is refused for the queued first attempt, and recognised by its id
        await bus.ensure_streams(msgspec.structs.replace(TEST_STREAMS, duplicate_window_s=0.1))
        own_nats_server.pause()
        async with anyio.create_task_group() as group:
            group.start_soon(bus.publish, score_request("a"))
            await eventually(lambda: bus.stats()["bus/publish_retries"] >= 2)
            own_nats_server.resume()
        assert (await bus.state(Plane.WORK)).messages == 1


async def test_a_socket_that_was_closed_this_moment_costs_another_attempt(
    own_bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = own_bus._connection._client
    flush, failures = client._flush_pending, [RuntimeError("the handler is closed")] * 3

    async def flush_pending(*args: object, **options: object) -> None:
        if failures:
            raise failures.pop()
        await flush(*args, **options)

    monkeypatch.setattr(client, "_flush_pending", flush_pending)
    with anyio.fail_after(200):
        assert await own_bus.publish(group_failed(1)) == 1
    assert not failures
