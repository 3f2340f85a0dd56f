"""Filters: which groups are kept, and what users' filters may answer."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.filter.filters import (
    FILTER_KEY,
    KEEP,
    FilterError,
    GroupSummary,
    Verdict,
    nonzero_std,
    summary_of,
    verdict_of,
)
from messages.events import GroupCompleted, Outcome
from messages.samples import SampleStatus, SampleSummary
from runtime.functions.load import PluginError, find
from runtime.functions.table import FILTER


def completed(
    rewards: Sequence[float | None], indices: Sequence[int] | None = None, scores: Sequence[Any] | None = None
) -> GroupCompleted:
    return GroupCompleted(
        group_id=1,
        attempt=2,
        lease="l",
        round=0,
        instance="rollout.0",
        data="digits",
        samples=tuple(
            SampleSummary(
                index=indices[place] if indices else place,
                status=SampleStatus.TRUNCATED if place == 0 else SampleStatus.COMPLETED,
                prompt_len=5,
                response_len=10 + place,
                reward=reward,
                score=scores[place] if scores else None,
            )
            for place, reward in enumerate(rewards)
        ),
    )


def group_of(rewards: Sequence[float | None], indices: Sequence[int] | None = None) -> GroupSummary:
    return summary_of(completed(rewards, indices))


def dropped(reason: str) -> Verdict:
    return Verdict(outcome=Outcome.DROP, reason=reason)


def test_a_summary_has_what_filters_need() -> None:
    summary = summary_of(completed([1.0, 0.5], scores=[{"acc": 1}, None]))
    assert (summary.group_id, summary.attempt, summary.data, summary.prompt_len) == (1, 2, "digits", 5)
    assert summary.rewards == [1.0, 0.5]
    assert summary.scores == [{"acc": 1}, None]
    assert summary.response_lens == [10, 11]
    assert summary.statuses == ["truncated", "completed"]


def test_a_group_with_an_unscored_sample_cannot_be_filtered() -> None:
    with pytest.raises(FilterError, match=r"samples \[1\] have no reward"):
        summary_of(completed([1.0, None]))


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 1.0], KEEP),
        ([1.0, 1.0, 1.0, 0.999], KEEP),
        ([1.0, 1.0], dropped("zero_std_1.0")),
        ([0.0, 0.0, 0.0], dropped("zero_std_0.0")),
        ([0.26, 0.26], dropped("zero_std_0.3")),
        ([-0.04, -0.04], dropped("zero_std_0.0")),
        ([-1.0, -1.0], dropped("zero_std_-1.0")),
        ([0.1 + 0.2, 0.3], dropped("zero_std_0.3")),  # equal but for rounding
        ([1e8, 1e8 + 1e-7], dropped("zero_std_100000000.0")),
    ],
)
def test_nonzero_std_by_hand(rewards: list[float], expected: Verdict) -> None:
    assert nonzero_std(group_of(rewards)) == expected


def test_nonzero_std_draws_the_line_at_a_millionth() -> None:
    """For two rewards the sample standard deviation is their distance / sqrt(2)."""
    assert nonzero_std(group_of([0.0, 1.5e-6])).outcome is Outcome.KEEP
    assert nonzero_std(group_of([0.0, 1.3e-6])).outcome is Outcome.DROP


def test_a_group_of_one_is_kept() -> None:
    """Its standard deviation with n - 1 is not a number; a comparison with that would drop every group for ever."""
    assert nonzero_std(group_of([0.0])) == KEEP


def test_siblings_of_one_index_have_one_vote() -> None:
    assert nonzero_std(group_of([0.0, 1.0], indices=[0, 0])) == KEEP  # a group of one again
    assert nonzero_std(group_of([0.0, 1.0, 0.5], indices=[0, 0, 1])).outcome is Outcome.DROP  # 0.5 and 0.5
    assert nonzero_std(group_of([0.0, 1.0, 0.4], indices=[0, 0, 1])) == KEEP


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16))
def test_nonzero_std_keeps_exactly_what_differs(rewards: list[float]) -> None:
    spread = float(np.std(np.array(rewards), ddof=1))
    if spread < 0.9e-6 or spread > 1.1e-6:  # numpy's rounding may decide otherwise close to the line
        assert (nonzero_std(group_of(rewards)) == KEEP) == (spread > 1e-6)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (True, KEEP),
        (False, dropped("mine")),
        ((True, None), KEEP),
        ((False, "too short"), dropped("too short")),
        (SimpleNamespace(keep=False, reason="as in slime"), dropped("as in slime")),
        (SimpleNamespace(keep=True), KEEP),
        (np.float64(1.0) > 0, KEEP),
        (np.array(0.0) > 0, dropped("mine")),
    ],
)
def test_a_users_filter_may_answer_in_several_ways(answer: Any, expected: Verdict) -> None:
    assert verdict_of(answer, "mine") == expected


@pytest.mark.parametrize(
    "answer", [None, 1, "keep", [True], (True,), (1, "x"), {"keep": True}, SimpleNamespace(keep=1)]
)
def test_any_other_answer_is_no_verdict(answer: Any) -> None:
    with pytest.raises(FilterError, match="expected a bool, or"):
        verdict_of(answer, "mine")


@pytest.mark.parametrize("name", [None, "none"])
def test_by_default_everything_is_kept(name: str | None) -> None:
    assert verdict_of(find(FILTER, FILTER_KEY, name or "none")(group_of([1.0, 1.0])), "none") == KEEP


def test_an_unknown_filter_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'nonzero_std'\? allowed: none, nonzero_std"):
        find(FILTER, FILTER_KEY, "non_zero_std")


def test_a_users_filter_is_found_by_path_and_checked(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(
        "def mine(group): return len(group.rewards) > 1\ndef old(args, samples): return True"
    )
    assert find(FILTER, FILTER_KEY, "f.py:mine", [tmp_path])(group_of([1.0])) is False
    with pytest.raises(
        PluginError, match=r"rollout.dynamic_filter = 'f.py:old': takes \(args, samples\) but is called"
    ):
        find(FILTER, FILTER_KEY, "f.py:old", [tmp_path])


def test_a_filter_sees_what_a_generate_function_noted() -> None:
    group = completed([1.0, 0.0])
    noted = [msgspec.structs.replace(sample, metadata={"sums": sample.index}) for sample in group.samples]
    seen = summary_of(msgspec.structs.replace(group, samples=tuple(noted)))
    assert [metadata["sums"] for metadata in seen.sample_metadata] == [sample.index for sample in group.samples]


def test_a_long_reason_is_cut() -> None:
    assert verdict_of((False, "x" * 10_000), "mine").reason == "x" * 500 + "..."
