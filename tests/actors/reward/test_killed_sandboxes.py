"""A tenth of the sandboxes is killed: no sample gets a reward that its answer does not deserve, none is lost."""

import os
from pathlib import Path

import anyio
import pytest

from actors.reward.frames import GraderSpec
from actors.reward.samples import GradedSample
from tests.actors.reward.test_pool import USER_CODE, pool_of

pytestmark = pytest.mark.anyio


def distance(ours: list[int], theirs: list[int]) -> float:
    """The Kolmogorov-Smirnov distance of two samples of lengths."""
    shares = [[sum(one <= at for one in some) / len(some) for at in {*ours, *theirs}] for some in (ours, theirs)]
    return max(abs(one - other) for one, other in zip(*shares, strict=True))


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
    async with pool_of(num_processes=2, timeout_s=10, max_tries=3, graders=(grader,)) as pool:
        with anyio.fail_after(25):
            grades = await pool.grade(grader, samples)
        assert pool.stats()["num_deaths"] >= 1
    assert len(os.listdir(tmp_path)) == 6  # each of these sandboxes was killed while it graded
    zeros = [sample for sample, graded in zip(samples, grades, strict=True) if graded.reward == 0.0]
    assert zeros == [sample for sample in samples if sample.response != sample.label]
    trained = [sample.response_len for sample, graded in zip(samples, grades, strict=True) if graded.reward is not None]
    assert distance(trained, [sample.response_len for sample in samples]) <= 0.05


def test_the_distance_by_hand() -> None:
    assert distance([1, 2, 3, 4], [1, 2, 3, 4]) == 0.0
    assert distance([3, 4], [1, 2, 3, 4]) == 0.5
