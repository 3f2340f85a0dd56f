"""From completed groups and payloads to a batch: what lands where."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from actors.trainer.data.assembly import CollectedGroup, assemble, payload_seqs, problems_of
from actors.trainer.data.batch import LeftOut
from messages import Int32Array, SampleKey, SampleStatus, Segment, SegmentsPublished
from tests.actors.trainer.logs import completed, group_of, payload, segment, summary

KEY = SampleKey(group_id=5, attempt=0, index=0)


def collected(*samples, segments) -> CollectedGroup:
    message = SegmentsPublished(group_id=5, attempt=0, lease="lease", segments=tuple(segments))
    return CollectedGroup(group_of(5, samples), {9: message})


def test_segments_follow_each_other_and_only_masked_response_tokens_train() -> None:
    turns = [
        segment(KEY, [1, 2], [3, 4], ((1, 0, 2),), log_probs=[-0.5, -0.25]),
        segment(KEY, [5], [6, 7, 8], ((1, 0, 1), (2, 1, 3)), mask=[1, 0, 1], log_probs=[-1, -2, -3]),
    ]
    batch = assemble(4, [collected(summary(0, [(9, 0), (9, 1)], reward=0.5), segments=turns)], {1: 3, 2: 4})
    assert batch is not None
    assert batch.tokens_N.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert batch.loss_mask_N.tolist() == [0, 0, 1, 1, 0, 1, 0, 1]
    assert batch.rollout_log_probs_N.tolist() == [0, 0, -0.5, -0.25, 0, -1, 0, -3]
    assert batch.staleness_N.tolist() == [
        -1,
        -1,
        1,
        1,
        -1,
        1,
        -1,
        0,
    ]  # version 2 holds the four steps this one starts from
    assert (batch.step, batch.rewards_B.tolist(), batch.lengths_B.tolist()) == (4, [0.5], [8])


def test_parts_of_an_index_are_one_rollout_and_groups_do_not_share_any() -> None:
    def fan_out(group_id: int) -> CollectedGroup:
        places = [(0, 0), (0, 1), (1, 0)]
        segments = [
            segment(SampleKey(group_id=group_id, attempt=0, index=index, part=part), [1], [2], ((1, 0, 1),))
            for index, part in places
        ]
        samples = [summary(index, [(9, place)], part=part) for place, (index, part) in enumerate(places)]
        message = SegmentsPublished(group_id=group_id, attempt=0, lease="lease", segments=tuple(segments))
        return CollectedGroup(group_of(group_id, tuple(reversed(samples))), {9: message})

    batch = assemble(0, [fan_out(5), fan_out(6)], {})
    assert batch is not None
    assert batch.groups_B.tolist() == [5, 5, 5, 6, 6, 6]
    assert batch.rollouts_B.tolist() == [0, 0, 1, 2, 2, 3]


def test_samples_without_reward_or_tokens_or_that_failed_are_left_out() -> None:
    segments = [segment(SampleKey(group_id=5, attempt=0, index=index), [1], [2], ((1, 0, 1),)) for index in range(4)]
    samples = (
        summary(0, [(9, 0)], reward=None),
        summary(1, [], reward=1.0),
        summary(2, [(9, 2)], status=SampleStatus.FAILED),
        summary(3, [(9, 3)], status=SampleStatus.TRUNCATED),
    )
    batch = assemble(0, [collected(*samples, segments=segments)], {})
    assert batch is not None
    assert (batch.rollouts_B.tolist(), batch.truncated_B.tolist()) == ([0], [1])
    assert assemble(0, [collected(*samples[:3], segments=segments)], {}) is None


def test_a_sample_that_is_too_long_keeps_its_vote_and_brings_no_tokens() -> None:
    segments = [segment(SampleKey(group_id=5, attempt=0, index=index), [1], [2], ((1, 0, 1),)) for index in range(2)]
    samples = (summary(0, [(9, 0)], reward=0.5), summary(1, [(12, 0)], reward=1.0))
    message = SegmentsPublished(group_id=5, attempt=0, lease="lease", segments=tuple(segments))
    group = CollectedGroup(group_of(5, samples), {9: message}, frozenset({(1, 0)}))
    batch = assemble(0, [group], {1: 0})
    assert batch is not None
    assert (batch.rewards_B.tolist(), batch.rollouts_B.tolist()) == ([0.5, 1.0], [0, 1])
    assert (batch.left_out_B.tolist(), batch.lengths_B.tolist()) == ([0, 1], [2, 1])
    assert batch.loss_mask_N.tolist() == [0, 1, 0]


def test_what_cannot_be_true_of_a_sample_is_found_and_its_tokens_are_left_out() -> None:
    segments = [segment(SampleKey(group_id=5, attempt=0, index=index), [1], [2], ((1, 0, 1),)) for index in range(3)]
    segments[1] = segment(segments[1].sample, [1], [2], ((1, 0, 1),), log_probs=[-1e39])
    samples = tuple(summary(index, [(9, index)], reward=float(index)) for index in range(3))
    samples = (msgspec.structs.replace(samples[0], prompt_len=1, response_len=2), *samples[1:])
    message = SegmentsPublished(group_id=5, attempt=0, lease="lease", segments=tuple(segments))
    completed_group = group_of(5, samples)
    problems = problems_of(completed_group, {9: message}, vocab_size=3)
    assert problems == {
        (0, 0): "its segments have 2 tokens, but 3 are reported",
        (1, 0): "response: token 0 has log-prob -inf (allowed: -1000 to 0.001)",
    }
    assert set(problems_of(completed_group, {9: message}, vocab_size=2)) == {(0, 0), (1, 0), (2, 0)}
    batch = assemble(0, [CollectedGroup(completed_group, {9: message}, problems=problems)], {1: 0})
    assert batch is not None
    assert (batch.rewards_B.tolist(), batch.lengths_B.tolist()) == ([0.0, 1.0, 2.0], [1, 1, 2])
    assert batch.left_out_B.tolist() == [LeftOut.INVALID, LeftOut.INVALID, LeftOut.NO]
    assert np.isfinite(batch.rollout_log_probs_N).all()


def test_a_payload_that_only_samples_too_long_have_is_not_asked_for() -> None:
    samples = (summary(0, [(9, 0), (12, 0)]), summary(1, [(9, 1)]), summary(1, [(3, 0)], part=1))
    assert payload_seqs(group_of(5, samples), {(0, 0), (1, 1)}) == [9]


def test_a_segment_of_another_sample_is_refused() -> None:
    other = segment(SampleKey(group_id=6, attempt=0, index=0), [1], [2], ((1, 0, 1),))
    with pytest.raises(ValueError, match="belongs to"):
        assemble(0, [collected(summary(0, [(9, 0)]), segments=[other])], {})


def test_each_payload_is_asked_for_once() -> None:
    samples = (summary(0, [(9, 0), (12, 0)]), summary(1, [(9, 1)]), summary(2, [(3, 0)]))
    assert payload_seqs(group_of(5, samples)) == [3, 9, 12]


def test_a_whole_group_in_one_payload() -> None:
    batch = assemble(0, [CollectedGroup(completed(5, 9), {9: payload(5)})], {1: 0})
    assert batch is not None
    assert batch.rewards_B.tolist() == [1.0, 2.0, 3.0, 1.0]
    assert np.array_equal(batch.staleness_N == 0, batch.loss_mask_N != 0)


def test_a_raw_reward_that_only_a_later_sample_names_is_that_samples_alone() -> None:
    segments = [segment(SampleKey(group_id=5, attempt=0, index=index), [1], [2], ((1, 0, 1),)) for index in range(3)]
    samples = (
        summary(0, [(9, 0)], reward=0.1),
        summary(1, [(9, 1)], reward=0.2, metadata={"raw_reward": 7, "round_number": 2}),
        summary(2, [(9, 2)], reward=0.3, metadata={"raw_reward": "none"}),
    )
    batch = assemble(0, [collected(*samples, segments=segments)], {1: 0})
    assert batch is not None
    assert (batch.rewards_B.tolist(), batch.raw_rewards_B.tolist()) == ([0.1, 0.2, 0.3], [0.1, 7.0, 0.3])


def with_experts(part: Segment, experts: list[int]) -> Segment:
    """A segment each of whose tokens has one expert; those of its last token are not known."""
    return msgspec.structs.replace(part, routed_experts=Int32Array([*experts, -1]))


def test_routed_experts_take_as_few_bytes_as_they_can() -> None:
    one, other = (segment(KEY, prompt, [9], ((1, 0, 1),)) for prompt in ([7, 8], [7]))
    for highest, dtype in ((254, np.uint8), (255, np.int16)):
        told = [with_experts(one, [3, highest]), other]
        batch = assemble(0, [collected(summary(0, [(9, 0), (9, 1)]), segments=told)], {1: 0})
        assert batch is not None
        assert batch.routed_experts_N is not None
        assert batch.routed_experts_N.dtype == dtype
        unknown = np.array(-1).astype(dtype)
        assert batch.routed_experts_N[:, 0].tolist() == [3, highest, unknown, unknown, unknown]


def test_kept_tokens_are_those_of_each_token_wherever_it_is() -> None:
    """The parts with and without kept tokens, a prompt between them, and tokens in any order."""
    one, other = segment(KEY, [7, 8], [9, 10], ((1, 0, 2),)), segment(KEY, [7], [9], ((1, 0, 1),))
    told = msgspec.structs.replace(one, kept_counts=Int32Array([2, 1]), kept_ids=Int32Array([4, 9, 10]))
    batch = assemble(0, [collected(summary(0, [(9, 0), (9, 1), (9, 2)]), segments=[other, told, other])], {1: 0})
    assert batch is not None
    kept = batch.kept_of(np.array([5, 0, 1, 4, 7]))
    assert kept is not None
    assert (kept.ids_K.tolist(), kept.counts_M.tolist()) == ([10, 4, 9], [1, 0, 0, 2, 0])
    without = assemble(0, [collected(summary(0, [(9, 0)]), segments=[other])], {1: 0})
    assert without is not None
    assert without.kept_of(np.array([0, 1])) is None
    with pytest.raises(ValueError, match="3 kept tokens, got the ids of 2"):
        replace(batch, kept_ids_K=np.array([4, 9], dtype=np.int32))


def test_a_sample_without_the_kept_tokens_that_training_needs_is_invalid() -> None:
    part = segment(KEY, [7], [9], ((1, 0, 1),))
    told = msgspec.structs.replace(part, kept_counts=Int32Array([2]), kept_ids=Int32Array([9, 4]))
    for given, problems in ((part, {(0, 0)}), (told, set())):
        group = collected(summary(0, [(9, 0)]), segments=[given])
        assert set(problems_of(group.completed, group.payloads, 16, needs_kept=True)) == problems


def test_routed_experts_that_no_number_fits_are_refused() -> None:
    part = with_experts(segment(KEY, [7, 8], [9], ((1, 0, 1),)), [3, 40_000])
    with pytest.raises(ValueError, match="routed experts are numbered -1 to 40000"):
        assemble(0, [collected(summary(0, [(9, 0)]), segments=[part])], {1: 0})
