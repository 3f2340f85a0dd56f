"""What earlier attempts left of a sample, and what is still to be done for it."""

from typing import Any, cast

import anyio
import numpy as np
import pytest

from actors.rollout.samples.failures import FailurePolicy, policy_of
from actors.rollout.samples.partial import SegmentStore
from actors.rollout.samples.sample import OpenSample, fresh_samples, inherit, tokens_left, with_sum
from actors.rollout.samples.tasks import training_task
from messages import (
    Float32Array,
    Int32Array,
    Message,
    Prompt,
    RolloutRequested,
    SampleKey,
    SampleStatus,
    SampleSummary,
    SamplingParams,
    Score,
    Segment,
    SegmentRef,
    SegmentsSpilled,
    UInt8Array,
    WeightSpan,
)
from runtime.bus.bus import Bus
from tests.build.topology import topology_with

KEY = SampleKey(group_id=1, attempt=0, index=0)
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


def fresh() -> OpenSample:
    (sample,) = fresh_samples(1, Int32Array([7, 8]))
    return sample


def inherited(status: SampleStatus, reward: float | None = None, *, room: int = 8) -> OpenSample:
    sample = fresh()
    carried = SampleSummary(index=0, status=status, segments=(FIRST, SECOND), reward=reward, score={"acc": 1})
    inherit(sample, carried, [segment([1, 2], 3, "ab"), segment([4], 5, "c")], max_new_tokens=room)
    return sample


def received(sample: OpenSample, ids: list[int], version: int, text: str) -> None:
    """As a reader does with an engine's answer."""
    sample.buffer.append(np.array(ids), np.full(len(ids), -1.0), text, f"{version}@e")


def test_what_an_engine_returned_is_appended_to_tokens_text_and_length() -> None:
    sample = fresh()
    for ids, version, text, ref in (([1, 2], 3, "ab", FIRST), ([4], 5, "c", SECOND)):
        received(sample, ids, version, text)
        taken = sample.take(KEY, Int32Array([7, 8]))
        assert taken is not None
        assert not sample.stored
        sample.stored_at(ref, taken)
    sample.status = SampleStatus.COMPLETED
    assert (sample.buffer.ids.tolist(), sample.text, sample.stored) == ([1, 2, 4], "abc", True)
    summary = sample.summary()
    assert (summary.segments, summary.prompt_len, summary.response_len) == ((FIRST, SECOND), 2, 3)
    assert (summary.first_version, summary.last_version, summary.status) == (3, 5, "completed")


def test_the_first_segment_has_the_prompt_and_the_others_what_came_between() -> None:
    sample = fresh()
    received(sample, [1, 2], 3, "ab")
    first = sample.take(KEY, Int32Array([7, 8]))
    sample.buffer.append_input(np.array([9]))
    received(sample, [4], 3, "c")
    second = sample.take(KEY, Int32Array([7, 8]))
    assert first is not None
    assert second is not None
    assert (first.prompt_ids.tolist(), first.response_ids.tolist()) == ([7, 8], [1, 2])
    assert (second.prompt_ids.tolist(), second.response_ids.tolist()) == ([9], [4])
    assert [turn.num_tokens for turn in sample.turns] == [2, 1]


def test_a_return_without_tokens_leaves_no_segment() -> None:
    sample = fresh()
    assert sample.take(KEY, Int32Array([7, 8])) is None
    sample.restore(FIRST, segment([], 3, ""))
    assert (sample.refs, sample.turns, sample.stored) == ([], [], True)


def test_tokens_of_a_running_request_count_once_they_are_taken() -> None:
    sample = fresh()
    received(sample, [1, 2], 3, "ab")
    assert sample.summary().response_len == 0
    sample.take(KEY, Int32Array([7, 8]))
    received(sample, [4], 3, "c")
    assert (sample.summary().response_len, sample.stored) == (2, False)


def test_an_aborted_sample_goes_on_from_its_tokens() -> None:
    sample = inherited(SampleStatus.ABORTED)
    assert not sample.finished
    assert (sample.buffer.ids.tolist(), tokens_left(sample, 8)) == ([1, 2, 4], 5)


@pytest.mark.parametrize("status", [SampleStatus.COMPLETED, SampleStatus.TRUNCATED])
@pytest.mark.parametrize("reward", [None, 0.5])
def test_a_finished_sample_needs_no_more_tokens_and_is_scored_once(status: SampleStatus, reward: float | None) -> None:
    sample = inherited(status, reward)
    assert sample.finished
    assert sample.unscored == (reward is None)
    assert (sample.summary().reward, sample.summary().score) == (reward, {"acc": 1})


@pytest.mark.parametrize(("room", "status"), [(8, SampleStatus.COMPLETED), (3, SampleStatus.TRUNCATED)])
def test_a_sample_whose_score_failed_is_scored_again_and_stays_truncated(room: int, status: SampleStatus) -> None:
    sample = inherited(SampleStatus.FAILED, room=room)
    assert sample.unscored
    assert (sample.status, sample.buffer.ids.tolist()) == (status, [1, 2, 4])


BEYOND = "beyond the 1e+15 that a reward may be"


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        (float("nan"), "not a finite number"),
        (float("inf"), "not a finite number"),
        (1e308, BEYOND),
        (-1e308, BEYOND),
        (1.1e15, BEYOND),
    ],
)
def test_a_reward_that_is_no_number_is_a_failed_score(reward: float, problem: str) -> None:
    sample = inherited(SampleStatus.COMPLETED)
    sample.take_score(Score(index=0, reward=reward), policy=FailurePolicy())
    assert (sample.status, sample.reward, sample.reason) == (
        SampleStatus.FAILED,
        None,
        f"the reward is {reward}, {problem}",
    )


@pytest.mark.parametrize("reward", [1e15, -1e15, 0.0, 5e-324])
def test_a_reward_up_to_the_limit_is_taken(reward: float) -> None:
    sample = inherited(SampleStatus.COMPLETED)
    sample.take_score(Score(index=0, reward=reward), policy=FailurePolicy())
    assert (sample.status, sample.reward) == (SampleStatus.COMPLETED, reward)


def test_rewards_per_token_are_checked_one_by_one() -> None:
    score = Score(index=0, token_rewards=Float32Array([1.0, -1e16, 0.0]))
    found = with_sum(score, 3, allowed=True)
    assert (found.reward, found.cause) == (None, "bad_answer")
    assert found.error == f"the reward of token 1 is -1.0000000272564224e+16, {BEYOND}"


KEYS = ("right", "format")


def test_named_rewards_are_kept_with_the_sample() -> None:
    sample = inherited(SampleStatus.COMPLETED)
    score = Score(index=0, reward=0.5, details={"right": 1, "format": 0.25, "note": "fine"})
    sample.take_score(score, policy=FailurePolicy(), reward_keys=KEYS)
    assert (sample.status, sample.summary().reward) == (SampleStatus.COMPLETED, 0.5)
    assert sample.summary().rewards == {"right": 1.0, "format": 0.25}


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        (None, "the grader returned no dict with the rewards right, format, or one too large to send"),
        ({"right": 1}, "the reward 'format' is None, not a finite number"),
        ({"right": float("nan"), "format": 1}, "the reward 'right' is nan, not a finite number"),
        ({"right": "1", "format": 1}, "the reward 'right' is '1', not a finite number"),
        ({"right": 1, "format": 1e308}, f"the reward 'format' is 1e+308, {BEYOND}"),
        ({"right": 10**16, "format": 1}, f"the reward 'right' is 10000000000000000, {BEYOND}"),
    ],
)
def test_a_sample_without_each_named_reward_is_a_failed_score(details: dict[str, Any] | None, reason: str) -> None:
    sample = inherited(SampleStatus.COMPLETED)
    sample.take_score(Score(index=0, reward=0.5, details=details), policy=FailurePolicy(), reward_keys=KEYS)
    assert (sample.status, sample.reward, sample.reason) == (SampleStatus.FAILED, None, reason)
    lenient = inherited(SampleStatus.COMPLETED)
    lenient.take_score(Score(index=0, reward=0.5, details=details), policy=FailurePolicy(0.0), reward_keys=KEYS)
    assert (lenient.status, lenient.reward, lenient.rewards) == (SampleStatus.COMPLETED, 0.0, dict.fromkeys(KEYS, 0.0))


def test_the_reason_of_a_failure_is_cut_in_events() -> None:
    sample = fresh()
    sample.give_up("x" * 1_000_000)
    assert sample.summary().reason == "x" * 2000 + "..."


def test_a_sample_that_never_began_counts_as_aborted_and_has_no_reward() -> None:
    summary = fresh().summary()
    assert (summary.status, summary.reward, summary.segments) == (SampleStatus.ABORTED, None, ())


@pytest.mark.parametrize(
    ("reward", "status", "kept", "alone"),
    [
        ({}, SampleStatus.FAILED, None, True),
        ({"on_failure": "drop"}, SampleStatus.FAILED, None, False),
        ({"on_failure": "zero"}, SampleStatus.COMPLETED, 0.0, False),
        ({"on_failure": "drop_sample"}, SampleStatus.FAILED, None, True),
        ({"on_failure": "zero", "failures": {"timeout": "drop_sample"}}, SampleStatus.FAILED, None, True),
        ({"failures": {"timeout": -1}}, SampleStatus.COMPLETED, -1.0, False),
        ({"failures": {"timeout": "retry", "raised": 0.0}}, SampleStatus.FAILED, None, True),
    ],
)
def test_a_sample_without_a_reward_does_what_the_policy_says_for_the_cause(
    reward: dict[str, Any], status: SampleStatus, kept: float | None, alone: bool
) -> None:
    sample = inherited(SampleStatus.COMPLETED)
    policy = policy_of(topology_with(reward=reward).reward)
    sample.take_score(Score(index=0, error="timeout", cause="timeout"), policy=policy)
    assert (sample.status, sample.reward, sample.reason) == (status, kept, "timeout")
    assert sample.is_dropped_alone is alone


def test_a_sibling_with_its_own_reward_says_why_it_is_left_out_with_its_sample() -> None:
    sample = inherited(SampleStatus.COMPLETED)
    sibling = sample.siblings[1] = inherited(SampleStatus.COMPLETED)
    sibling.own_score = Score(index=0, part=1, reward=0.25)
    sample.take_score(Score(index=0, error="raised KeyError('x')", cause="raised"), policy=FailurePolicy("drop_sample"))
    assert (sibling.status, sibling.is_dropped_alone) == (SampleStatus.FAILED, True)
    assert sibling.reason == "raised KeyError('x')"


def test_the_greedy_sample_of_a_group_is_never_dropped_alone() -> None:
    sample = inherited(SampleStatus.COMPLETED)
    sample.is_baseline = True
    sample.take_score(Score(index=0, error="timeout"), policy=FailurePolicy("drop_sample"))
    assert (sample.status, sample.is_dropped_alone) == (SampleStatus.FAILED, False)


class Told:
    """A bus that takes events."""

    name = "rollout"

    def __init__(self) -> None:
        self.events: list[Message] = []

    async def publish(self, message: Message) -> int:
        self.events.append(message)
        return len(self.events)


def store_of(samples: list[OpenSample], bus: Any) -> SegmentStore:
    requested = RolloutRequested(
        group_id=1,
        attempt=2,
        round=0,
        min_version=1,
        prompt=Prompt(data="d", row=0, text="", prompt_ids=Int32Array([7])),
        num_samples=len(samples),
        sampling=SamplingParams(max_new_tokens=99),
    )
    return SegmentStore(training_task(requested, "lease", group_rm=False), samples, cast("Bus", bus))


class Slow(Told):
    """A bus whose first message waits without end."""

    async def publish(self, message: Message) -> int:
        seq = await super().publish(message)
        if seq == 1:
            await anyio.sleep_forever()
        return seq


@pytest.mark.anyio
async def test_segments_whose_store_was_cancelled_are_stored_by_the_next_call() -> None:
    """The call may be that of another sample."""
    samples, bus = fresh_samples(2, Int32Array([7])), Slow()
    store = store_of(samples, bus)
    for sample in samples:
        received(sample, [1, 2], 3, "ab")
        store.take(sample)
    with anyio.move_on_after(0.01):
        await store.flush()
    assert [sample.stored for sample in samples] == [False, False]
    received(samples[0], [3], 3, "c")
    store.take(samples[0])
    await store.flush()
    assert [sample.stored for sample in samples] == [True, True]
    assert [len(sample.refs) for sample in samples] == [2, 1]


def test_a_turn_whose_tokens_were_not_stored_is_not_finished() -> None:
    sample = fresh()
    carried = SampleSummary(index=0, status=SampleStatus.ABORTED, segments=(FIRST,), metadata={"num_turns": 2})
    inherit(sample, carried, [segment([1, 2], 3, "ab")], max_new_tokens=8)
    assert (sample.num_turns, carried.metadata) == (1, {"num_turns": 2})


@pytest.mark.parametrize(("given", "reward"), [(1.0, 1.0), (None, 1.0000000149011612), (9.0, 1.0000000149011612)])
def test_the_reward_is_the_sum_of_the_numbers_before_they_were_rounded(given: float | None, reward: float) -> None:
    """As float32, 0.2 is 0.20000000298 and 0.8 is 0.80000001192."""
    score = Score(index=0, reward=given, token_rewards=Float32Array([0.2, 0.8]))
    assert with_sum(score, 2, allowed=True).reward == reward


@pytest.mark.anyio
async def test_a_spill_tells_what_is_new_of_the_samples_that_changed() -> None:
    samples, bus = fresh_samples(2, Int32Array([7])), Told()
    store = store_of(samples, bus)

    def stored(index: int, *ids: int) -> None:
        samples[index].restore(SegmentRef(seq=10 * ids[0], position=index), segment(list(ids), 1, "x"))

    stored(0, 1, 2)
    stored(1, 3)
    await store.spill()
    await store.spill()  # nothing new
    stored(0, 4)
    stored(0, 5)
    await store.spill()
    samples[1].reward = 1.0
    await store.spill()
    first, second, third = [event for event in bus.events if isinstance(event, SegmentsSpilled)]
    assert [[ref.seq for ref in sample.segments] for sample in first.samples] == [[10], [30]]
    assert [(s.index, s.response_len, [ref.seq for ref in s.segments]) for s in second.samples] == [(0, 4, [40, 50])]
    assert [(s.index, s.response_len, s.reward, s.segments) for s in third.samples] == [(1, 1, 1.0, ())]
    assert (first.starts, second.starts, third.starts) == ((0, 0), (1,), (1,))
