"""A tenth of the sandboxes is killed: no sample gets a reward that its answer does not deserve, none is lost."""

import os
import sys
from pathlib import Path

import anyio
import pytest

from actors.reward.grades import Graded, GraderSpec
from actors.reward.gradings import graded_again
from actors.reward.recipe import retried_causes
from actors.reward.samples import GradedSample
from runtime.functions import isolation
from runtime.functions.sandbox import Sandbox
from tests.actors.reward.test_pool import AMPLE_S, USER_CODE, pool_of
from tests.build.topology import topology_with
from tests.support.killed_sandboxes import SHARE, Killer, distance

pytestmark = pytest.mark.anyio

ISOLATED = Sandbox(kind="isolated")  # as the grader `code` needs
LABEL = {"inputs": ["7"], "outputs": ["14"]}


@pytest.mark.parametrize("function", ["dies_once", "dies_once_async"])
async def test_zero_is_given_to_wrong_answers_alone_and_lengths_stay_as_issued(function: str, tmp_path: Path) -> None:
    grader = GraderSpec(name=f"{USER_CODE}:{function}")
    samples = [
        GradedSample(
            response=str(number % 3),
            label="0",
            response_len=10 + number,
            metadata={"marker": str(tmp_path / str(number)) if number % 10 == 5 else ""},
        )
        for number in range(60)
    ]
    async with pool_of(num_processes=2, max_tries=3, graders=(grader,)) as pool:
        with anyio.fail_after(AMPLE_S):
            grades = await pool.grade(grader, samples)
        assert pool.stats()["num_deaths"] >= 1
    assert len(os.listdir(tmp_path)) == 6  # each of these sandboxes was killed while it graded
    zeros = [sample for sample, graded in zip(samples, grades, strict=True) if graded.reward == 0.0]
    assert zeros == [sample for sample in samples if sample.response != sample.label]
    trained = [sample.response_len for sample, graded in zip(samples, grades, strict=True) if graded.reward is not None]
    assert distance(trained, [sample.response_len for sample in samples]) <= 0.05


@pytest.mark.parametrize("number", [40, pytest.param(2000, marks=[pytest.mark.nightly, pytest.mark.timeout(3000)])])
async def test_a_killed_sandbox_of_a_program_is_no_wrong_answer(number: int) -> None:
    """Longer programs live longer, so without further tries they would be rarer among those that train."""
    lengths = [1 + place % 30 for place in range(number)]
    factors = [2 if place % 3 else 3 for place in range(number)]  # the label asks for the first
    samples = [
        GradedSample(
            response=f"import time\ntime.sleep({length / 200})\nprint({factor} * int(input()))",
            label=LABEL,
            response_len=length,
        )
        for length, factor in zip(lengths, factors, strict=True)
    ]
    if isolation.refusal() is not None:
        pytest.fail(f"this machine cannot isolate programs: {isolation.refusal()}")
    killer, causes = Killer(os.getpid()), retried_causes(topology_with().reward)
    grades: list[Graded] = []
    counts: dict[str, float] = {}
    async with (
        pool_of(num_processes=2, max_tries=3, sandbox=ISOLATED, graders=(GraderSpec(name="code"),)) as pool,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(killer.run)
        grades = await graded_again(
            lambda some: pool.grade(GraderSpec(name="code"), some),
            samples,
            causes=causes,
            max_tries=3,
            max_wait_s=1.0,
            group=False,
        )
        tasks.cancel_scope.cancel()
        counts = pool.stats()
    lost = [graded for graded in grades if graded.reward is None]
    zeros = [place for place, graded in enumerate(grades) if graded.reward == 0.0]
    trained = [sample.response_len for sample, graded in zip(samples, grades, strict=True) if graded.reward is not None]
    apart = distance(trained, lengths)
    sys.stdout.write(
        f"{number} samples, {len(killer.seen)} sandboxes seen, {len(killer.killed)} killed, "
        f"{counts['num_sandbox_lost_scores']:.0f} tries lost, {len(lost)} samples lost, {len(zeros)} zeros, "
        f"{factors.count(3)} wrong answers, distance {apart:.4f}\n"
    )
    assert len(killer.killed) >= 0.9 * SHARE * len(killer.seen) > 0
    assert zeros == [place for place, graded in enumerate(grades) if factors[place] == 3 and graded.reward is not None]
    assert {graded.cause for graded in lost} <= {"sandbox_lost"}
    assert len(lost) <= number / 100
    assert apart <= 0.05


def test_the_distance_by_hand() -> None:
    assert distance([1, 2, 3, 4], [1, 2, 3, 4]) == 0.0
    assert distance([3, 4], [1, 2, 3, 4]) == 0.5
