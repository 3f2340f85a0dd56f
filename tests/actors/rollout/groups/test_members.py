"""What earlier attempts left of a sample, and what is still to be done for it."""

import pytest

from actors.rollout.groups.members import Member, fresh_members, inherit, tokens_left
from messages import (
    Float32Array,
    Int32Array,
    SampleKey,
    SampleStatus,
    SampleSummary,
    Score,
    Segment,
    SegmentRef,
    UInt8Array,
    WeightSpan,
)

FIRST, SECOND = SegmentRef(seq=5, position=0), SegmentRef(seq=9, position=1)


def segment(ids: list[int], version: int, text: str) -> Segment:
    return Segment(
        sample=SampleKey(group_id=1, attempt=0, index=0),
        prompt_ids=Int32Array(),
        response_ids=Int32Array(ids),
        loss_mask=UInt8Array([1] * len(ids)),
        rollout_log_probs=Float32Array([-1.0] * len(ids)),
        weight_spans=(WeightSpan(version=version, start=0, end=len(ids)),) if ids else (),
        text=text,
    )


def fresh() -> Member:
    (member,) = fresh_members(1, Int32Array([7, 8]))
    return member


def inherited(status: SampleStatus, reward: float | None = None, *, room: int = 8) -> Member:
    member = fresh()
    carried = SampleSummary(index=0, status=status, segments=(FIRST, SECOND), reward=reward, score={"acc": 1})
    inherit(member, carried, [segment([1, 2], 3, "ab"), segment([4], 5, "c")], max_new_tokens=room)
    return member


def test_what_an_engine_returned_is_appended_to_tokens_text_and_length() -> None:
    member = fresh()
    for part, ref, status in (
        (segment([1, 2], 3, "ab"), FIRST, SampleStatus.ABORTED),
        (segment([4], 5, "c"), SECOND, SampleStatus.COMPLETED),
    ):
        member.continue_with(part, status)
        member.stored_at(ref, part)
    assert (member.prefix, member.text) == ([1, 2, 4], "abc")
    summary = member.summary()
    assert (summary.segments, summary.prompt_len, summary.response_len) == ((FIRST, SECOND), 2, 3)
    assert (summary.first_version, summary.last_version, summary.status) == (3, 5, "completed")


def test_a_return_without_tokens_leaves_no_segment() -> None:
    member = fresh()
    nothing = segment([], 3, "")
    member.continue_with(nothing, SampleStatus.ABORTED)
    member.stored_at(FIRST, nothing)
    assert (member.refs, member.status) == ([], SampleStatus.ABORTED)


def test_an_aborted_sample_goes_on_from_its_tokens() -> None:
    member = inherited(SampleStatus.ABORTED)
    assert not member.finished
    assert (member.prefix, tokens_left(member, 8)) == ([1, 2, 4], 5)


@pytest.mark.parametrize("status", [SampleStatus.COMPLETED, SampleStatus.TRUNCATED])
@pytest.mark.parametrize("reward", [None, 0.5])
def test_a_finished_sample_needs_no_more_tokens_and_is_scored_once(status: SampleStatus, reward: float | None) -> None:
    member = inherited(status, reward)
    assert member.finished
    assert member.unscored == (reward is None)
    assert (member.summary().reward, member.summary().score) == (reward, {"acc": 1})


@pytest.mark.parametrize(("room", "status"), [(8, SampleStatus.COMPLETED), (3, SampleStatus.TRUNCATED)])
def test_a_sample_whose_score_failed_is_scored_again_and_stays_truncated(room: int, status: SampleStatus) -> None:
    member = inherited(SampleStatus.FAILED, room=room)
    assert member.unscored
    assert (member.status, member.prefix) == (status, [1, 2, 4])


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_a_failed_score(reward: float) -> None:
    member = inherited(SampleStatus.COMPLETED)
    member.take_score(Score(index=0, reward=reward), failed_reward=None)
    assert (member.status, member.reward, member.reason) == (SampleStatus.FAILED, None, f"the reward is {reward}")


def test_a_sample_that_never_began_counts_as_aborted_and_has_no_reward() -> None:
    summary = fresh().summary()
    assert (summary.status, summary.reward, summary.segments) == (SampleStatus.ABORTED, None, ())


@pytest.mark.parametrize(("failed_reward", "status"), [(None, SampleStatus.FAILED), (0.0, SampleStatus.COMPLETED)])
def test_a_sample_without_a_reward_fails_or_gets_the_reward_of_failures(
    failed_reward: float | None, status: SampleStatus
) -> None:
    member = inherited(SampleStatus.COMPLETED)
    member.take_score(Score(index=0, error="timeout"), failed_reward=failed_reward)
    assert (member.status, member.reward, member.reason) == (status, failed_reward, "timeout")
