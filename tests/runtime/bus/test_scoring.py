"""Queues of score requests and their bounds, and the inbox for the answers, on the real server."""

import time
from typing import Any

import anyio
import msgspec
import pytest

from messages import MessageDeadLettered, Plane, Score, ScoreRequested, ScoresGiven, encode
from messages.subjects import grader_token, scores_subject, stream_of
from runtime.bus.bus import Bus
from runtime.bus.errors import AlreadyQueued
from runtime.bus.nats.connection import STATUS, RawMessage
from runtime.bus.nats.consumers import durable_names
from runtime.bus.nats.store import api_call
from runtime.bus.scoring import MAX_BATCH, MAX_EXPIRES_S, OLD_DURABLE, REFUSALS_KEPT
from tests.fixtures.nats import eventually

pytestmark = pytest.mark.anyio

PLUGIN = "my/file.py:function"


def request(name: str, grader: str = "math", *, own: bool = False) -> ScoreRequested:
    return ScoreRequested(
        request_id=name, reply_to="phy.r.scores.x.y", group_id=1, attempt=1, rm_type=grader, own=own, items=()
    )


async def num_queued(bus: Bus) -> int:
    return (await bus.state(Plane.WORK)).messages


async def test_a_request_goes_to_the_queue_of_its_grader(bus: Bus) -> None:
    await bus.ensure_score_queues(["math", PLUGIN])
    sent = [request("a"), request("b", PLUGIN), request("c", own=True), request("d", "f1", own=True)]
    for message in sent:
        await bus.publish(message)
    with pytest.raises(AlreadyQueued):
        await bus.publish(sent[0])
    for token, names in (("math", ["a"]), (grader_token(PLUGIN), ["b"]), ("_own", ["c", "d"])):
        async with bus.consume_scoring(token) as deliveries:
            for name in names:
                delivery = await anext(deliveries)
                assert delivery.message.request_id == name
                await delivery.ack()
            assert await deliveries.next(0.1) is None
    await eventually(lambda: no_requests(bus))


async def no_requests(bus: Bus) -> bool:
    return await num_queued(bus) == 0


async def test_a_start_makes_the_queues_of_its_graders_alone_and_empties_them(bus: Bus) -> None:
    """An earlier version had one queue of all graders, whose filter overlaps with every other."""
    stream = stream_of(bus.run, Plane.WORK)
    async with bus.consume(ScoreRequested, durable=OLD_DURABLE):
        pass
    await bus.ensure_score_queues([])
    async with bus.consume_scoring("gone"):
        pass
    old = encode(request("old"))
    await bus._store.put(f"phy.{bus.run}.work.score.old", old.payload, old.headers)
    await bus.publish(request("a", "gone"))
    await bus.ensure_score_queues(["math", PLUGIN])
    expected = {"score-math", f"score-{grader_token(PLUGIN)}", "score-_own"}
    assert set(await durable_names(bus._connection, stream)) == expected
    assert await num_queued(bus) == 0
    await bus.publish(request("b"))
    await bus.ensure_score_queues(["math", PLUGIN])  # again, as every start does
    assert set(await durable_names(bus._connection, stream)) == expected


async def test_other_work_stays_when_the_queues_are_emptied(bus: Bus) -> None:
    await bus._store.put(f"phy.{bus.run}.work.rollout.1.1", b"x", {})
    await bus.publish(request("a"))
    await bus.ensure_score_queues(["math"])
    assert await num_queued(bus) == 1


async def pull(bus: Bus, **body: Any) -> RawMessage:
    """The first answer to a pull request."""
    got: list[RawMessage] = []
    inbox = bus._connection.new_inbox()
    listener = await bus._connection.subscribe(inbox, got.append)
    subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream_of(bus.run, Plane.WORK)}.score-math"
    await bus._connection.send(subject, msgspec.json.encode(body), reply=inbox)
    await eventually(lambda: bool(got))
    await listener.stop()
    return got[0]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"batch": MAX_BATCH + 1, "expires": 10**9}, f"Exceeded MaxRequestBatch of {MAX_BATCH}"),
        ({"batch": 1, "expires": int((MAX_EXPIRES_S + 1) * 1e9)}, "Exceeded MaxRequestExpires of 30s"),
    ],
)
async def test_the_server_refuses_a_pull_over_the_bounds(bus: Bus, body: dict[str, int], reason: str) -> None:
    await bus.ensure_score_queues(["math"])
    for _ in range(2):
        await bus.publish(request(str(time.monotonic_ns())))
    answer = await pull(bus, **body)
    headers = answer.headers or {}
    assert (headers[STATUS], headers["Description"]) == ("409", reason)
    allowed = await pull(bus, batch=MAX_BATCH, expires=int(MAX_EXPIRES_S * 1e9))
    assert allowed.reply.startswith("$JS.ACK.")


async def test_a_pull_for_more_tasks_than_the_bound_is_split(bus: Bus) -> None:
    await bus.ensure_score_queues(["math"])
    ended = 0

    async def work() -> None:
        nonlocal ended
        delivery = await anext(deliveries)
        await delivery.ack()
        ended += 1

    async with bus.consume_scoring("math") as deliveries, anyio.create_task_group() as tasks:
        for _ in range(MAX_BATCH + 50):
            tasks.start_soon(work)
        await anyio.wait_all_tasks_blocked()
        for number in range(MAX_BATCH + 50):
            await bus.publish(request(str(number)))
    assert ended == MAX_BATCH + 50


async def test_the_consumers_of_graders_have_their_bounds(bus: Bus) -> None:
    await bus.ensure_score_queues(["math"])
    info = await api_call(bus._connection, f"CONSUMER.INFO.{stream_of(bus.run, Plane.WORK)}.score-math")
    bounds = {key: info["config"][key] for key in ("max_batch", "max_expires", "max_waiting", "max_ack_pending")}
    assert bounds == {"max_batch": 256, "max_expires": 30 * 10**9, "max_waiting": 512, "max_ack_pending": 4096}


async def test_an_answer_counts_on_the_subject_of_its_grader_alone(bus: Bus) -> None:
    given = ScoresGiven(request_id="a", scores=(Score(index=0, reward=0.5),))
    async with bus.score_inbox(lambda _: "math") as inbox:
        await bus.notify(given, to=inbox.reply_to("code"))
        await bus.notify(given, to=inbox.reply_to("_own"))
        await bus.notify(given, to=inbox.reply_to("math"))
        assert await inbox.next(30) == given
        assert await inbox.next(0.2) is None
        assert bus.stats()["bus/answers_refused"] == 2
    async with bus.read(MessageDeadLettered) as events:
        reasons = [received.message.reason async for received in events.so_far()]
    assert reasons == ["answers a score request that went to the grader math"] * 2


async def test_an_answer_to_a_request_that_ended_is_no_dead_letter(bus: Bus) -> None:
    given = ScoresGiven(request_id="a", scores=())
    async with bus.score_inbox(lambda _: None) as inbox:
        await bus.notify(given, to=inbox.reply_to("code"))
        assert await inbox.next(30) == given
    assert (await bus.state(Plane.DEAD)).messages == 0


async def test_of_many_refused_answers_a_few_are_dead_lettered(bus: Bus) -> None:
    """An external worker may send any number, and each dead letter is an event of the log."""
    given = ScoresGiven(request_id="a", scores=())
    async with bus.score_inbox(lambda _: "math") as inbox:
        for _ in range(1000):
            await bus._connection.send(inbox.reply_to("math"), b"garbage")
        await bus.notify(given, to=inbox.reply_to("math"))
        assert await inbox.next(30) == given
        assert bus.stats()["bus/answers_refused"] == 1000
    assert (await bus.state(Plane.DEAD)).messages == REFUSALS_KEPT


@pytest.mark.parametrize("subject", ["phy.x.scores.math.y", "phy.{}.scores.math", "phy.{}.scores.math.x.y"])
async def test_scores_are_sent_to_no_other_subject(bus: Bus, subject: str) -> None:
    with pytest.raises(Exception, match="is not an inbox of run"):
        await bus.notify(ScoresGiven(request_id="a", scores=()), to=subject.format(bus.run))
    assert bus.takes_scores(scores_subject(bus.run, "math", "x"), "math")
