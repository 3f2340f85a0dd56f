"""A scorer and reward workers on the real bus."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest

from actors.rollout.groups.scoring import PATIENCE_S, Scorer
from actors.rollout.groups.tasks import training_task
from messages import Plane, SampleStatus, Score, ScoreItem, ScoreRequested, ScoresGiven
from runtime.bus.bus import Bus
from runtime.bus.consumer import Deliveries, Delivery
from tests.fixtures.nats import eventually
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


async def test_a_request_that_was_given_up_leaves_the_queue(bus: Bus) -> None:
    scores: list[Score] = []
    async with asked(bus, scores, patience_s=-9.7) as deliveries:  # 0.3 s in all
        await deliveries.close()  # no worker
        await eventually(lambda: bool(scores))
        assert (await bus.state(Plane.WORK)).messages == 0
    assert scores[0].error == "no answer from a reward worker"
