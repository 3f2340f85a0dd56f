"""One grader on one sample or group: whatever it says becomes a reward or a reason."""

import asyncio
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.reward.graders.calling import grade_group, grade_of, grade_sample, resolve_grader
from actors.reward.grades import Graded, GraderSpec, unpacked
from actors.reward.samples import GradedSample, Turn


async def _await(awaitable: Any) -> Any:
    return await awaitable


def run(awaitable: Any) -> Any:
    return asyncio.run(_await(awaitable))


def group_of(answer: Any, size: int = 2) -> tuple[Graded, ...]:
    return grade_group(lambda samples: answer, [GradedSample()] * size, reward_key="score", wait=run)


@pytest.mark.parametrize("answer", [1, 1.0, True, np.float32(1), np.int64(1), np.array(1.0), Decimal(1), Fraction(1)])
def test_numbers_of_any_kind_are_rewards(answer: Any) -> None:
    assert grade_of(answer, None).reward == 1.0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "returned None, not a number"),
        ("1.0", "returned '1.0' (str), not a number"),
        ([1.0], 'returned [1.0] (list), not a number; reward.per = "turn" or "token" allows a list'),
        (float("nan"), "returned nan, not a finite number"),
        (float("inf"), "returned inf, not a finite number"),
        (1e308, "returned 1e+308, beyond the 1e+15 that a reward may be"),
        (-1e16, "returned -1e+16, beyond the 1e+15 that a reward may be"),
        (10**300, "returned 1e+300, beyond the 1e+15 that a reward may be"),
        (10**400, "which is not a single number"),
        (np.float64(1e20), "returned 1e+20, beyond the 1e+15 that a reward may be"),
        (Decimal("1e17"), "returned 1e+17, beyond the 1e+15 that a reward may be"),
        (np.array([1.0, 2.0]), "is not a single number"),
        ({"score": 1.0}, "set reward_key to say which value is the reward"),
    ],
)
def test_anything_else_is_a_reason(answer: Any, reason: str) -> None:
    graded = grade_of(answer, None)
    assert graded.reward is None
    assert reason in str(graded.error)


PER_TOKEN = GradedSample(response_len=4, per="token")
PER_TURN = GradedSample(response_len=4, per="turn", turn_spans=(Turn(start=0, end=1), Turn(start=2, end=4)))


@pytest.mark.parametrize(
    ("answer", "sample", "rewards"),
    [
        ([1, 0, 0.5, -1], PER_TOKEN, [1, 0, 0.5, -1]),
        (np.array([1, 0, 0.5, -1]), PER_TOKEN, [1, 0, 0.5, -1]),
        ({"score": (1, 0, 0.5, -1)}, PER_TOKEN, [1, 0, 0.5, -1]),
        ([2, 0.5], PER_TURN, [2, 0, 0, 0.5]),
        ([], GradedSample(per="token"), []),
    ],
)
def test_a_list_is_a_reward_per_token_or_turn(answer: Any, sample: GradedSample, rewards: list[float]) -> None:
    graded = grade_of(answer, "score", sample)
    assert list(unpacked(graded.token_rewards or b"")) == rewards
    assert graded.reward == sum(rewards)


def test_the_reward_is_summed_before_numbers_are_rounded_to_float32() -> None:
    """The sum of the rounded ones is 1.0000000149, which is no 1."""
    assert grade_of([0.2, 0.8], None, PER_TURN).reward == 1.0


@pytest.mark.parametrize(
    ("answer", "sample", "reason"),
    [
        ([1.0, 2.0], PER_TOKEN, "returned 2 rewards for 4 tokens"),
        ([1.0] * 4, PER_TURN, "returned 4 rewards for 2 turns"),
        ([1.0, math.nan, 0, 0], PER_TOKEN, "the reward of token 1 is nan (float), not a finite number"),
        ([1.0, 1e39, 0, 0], PER_TOKEN, "the reward of token 1 is 1e+39 (float), not a finite number"),
        ([1.0, 1e30, 0, 0], PER_TOKEN, "the reward of token 1 is 1e+30 (float), beyond the 1e+15 that a reward may be"),
        ([9e14] * 4, PER_TOKEN, "returned 3600000000000000.0, beyond the 1e+15 that a reward may be"),
        ([1.0, -1e16], PER_TURN, "the reward of turn 1 is -1e+16 (float), beyond the 1e+15 that a reward may be"),
        ([1.0, None], PER_TURN, "a list of rewards that are not all numbers"),
        ("abcd", PER_TOKEN, "not a number"),
        ({"score": "abcd"}, PER_TOKEN, "not a number"),
    ],
)
def test_a_list_that_does_not_fit_is_a_bad_answer(answer: Any, sample: GradedSample, reason: str) -> None:
    graded = grade_of(answer, "score", sample)
    assert (graded.cause, graded.reward, graded.token_rewards) == ("bad_answer", None, None)
    assert reason in str(graded.error)


def test_one_reward_is_allowed_where_lists_are() -> None:
    assert grade_of(0.5, None, PER_TOKEN) == Graded(reward=0.5)


def test_a_dict_gives_its_reward_key_and_travels_along() -> None:
    graded = grade_of({"score": np.float32(0.5), "pred": "72", "why": ValueError("x"), 3: b"a"}, "score")
    assert graded.reward == 0.5
    assert graded.details == {"score": 0.5, "pred": "72", "why": "ValueError('x') (ValueError)", "3": "YQ=="}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"acc": 1.0}, "the dict it returned has no 'score', only 'acc'"),
        ({}, "the dict it returned has no 'score', only nothing"),
        ({"score": "high"}, "returned 'high' (str), not a number"),
        ({"score": float("nan")}, "returned nan, not a finite number"),
    ],
)
def test_a_dict_without_a_usable_reward_is_a_reason(answer: Any, reason: str) -> None:
    assert reason in str(grade_of(answer, "score").error)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@given(anything | st.fixed_dictionaries({"score": anything, "more": anything}))
def test_every_answer_becomes_a_grade_that_can_travel(answer: Any) -> None:
    graded = grade_of(answer, "score")
    assert (graded.reward is None) != (graded.error is None)
    msgspec.json.encode(graded)
    assert len(msgspec.msgpack.encode(graded)) < 20_000


def test_a_large_detail_is_cut() -> None:
    details = grade_of({"score": 1, "text": "x" * 100_000}, "score").details
    assert details is not None
    assert len(details["text"]) <= 120


@pytest.mark.parametrize(
    "error",
    [ValueError("bad"), SystemExit(3), AssertionError(), BaseException("a panic of Rust"), asyncio.CancelledError()],
)
def test_what_a_grader_raises_is_a_reason(error: BaseException) -> None:
    def grader(sample: GradedSample) -> float:
        raise error

    graded = grade_sample(grader, GradedSample(), reward_key=None, wait=run)
    assert (graded.error, graded.cause) == (f"raised {error!r}", "raised")
    assert graded.trace is not None
    assert graded.trace.splitlines()[1].endswith("in grader")


def test_an_async_grader_is_awaited() -> None:
    async def grader(sample: GradedSample) -> float:
        await asyncio.sleep(0)
        return len(sample.response)

    assert grade_sample(grader, GradedSample(response="abc"), reward_key=None, wait=run).reward == 3.0


@pytest.mark.parametrize("answer", [[1, 0.5], (1, 0.5), np.array([1, 0.5])])
def test_a_group_grader_gives_one_reward_per_sample(answer: Any) -> None:
    assert [graded.reward for graded in group_of(answer)] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([1.0], "returned 1 rewards for 2 samples"),
        (1.0, "returned 1.0 (float), not a list of 2 rewards"),
        ("ab", "not a list of 2 rewards"),
        ({"a": 1, "b": 2}, "not a list of 2 rewards"),
        (np.array(1.0), "not a list of 2 rewards"),
    ],
)
def test_a_group_answer_that_does_not_fit_fails_all_its_samples(answer: Any, reason: str) -> None:
    assert all(reason in str(graded.error) for graded in group_of(answer))


def test_one_bad_item_fails_only_its_sample() -> None:
    first, second = group_of([{"score": 1.0}, None])
    assert first.reward == 1.0
    assert second.error == "returned None, not a number"


def test_a_built_in_grader_also_grades_groups() -> None:
    grader = resolve_grader(GraderSpec(name="exact_match", group=True))
    assert grader([GradedSample(response="1", label="1"), GradedSample(response="2", label="1")]) == [1.0, 0.0]
