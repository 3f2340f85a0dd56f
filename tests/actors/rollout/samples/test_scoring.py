"""A scorer and reward workers on the real bus."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from actors.rollout.samples.scoring import MAX_LOSSES, PATIENCE_S, Scorer
from actors.rollout.samples.tasks import training_task
from messages import Plane, SampleStatus, Score, ScoreItem, ScoreRequested, ScoreRequestsLost, ScoresGiven
from runtime.bus.bus import Bus
from runtime.bus.consumer import Deliveries, Delivery
from tests.fixtures.nats import NatsServer, eventually
from tests.support.rollout import task

pytestmark = pytest.mark.anyio

TASK = training_task(task(7), "lease", group_rm=False)
ITEM = ScoreItem(index=0, prompt="p", response="1", status=SampleStatus.COMPLETED, response_len=1)


REPEAT_S = 0.1


@asynccontextmanager
async def asked(bus: Bus, scores: list[Score], **options: float) -> AsyncGenerator[Deliveries[ScoreRequested]]:
    """One request under way, and the worker's side of it; its answer is added to `scores`."""
    scorer = Scorer(bus, timeout_s=10.0, max_tries=1, repeat_s=REPEAT_S, **options)

    async def ask() -> None:
        answer: Sequence[Score] = await scorer.score(TASK, [ITEM])
        scores.extend(answer)

    async with anyio.create_task_group() as group, bus.consume(ScoreRequested, durable="reward") as deliveries:
        await group.start(scorer.run)
        group.start_soon(ask)
        yield deliveries
        group.cancel_scope.cancel()


async def answer(bus: Bus, delivery: Delivery[ScoreRequested]) -> None:
    scores = (Score(index=0, reward=0.5),)
    await bus.notify(ScoresGiven(request_id=delivery.message.request_id, scores=scores), to=delivery.message.reply_to)
    await delivery.ack()


async def test_a_lost_answer_is_asked_for_again(bus: Bus) -> None:
    scores: list[Score] = []
    async with asked(bus, scores) as deliveries:
        first = await anext(deliveries)
        await first.ack()  # its answer was lost
        second = await anext(deliveries)
        assert second.message == first.message
        await answer(bus, second)
        await eventually(lambda: [score.reward for score in scores] == [0.5])


async def test_a_request_that_a_worker_has_is_put_no_second_time(bus: Bus) -> None:
    scores: list[Score] = []
    async with asked(bus, scores) as deliveries:
        delivery = await anext(deliveries)
        assert await deliveries.next(4 * REPEAT_S) is None
        await answer(bus, delivery)
        await eventually(lambda: bool(scores))


async def test_a_request_says_how_long_its_caller_waits_and_not_until_when(bus: Bus) -> None:
    """A deadline of one machine's clock was late on another: no score was accepted, and the run stood still."""
    scores: list[Score] = []
    async with asked(bus, scores) as deliveries:
        delivery = await anext(deliveries)
        assert delivery.message.timeout_s == 10.0 + PATIENCE_S
        await answer(bus, delivery)
        await eventually(lambda: bool(scores))


@asynccontextmanager
async def dropping(bus: Bus, *names: str, num: int = MAX_LOSSES, **options: Any) -> AsyncGenerator[Scorer]:
    """A scorer of these graders, and a worker of the first that acknowledges its first `num` requests."""
    scorer = Scorer(bus, timeout_s=10.0, max_tries=1, repeat_s=REPEAT_S, graders=names, **options)

    async def drop() -> None:
        async with bus.consume_scoring(names[0]) as deliveries:
            for _ in range(num):
                await (await anext(deliveries)).ack()

    await bus.ensure_score_queues(names)
    async with anyio.create_task_group() as group:
        await group.start(scorer.run)
        group.start_soon(drop)
        yield scorer
        group.cancel_scope.cancel()


async def test_a_request_that_was_lost_three_times_goes_to_the_own_actors_of_the_run(bus: Bus) -> None:
    async with dropping(bus, "exact_match") as scorer, bus.consume_scoring("_own") as deliveries:
        async with anyio.create_task_group() as group:
            scores: list[Score] = []

            async def ask() -> None:
                scores.extend(await scorer.score(TASK, [ITEM]))

            group.start_soon(ask)
            delivery = await anext(deliveries)
            assert (delivery.message.rm_type, delivery.message.own) == ("exact_match", True)
            await answer(bus, delivery)
        assert [score.reward for score in scores] == [0.5]

    async def nothing_left() -> bool:
        return (await bus.state(Plane.WORK)).messages == 0

    await eventually(nothing_left)


async def test_the_graders_that_rollout_waits_for_are_named(bus: Bus) -> None:
    async with dropping(bus, "exact_match", num=0) as scorer, anyio.create_task_group() as group:
        assert scorer.waits_for() == ""
        group.start_soon(scorer.score, TASK, [ITEM])
        group.start_soon(scorer.score, TASK, [ITEM])
        await anyio.wait_all_tasks_blocked()
        assert scorer.waits_for() == "answers to 2 score requests (exact_match)"
        group.cancel_scope.cancel()


async def test_samples_fail_by_cause_where_only_external_workers_grade(bus: Bus) -> None:
    async with dropping(bus, "exact_match", external=["exact_match"]) as scorer:
        (score,) = await scorer.score(TASK, [ITEM])
        assert score.error == "score request acknowledged without an answer, 3 times"
        assert (await bus.state(Plane.WORK)).messages == 0


async def test_a_grader_that_drops_requests_is_reported_from_the_fifth_on(bus: Bus) -> None:
    asked: list[str] = []

    def clients_of(grader: str) -> tuple[str, ...]:
        asked.append(grader)
        return ("alice", "bob")

    options = {"external": ["exact_match"], "clients_of": clients_of, "num": 7 * MAX_LOSSES}
    async with dropping(bus, "exact_match", **options) as scorer, anyio.create_task_group() as group:
        for _ in range(7):
            group.start_soon(scorer.score, TASK, [ITEM])
    async with bus.read(ScoreRequestsLost) as events:
        lost = [received.message async for received in events.so_far()]
    assert [event.num_lost for event in lost] == [5, 10, 20]
    assert {(event.grader, event.credentials) for event in lost} == {("exact_match", ("alice", "bob"))}
    assert asked == ["exact_match"] * 3


async def test_answers_lost_with_the_connection_are_not_held_against_the_grader(
    own_bus: Bus, own_nats_server: NatsServer
) -> None:
    """The connection is gone while the answer is sent, here for a request that never got one."""
    async with dropping(own_bus, "exact_match", external=["exact_match"], num=1) as scorer:
        scorer._repeat_s = 1.0
        async with anyio.create_task_group() as group, own_bus.consume_scoring("exact_match") as deliveries:
            group.start_soon(scorer.score, TASK, [ITEM])

            async def is_dropped() -> bool:
                state = await own_bus.state(Plane.WORK)
                return (state.messages, state.last_seq) == (0, 1)

            await eventually(is_dropped)
            await own_nats_server.restart()
            await answer(own_bus, await anext(deliveries))
        assert not scorer._num_lost


async def test_a_request_that_was_given_up_leaves_the_queue(bus: Bus) -> None:
    scores: list[Score] = []
    async with asked(bus, scores, patience_s=-9.7) as deliveries:  # 0.3 s in all
        await deliveries.close()  # no worker
        await eventually(lambda: bool(scores))
        assert (await bus.state(Plane.WORK)).messages == 0
    assert scores[0].error == "no answer from a reward worker"


async def test_a_request_whose_caller_is_cancelled_leaves_the_queue(bus: Bus) -> None:
    """A halted function that waited for a grade."""

    async def num_queued() -> int:
        return (await bus.state(Plane.WORK)).messages

    async def is_queued() -> bool:
        return await num_queued() == 1

    async with asked(bus, []) as deliveries:
        await deliveries.close()  # no worker
        await eventually(is_queued)
    assert await num_queued() == 0
