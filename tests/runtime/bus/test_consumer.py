"""Work: every delivery ends once, a lost worker costs a redelivery, poison is set aside."""

import time
from collections import Counter
from typing import Any

import anyio
import pytest

from messages import (
    DeadLetter,
    GroupFailed,
    Message,
    MessageDeadLettered,
    Plane,
    ScoreRequested,
    SegmentsPublished,
    decode,
)
from messages.subjects import stream_of, subject_of
from runtime.bus.bus import Bus
from runtime.bus.consumer import BUSY_WINDOW_S, MAX_PREFETCH, Deliveries, Delivery, Throughput
from runtime.bus.nats import consumers
from runtime.bus.nats.connection import Connection
from runtime.bus.nats.store import API, ApiError, ApiFailed, api_call
from tests.fixtures.nats import TEST_LIMITS, NatsServer, eventually, group_failed, score_request

pytestmark = pytest.mark.anyio


async def taken(deliveries: Deliveries[ScoreRequested], timeout_s: float = 30) -> Delivery[ScoreRequested]:
    delivery = await deliveries.next(timeout_s)
    assert delivery is not None
    return delivery


async def work_is_done(bus: Bus) -> bool:
    return (await bus.state(Plane.WORK)).messages == 0


async def dead_letter(bus: Bus, seq: int = 1) -> Message:
    stream = stream_of(bus.run, Plane.DEAD)
    raw = await bus._connection.retry(f"{API}.DIRECT.GET.{stream}", b'{"seq":%d}' % seq, None, 5)
    return decode(raw.data, raw.headers)


async def test_an_acked_delivery_is_done(bus: Bus) -> None:
    await bus.publish(score_request("a"))
    async with bus.consume(ScoreRequested, durable="score") as deliveries:
        delivery = await taken(deliveries)
        assert (delivery.message, delivery.num_delivered, delivery.seq) == (score_request("a"), 1, 1)
        await delivery.ack()
        await eventually(lambda: work_is_done(bus))


async def test_next_gives_up_after_its_timeout(bus: Bus) -> None:
    async with bus.consume(ScoreRequested, durable="score") as deliveries:
        begun = time.monotonic()
        assert await deliveries.next(0.1) is None
        assert time.monotonic() - begun > 0.09


async def test_work_that_comes_later_wakes_who_waits(bus: Bus) -> None:
    async with bus.consume(ScoreRequested, durable="score") as deliveries, anyio.create_task_group() as group:

        async def take() -> None:
            delivery = await anext(deliveries)
            await delivery.ack()

        for _ in range(3):
            group.start_soon(take)
        for name in "abc":
            await bus.publish(score_request(name))


async def test_redeliver_gives_it_back_now_or_later(bus: Bus) -> None:
    await bus.publish(score_request("a"))
    async with bus.consume(ScoreRequested, durable="score") as deliveries:
        await (await taken(deliveries)).redeliver()
        second = await taken(deliveries)
        assert second.num_delivered == 2
        begun = time.monotonic()
        await second.redeliver(delay_s=0.3)
        assert (await taken(deliveries)).num_delivered == 3
        assert time.monotonic() - begun > 0.25


async def test_a_delivery_ends_once(bus: Bus) -> None:
    await bus.publish(score_request("a"))
    async with bus.consume(ScoreRequested, durable="score") as deliveries:
        delivery = await taken(deliveries)
        await delivery.ack()
        with pytest.raises(ValueError, match="has already ended"):
            await delivery.redeliver()


async def test_what_a_lost_worker_held_goes_to_another(bus: Bus, nats_server: NatsServer) -> None:
    await bus.publish(score_request("a"))
    async with Bus.connect(nats_server.url, bus.run, name="lost", limits=TEST_LIMITS) as lost:
        async with lost.consume(ScoreRequested, durable="score", ack_wait_s=0.5) as deliveries:
            await taken(deliveries)
    async with bus.consume(ScoreRequested, durable="score", ack_wait_s=0.5) as deliveries:
        assert (await taken(deliveries)).num_delivered == 2


async def test_a_heartbeat_keeps_a_delivery(bus: Bus) -> None:
    """A machine that stops for an ack wait costs a redelivery of both; without heartbeats both come equally often."""
    for name in ("kept", "lost"):
        await bus.publish(score_request(name))
    came: Counter[str] = Counter()
    async with bus.consume(ScoreRequested, durable="score", ack_wait_s=0.2) as deliveries:
        delivery = await taken(deliveries)
        assert delivery.message.request_id == "kept"
        async with delivery.heartbeat():
            while came["lost"] < came["kept"] + 5:
                came[(await taken(deliveries)).message.request_id] += 1
        while (await taken(deliveries)).message.request_id != "kept":  # until the heart's stop is noticed
            pass


async def test_no_more_than_max_ack_pending_are_held(bus: Bus) -> None:
    for name in "abc":
        await bus.publish(score_request(name))
    async with bus.consume(ScoreRequested, durable="score", max_ack_pending=2) as deliveries:
        first, _ = await taken(deliveries), await taken(deliveries)
        assert await deliveries.next(0.2) is None
        await first.ack()
        assert (await taken(deliveries)).message.request_id == "c"


async def test_a_worker_that_asks_for_nothing_gets_nothing(bus: Bus, nats_server: NatsServer) -> None:
    for name in "ab":
        await bus.publish(score_request(name))
    async with (
        Bus.connect(nats_server.url, bus.run, name="slow", limits=TEST_LIMITS) as slow_bus,
        slow_bus.consume(ScoreRequested, durable="score") as slow,
        bus.consume(ScoreRequested, durable="score") as fast,
    ):
        assert (await taken(slow)).message.request_id == "a"
        assert (await taken(fast)).message.request_id == "b"


async def test_what_was_fetched_ahead_is_given_back_at_the_end(bus: Bus) -> None:
    for name in "abcd":
        await bus.publish(score_request(name))
    async with bus.consume(ScoreRequested, durable="score", prefetch=4) as deliveries:
        assert (await taken(deliveries)).message.request_id == "a"
        await eventually(lambda: len(deliveries._pull.buffered) == 3)
    async with bus.consume(ScoreRequested, durable="score") as deliveries:
        names = [(await taken(deliveries)).message.request_id for _ in range(3)]
    assert sorted(names) == ["b", "c", "d"]


async def test_how_much_is_fetched_ahead_may_change_with_each_delivery(bus: Bus) -> None:
    for name in "abcdef":
        await bus.publish(score_request(name))
    async with bus.consume(ScoreRequested, durable="score") as deliveries:
        for prefetch, left in ((3, 2), (2, 1), (1, 0), (0, 0)):
            deliveries.prefetch = prefetch
            await (await taken(deliveries)).ack()
            await eventually(lambda left=left: len(deliveries._pull.buffered) >= left)
        async with bus.consume(ScoreRequested, durable="score") as other:
            names = [(await taken(other)).message.request_id for _ in range(2)]
    assert names == ["e", "f"]


async def test_a_quick_worker_fetches_ahead_by_its_rate_and_a_slow_one_holds_nothing(bus: Bus) -> None:
    for number in range(30):
        await bus.publish(score_request(f"n{number}"))
    async with bus.consume(ScoreRequested, durable="score", prefetch_by_rate=True) as deliveries:
        slow = [await taken(deliveries) for _ in range(16)]
        assert not deliveries._pull.buffered
        assert deliveries._pull._ahead() == 0
        for delivery in slow:
            await delivery.ack()
        await (await taken(deliveries)).ack()
        assert deliveries._pull._ahead() >= 3  # sixteen ended in one second, or in a few
        await eventually(lambda: len(deliveries._pull.buffered) >= 2)


def test_the_throughput_is_that_of_the_busiest_of_the_last_seconds() -> None:
    throughput = Throughput()
    assert throughput.in_busiest_second(100.0) == 0
    for moment in (100.1, 100.2, 100.9, 101.5):
        throughput.note_end(moment)
    assert throughput.in_busiest_second(102.0) == 3
    assert throughput.in_busiest_second(101.0 + BUSY_WINDOW_S) == 1
    assert throughput.in_busiest_second(102.0 + BUSY_WINDOW_S) == 0
    for _ in range(MAX_PREFETCH + 1):
        throughput.note_end(200.0)
    assert throughput.in_busiest_second(200.5) == MAX_PREFETCH


async def test_what_was_fetched_ahead_and_is_not_taken_goes_to_another(bus: Bus, nats_server: NatsServer) -> None:
    for name in "abc":
        await bus.publish(score_request(name))
    async with (
        Bus.connect(nats_server.url, bus.run, name="stuck", limits=TEST_LIMITS) as stuck_bus,
        stuck_bus.consume(ScoreRequested, durable="score", ack_wait_s=0.3, prefetch=3) as stuck,
    ):
        delivery = await taken(stuck)
        async with delivery.heartbeat(), bus.consume(ScoreRequested, durable="score", ack_wait_s=0.3) as other:
            names = set[str]()
            while not names >= {"b", "c"}:  # one that is not taken in time comes again
                names.add((await taken(other)).message.request_id)


async def test_what_was_fetched_ahead_is_kept_where_the_worker_wants_that(bus: Bus) -> None:
    for name in "abc":
        await bus.publish(score_request(name))
    async with bus.consume(
        ScoreRequested, durable="score", ack_wait_s=0.3, prefetch=3, keeps_prefetched=True
    ) as deliveries:
        first = await taken(deliveries)
        async with first.heartbeat():
            await eventually(lambda: len(deliveries._pull.buffered) == 2)
            await bus.publish(score_request("lost"))
            came: Counter[str] = Counter()
            async with bus.consume(ScoreRequested, durable="score", ack_wait_s=0.3) as other:
                while came["lost"] < came.total() - came["lost"] + 4:  # for three ack waits, it alone comes again
                    came[(await taken(other)).message.request_id] += 1
            others = [await taken(deliveries) for _ in range(2)]
    assert [(delivery.message.request_id, delivery.num_delivered) for delivery in others] == [("b", 1), ("c", 1)]


async def test_a_rejected_delivery_is_kept_as_a_dead_letter(bus: Bus) -> None:
    await bus.publish(score_request("a"))
    async with bus.consume(ScoreRequested, durable="score") as deliveries, bus.read(MessageDeadLettered) as events:
        await (await taken(deliveries)).reject("poison")
        told = await events.next(30)
        assert told is not None
        assert (told.message.reason, told.message.dead_seq) == ("poison", 1)
        await eventually(lambda: work_is_done(bus))
    letter = await dead_letter(bus)
    assert isinstance(letter, DeadLetter)
    assert (letter.subject, letter.origin) == (subject_of(bus.run, score_request("a")), "work.1")
    assert decode(letter.payload, letter.headers) == score_request("a")


@pytest.mark.parametrize(
    ("payload", "headers", "reason"),
    [
        (b"\xc1", {"Physarum-Type": "score_requested", "Content-Type": "application/msgpack"}, "score_requested"),
        (b"{}", {}, "no Physarum-Type header"),
        (b"{}", {"Physarum-Type": "no_such_type"}, "unknown message type"),
        (b"{}", {"Physarum-Type": "score_requested", "Content-Type": "text/plain"}, "unknown content type"),
        (b"{}", {"Physarum-Type": "describe_requested"}, "got DescribeRequested, expected ScoreRequested"),
    ],
)
async def test_what_cannot_be_used_is_set_aside_and_the_work_goes_on(
    bus: Bus, payload: bytes, headers: dict[str, str], reason: str
) -> None:
    await bus._store.put(subject_of(bus.run, score_request("bad")), payload, dict(headers))
    await bus.publish(score_request("good"))
    async with bus.consume(ScoreRequested, durable="score") as deliveries:
        delivery = await taken(deliveries)
        assert delivery.message == score_request("good")
        await delivery.ack()
        await eventually(lambda: work_is_done(bus))
    letter = await dead_letter(bus)
    assert isinstance(letter, DeadLetter)
    assert reason in letter.reason
    assert letter.payload == payload


async def test_work_goes_on_over_a_killed_server(own_bus: Bus, own_nats_server: NatsServer) -> None:
    """The server stores acks a little after it received them. A lost one costs one redelivery, a stored one none."""
    names = [f"n{number}" for number in range(200)]
    for name in names:
        await own_bus.publish(score_request(name))
    done: list[str] = []
    some, more, are_stored = anyio.Event(), anyio.Event(), anyio.Event()

    async def work(deliveries: Deliveries[ScoreRequested]) -> None:
        async for delivery in deliveries:
            done.append(delivery.message.request_id)
            await delivery.ack()
            if len(done) >= 50:
                some.set()
                await are_stored.wait()
            if len(done) >= 100:
                more.set()

    async def has_stored_all_acks() -> bool:
        return (await own_bus.state(Plane.WORK)).messages == len(names) - len(done)

    async with own_bus.consume(ScoreRequested, durable="score", ack_wait_s=5.0) as deliveries:
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(work, deliveries)
            await some.wait()
            await eventually(has_stored_all_acks)
            stored = set(done)
            are_stored.set()
            await more.wait()
            await own_nats_server.restart()
            before = set(done)
            await eventually(lambda: work_is_done(own_bus))
            group.cancel_scope.cancel()
    assert set(done) == set(names)
    redone = {name: count for name, count in Counter(done).items() if count > 1}
    assert redone.keys() <= before - stored
    assert set(redone.values()) <= {2}


async def test_an_event_consumer_goes_on_where_it_stopped(bus: Bus) -> None:
    for number in range(4):
        await bus.publish(group_failed(number))
    for number in range(2):
        async with bus.consume(GroupFailed, durable="filter") as deliveries:
            delivery = await deliveries.next(30)
            assert delivery is not None
            assert (delivery.message, delivery.seq) == (group_failed(number), number + 1)
            await delivery.ack()
    assert (await bus.state(Plane.EVENT)).messages == 4  # consuming an event does not remove it


async def test_a_consumer_made_again_after_its_deletion_goes_on(bus: Bus) -> None:
    async with bus.consume(ScoreRequested, durable="score") as deliveries, anyio.create_task_group() as group:

        async def take() -> None:
            await (await taken(deliveries)).ack()

        group.start_soon(take)
        await eventually(lambda: deliveries._pull._num_waiting > 0)
        await api_call(bus._connection, f"CONSUMER.DELETE.{stream_of(bus.run, Plane.WORK)}.score")
        await bus.publish(score_request("a"))


async def test_only_work_and_events_are_consumed(bus: Bus) -> None:
    with pytest.raises(ValueError, match="one plane, work or event"):
        async with bus.consume(SegmentsPublished, durable="x"):
            pass
    with pytest.raises(ValueError, match="one plane"):
        async with bus.consume(ScoreRequested, GroupFailed, durable="x"):
            pass


async def test_a_consumer_whose_namesake_is_still_being_deleted_is_made_after_it(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [ApiError(code=400, err_code=10149, description="consumer does not exist")]

    async def refused_once(connection: Connection, api: str, body: Any = None) -> Any:
        if "CONSUMER.CREATE" in api and refusals:
            raise ApiFailed(api, refusals.pop())
        return await api_call(connection, api, body)

    monkeypatch.setattr(consumers, "api_call", refused_once)
    await bus.publish(score_request("a"))
    async with bus.consume(ScoreRequested, durable="score") as deliveries:
        await (await taken(deliveries)).ack()
    assert not refusals
