"""Calls to one instance, and small answers to an inbox."""

import anyio
import msgspec
import pytest

from messages import (
    ActorDescribed,
    CallFailed,
    DescribeRequested,
    Message,
    MessageDeadLettered,
    ScoresGiven,
    StatsGiven,
    StatsRequested,
    decode,
    encode,
)
from messages.codec import JSON
from messages.subjects import call_subject
from runtime.bus.bus import Bus
from runtime.bus.errors import CallRefused, CallTimeout, MessageTooLarge, NotServed
from runtime.bus.limits import BusLimits
from tests.fixtures.nats import TEST_STREAMS, NatsServer, eventually

pytestmark = pytest.mark.anyio


async def give_stats(_request: StatsRequested) -> StatsGiven:
    return StatsGiven(instance="reward.0", uptime_s=1.0, stats={"num": 2.0})


async def test_a_call_is_answered_by_the_instance_that_was_asked(bus: Bus) -> None:
    async with bus.serve({StatsRequested: give_stats}, instance="reward.0"):
        answer = await bus.call("reward.0", StatsRequested(), StatsGiven, timeout_s=30)
        assert answer.stats == {"num": 2.0}
        with pytest.raises(NotServed):
            await bus.call("reward.1", StatsRequested(), timeout_s=30)


async def test_after_the_block_nobody_answers(bus: Bus) -> None:
    async with bus.serve({StatsRequested: give_stats}, instance="reward.0"):
        pass
    with pytest.raises(NotServed):
        await bus.call("reward.0", StatsRequested(), timeout_s=30)


async def test_a_silent_instance_costs_the_deadline(bus: Bus) -> None:
    async def hang(_request: Message) -> Message:
        await anyio.sleep_forever()
        raise AssertionError

    async with bus.serve({StatsRequested: hang}, instance="reward.0"):
        with anyio.fail_after(200), pytest.raises(CallTimeout):
            await bus.call("reward.0", StatsRequested(), timeout_s=0.2)


async def test_a_handler_that_raises_answers_with_its_error(bus: Bus) -> None:
    async def fail(_request: Message) -> Message:
        raise RuntimeError("no weights yet")

    async with bus.serve({StatsRequested: fail}, instance="reward.0"):
        with pytest.raises(CallRefused, match="no weights yet"):
            await bus.call("reward.0", StatsRequested(), timeout_s=30)


async def test_an_answer_of_another_type_is_refused(bus: Bus) -> None:
    async with bus.serve({StatsRequested: give_stats}, instance="reward.0"):
        with pytest.raises(CallRefused, match="expected ActorDescribed"):
            await bus.call("reward.0", StatsRequested(), ActorDescribed, timeout_s=30)


@pytest.mark.parametrize(
    ("payload", "headers"),
    [
        (b"\xc1", {"Physarum-Type": "stats_requested", "Content-Type": "application/msgpack"}),
        (b"{}", {"Physarum-Type": "describe_requested"}),
        (b"{}", {}),
    ],
)
async def test_a_bad_call_gets_an_error_and_is_set_aside(bus: Bus, payload: bytes, headers: dict[str, str]) -> None:
    subject = call_subject(bus.run, "reward.0", StatsRequested.topic)
    async with bus.serve({StatsRequested: give_stats}, instance="reward.0"), bus.read(MessageDeadLettered) as events:
        raw = await bus._connection.request(subject, payload, dict(headers), 10)
        assert isinstance(decode(raw.data, raw.headers), CallFailed)
        told = await events.next(30)
        assert told is not None
        assert told.message.subject == subject


async def test_who_asks_in_json_is_answered_in_json(bus: Bus) -> None:
    async with bus.serve({StatsRequested: give_stats}, instance="reward.0"):
        asked = encode(StatsRequested(), content_type=JSON)
        subject = call_subject(bus.run, "reward.0", StatsRequested.topic)
        raw = await bus._connection.request(subject, asked.payload, asked.headers, 10)
        assert msgspec.json.decode(raw.data)["stats"] == {"num": 2.0}


async def test_an_answer_that_is_too_large_is_an_error_for_the_caller(bus: Bus) -> None:
    async def much(_request: Message) -> Message:
        return CallFailed(reason="x" * 9_000_000)

    async with bus.serve({StatsRequested: much}, instance="reward.0"):
        with pytest.raises(CallRefused, match="bytes with headers"):
            await bus.call("reward.0", StatsRequested(), timeout_s=30)


async def test_calls_beyond_the_bound_are_refused(nats_server: NatsServer, run_name: str) -> None:
    limits = BusLimits(max_calls=2)
    release = anyio.Event()
    outcomes: list[str] = []

    async def slow(_request: Message) -> Message:
        await release.wait()
        return await give_stats(StatsRequested())

    async with Bus.connect(nats_server.url, run_name, name="test", limits=limits) as bus:
        await bus.ensure_streams(TEST_STREAMS)

        async def ask() -> None:
            try:
                await bus.call("reward.0", StatsRequested(), timeout_s=30)
                outcomes.append("answered")
            except CallRefused as error:
                outcomes.append("busy" if "busy" in str(error) else repr(error))
                release.set()

        async with bus.serve({StatsRequested: slow}, instance="reward.0"), anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(ask)
    assert sorted(outcomes) == ["answered", "answered", "busy"]


async def test_a_call_that_is_too_large_is_not_sent(bus: Bus) -> None:
    with pytest.raises(MessageTooLarge):
        await bus.call("reward.0", CallFailed(reason="x" * 9_000_000), timeout_s=1)


async def test_small_answers_reach_an_inbox_in_order(bus: Bus) -> None:
    async with bus.inbox(ScoresGiven) as inbox:
        for number in range(3):
            await bus.notify(ScoresGiven(request_id=str(number), scores=()), to=inbox.subject)
        assert [(await anext(inbox)).request_id for _ in range(3)] == ["0", "1", "2"]
        assert await inbox.next(0.05) is None


async def test_a_full_inbox_drops_and_counts(bus: Bus) -> None:
    async with bus.inbox(ScoresGiven, bound=2) as inbox:
        for number in range(5):
            await bus.notify(ScoresGiven(request_id=str(number), scores=()), to=inbox.subject)
        await eventually(lambda: bus.stats()["bus/slow_consumer_drops"] == 3)
        assert [(await anext(inbox)).request_id for _ in range(2)] == ["0", "1"]
        assert await inbox.next(0.05) is None


async def test_what_an_inbox_cannot_use_is_set_aside(bus: Bus) -> None:
    async with bus.inbox(ScoresGiven) as inbox, bus.read(MessageDeadLettered) as events:
        await bus._connection.send(inbox.subject, b"\xc1", {"Physarum-Type": "scores_given"})
        await bus.notify(DescribeRequested(), to=inbox.subject)
        await bus.notify(ScoresGiven(request_id="good", scores=()), to=inbox.subject)
        assert (await anext(inbox)).request_id == "good"
        assert await events.next(30) is not None
        assert await events.next(30) is not None
