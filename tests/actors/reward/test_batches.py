"""Batches across score requests: they fill and do not wait for long; what fails is the culprit alone."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from actors.reward.actor import RewardActor
from actors.reward.batches import Batches
from actors.reward.grader_check import SampleRow, check_graders
from actors.reward.grades import Graded, GraderSpec
from actors.reward.gradings import CallLimits
from actors.reward.pool import GraderPool
from actors.reward.recipe import graders_of
from actors.reward.samples import GradedSample
from messages import Int32Array, Prompt
from runtime.bus.bus import Bus
from runtime.process.actor import InputError
from runtime.settings.topology import scoring_time_s
from runtime.util.errors import flatten
from tests.actors.reward.test_pool import AMPLE_S, pool_of
from tests.actors.reward.test_reward_actor import Asker
from tests.build.topology import topology_with
from tests.support.checks import context_of

pytestmark = pytest.mark.anyio

CODE = str(Path(__file__).parent / "batch_graders.py")
PLAIN = GraderSpec(name=f"{CODE}:sizes", group=True)
ASYNC = GraderSpec(name=f"{CODE}:async_sizes", group=True)


@pytest.fixture
async def asker(bus: Bus) -> AsyncGenerator[Asker]:
    async with bus.score_inbox(lambda _: None) as inbox:
        yield Asker(bus, inbox)


class Impatient:
    """A pool whose calls with a culprit in them have a short timeout. The others are not late on a busy machine."""

    def __init__(self, pool: GraderPool) -> None:
        self._pool = pool
        self.calls_at_once = pool.calls_at_once

    async def grade(
        self, grader: GraderSpec, samples: Sequence[GradedSample], limits: CallLimits, *, splits: bool
    ) -> list[Graded]:
        if any(sample.response in ("hang", "never") for sample in samples):
            limits = CallLimits(timeout_s=0.3)
        return await self._pool.grade(grader, samples, limits, splits=splits)


@asynccontextmanager
async def batching(
    grader: GraderSpec = PLAIN, *, size: int = 8, wait_s: float = 0.05
) -> AsyncGenerator[tuple[Batches, GraderPool]]:
    async with pool_of(1, graders=(grader,)) as pool, anyio.create_task_group() as tasks:
        limits = CallLimits(timeout_s=AMPLE_S)
        batches = Batches(cast(GraderPool, Impatient(pool)), grader, size=size, wait_s=wait_s, limits=limits)
        tasks.start_soon(batches.run)
        yield batches, pool
        tasks.cancel_scope.cancel()


async def grades_of(batches: Batches, *responses: str) -> list[Graded]:
    """Ask for each sample in a request of its own, all at the same time; return the grades in their order."""
    grades: dict[int, Graded] = {}

    async def ask(place: int, response: str) -> None:
        (grades[place],) = await batches.grade([GradedSample(response=response)])

    with anyio.fail_after(AMPLE_S):
        async with anyio.create_task_group() as asking:
            for place, response in enumerate(responses):
                asking.start_soon(ask, place, response)
    return [grades[place] for place in range(len(responses))]


async def test_samples_of_many_requests_share_calls_of_at_most_the_batch() -> None:
    async with batching(size=8, wait_s=AMPLE_S) as (batches, _):  # a full batch does not wait
        grades = await grades_of(batches, *["fine"] * 16)
    assert [graded.reward for graded in grades] == [8.0] * 16


async def test_a_batch_that_does_not_fill_goes_after_its_wait() -> None:
    async with batching(size=64, wait_s=0.1) as (batches, _):
        assert [graded.reward for graded in await grades_of(batches, "fine", "fine", "fine")] == [3.0] * 3


@pytest.mark.parametrize(
    ("culprit", "cause", "grader"),
    [
        ("raise", "raised", PLAIN),
        ("hang", "timeout", PLAIN),
        ("die", "sandbox_lost", PLAIN),
        ("short", "bad_answer", PLAIN),
        ("never", "timeout", ASYNC),
        ("die", "sandbox_lost", ASYNC),
    ],
)
async def test_a_call_that_fails_costs_the_culprit_alone(culprit: str, cause: str, grader: GraderSpec) -> None:
    async with batching(grader, size=4, wait_s=AMPLE_S) as (batches, pool):
        grades = await grades_of(batches, "fine", culprit, "fine", "fine")
        stats = pool.stats()
    assert [graded.cause for graded in grades] == [None, cause, None, None]
    assert [graded.reward for graded in grades] == [1.0, None, 2.0, 2.0]
    assert (stats["num_failed_scores"], stats[f"num_{cause}_scores"]) == (1, 1)


async def test_an_error_in_the_list_is_that_of_its_sample_and_no_second_call() -> None:
    async with batching(size=4, wait_s=AMPLE_S) as (batches, _):
        grades = await grades_of(batches, "error", "fine", "nan", "busy")
    assert [graded.reward for graded in grades] == [None, 4.0, None, None]
    assert [graded.cause for graded in grades] == ["raised", None, "bad_answer", "timeout"]
    assert grades[0].error == "raised ValueError('no answer')"


def topology_of(batch: int = 4, **reward: Any):
    limits = {"own": {"batch": batch, "wait_s": AMPLE_S, **reward.pop("limits", {})}}
    return topology_with(
        data=[{"name": "d", "path": "p", "rm_type": "own"}],
        reward={"processes": 1, "graders": {"own": f"{CODE}:sizes"}, "limits": limits, "timeout_s": AMPLE_S, **reward},
    )


@asynccontextmanager
async def running(bus: Bus, **options: Any) -> AsyncGenerator[RewardActor]:
    actor = RewardActor(topology_of(**options), bus)
    async with anyio.create_task_group() as group:
        await group.start(actor.run)
        yield actor
        group.cancel_scope.cancel()


async def test_requests_of_many_groups_and_of_evaluations_share_a_call(bus: Bus, asker: Asker) -> None:
    async with running(bus, sums={"total": {"own": 2.0, "f1": 1.0}}):
        asked = [await asker.ask("own", "x", group_id=group_id, own=False) for group_id in range(2)]
        asked.append(await asker.ask("own", "x", evaluation=True, own=False))
        asked.append(await asker.ask("total", "x", label="x", own=False))
        answers = {answer.request_id: answer for answer in [await asker.answer() for _ in asked]}
    assert [answers[request].scores[0].reward for request in asked] == [4.0, 4.0, 4.0, 9.0]


async def test_a_run_whose_first_batches_all_fail_ends(bus: Bus, asker: Asker) -> None:
    async def ask_until_the_end() -> None:
        async with running(bus, batch=8):
            for group_id in range(4):
                await asker.ask("own", "raise", "raise", group_id=group_id, own=False)
            await anyio.sleep(AMPLE_S)

    with pytest.raises(BaseExceptionGroup) as caught:
        await ask_until_the_end()
    (error,) = flatten(caught.value)
    assert isinstance(error, InputError)
    assert "the first 8 calls of graders in this run, for 4 prompt groups, all failed" in str(error)


def test_a_batch_function_is_looked_up_as_one_and_its_samples_may_be_in_several_calls() -> None:
    topology = topology_of(64)
    assert graders_of(topology) == (PLAIN,)
    assert scoring_time_s(topology) == 7 * AMPLE_S  # 64, 32, 16, 8, 4, 2 and 1 samples
    assert scoring_time_s(topology_of(1)) == AMPLE_S


def test_the_check_calls_a_batch_function_with_a_list_of_one_sample() -> None:
    prompt = Prompt(data="d", row=0, text="p", prompt_ids=Int32Array([1]), rm_type="own")
    context = context_of(topology_of())
    assert list(check_graders(context, {"data.0": SampleRow(prompt, group=False)})) == []
    assert context.notes == []
