"""Staleness per token, the masks that follow from it, and what is told of it: hand values and what must hold always."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from actors.trainer.data.assembly import CollectedGroup, assemble
from actors.trainer.data.batch import TrainBatch
from actors.trainer.data.staleness import NOT_SAMPLED, Masking, loss_mask_of, staleness_metrics, staleness_of
from messages import SampleKey, Segment, SegmentsPublished
from runtime.settings.tables.rollout import RolloutConfig
from tests.actors.trainer.logs import group_of, segment, summary

STEPS = {1: 0, 2: 1, 3: 2, 4: 3, 5: 3}  # version 5 is step 3 again, after a crash


def key(group_id: int = 5, *, index: int = 0, attempt: int = 0) -> SampleKey:
    return SampleKey(group_id=group_id, attempt=attempt, index=index)


def resumed() -> list[Segment]:
    """Three segments over two attempts: five tokens of which one is a tool's, then a turn that a halt cut in two."""
    return [
        segment(key(), [1, 2], [3, 4, 5], ((1, 0, 1), (2, 1, 3))),
        segment(key(), [6], [7, 8], ((2, 0, 2),), mask=[0, 1]),
        segment(key(attempt=1), [], [9, 10, 11], ((2, 0, 1), (4, 1, 3))),
    ]


def ages_of(segments: list[Segment], step: int = 3) -> list[list[int]]:
    """Staleness of the tokens of each segment."""
    return _by_segment(segments, staleness_of(segments, step, STEPS))


def masks_of(segments: list[Segment], masking: Masking, step: int = 3) -> list[list[int]]:
    """Loss mask of each segment of one sample, computed beside another sample's."""
    other = [segment(key(9), [1], [2, 3], ((5, 0, 2),))]
    staleness_R = staleness_of([*other, *segments], step, STEPS)
    return _by_segment(segments, loss_mask_of([other, [], segments], staleness_R, masking)[2:])


def _by_segment(segments: list[Segment], values_R: NDArray[Any]) -> list[list[int]]:
    ends = np.cumsum([len(some.response_ids) for some in segments])
    assert len(values_R) == ends[-1]
    return [values.tolist() for values in np.split(values_R, ends[:-1])]


def batch_of(*samples: tuple[SampleKey, list[Segment]], step: int = 3, masking: Masking) -> TrainBatch:
    """Each sample as a group of its own."""
    groups: list[CollectedGroup] = []
    for sample, segments in samples:
        places = [(9, position) for position in range(len(segments))]
        payload = SegmentsPublished(group_id=sample.group_id, attempt=0, lease="lease", segments=tuple(segments))
        groups.append(CollectedGroup(group_of(sample.group_id, (summary(sample.index, places),)), {9: payload}))
    batch = assemble(step, groups, STEPS, masking)
    assert batch is not None
    return batch


def test_staleness_is_counted_in_train_steps_by_the_version_of_each_token() -> None:
    assert ages_of(resumed()) == [[3, 2, 2], [NOT_SAMPLED, 2], [2, 0, 0]]


def test_a_version_that_nobody_announced_is_older_than_all() -> None:
    assert ages_of([segment(key(), [1], [2], ((99, 0, 1),))]) == [[4]]


def test_versions_of_one_train_step_are_equally_old() -> None:
    assert ages_of([segment(key(), [1], [2, 3], ((4, 0, 1), (5, 1, 2)))]) == [[0, 0]]


MASKS = {
    "nothing asked for": (Masking(), [[1, 1, 1], [0, 1], [1, 1, 1]]),
    "off policy": (Masking(off_policy=True), [[0, 0, 0], [0, 0], [0, 1, 1]]),
    "at most two steps": (Masking(max_staleness=2), [[0, 1, 1], [0, 1], [1, 1, 1]]),
    "at most one": (Masking(max_staleness=1), [[0, 0, 0], [0, 0], [0, 1, 1]]),
    "both": (Masking(off_policy=True, max_staleness=2), [[0, 0, 0], [0, 0], [0, 1, 1]]),
}


@pytest.mark.parametrize(("masking", "expected"), MASKS.values(), ids=MASKS.keys())
def test_masks_of_a_sample_that_was_resumed(masking: Masking, expected: list[list[int]]) -> None:
    assert masks_of(resumed(), masking) == expected


def test_a_sample_of_old_weights_alone_is_masked_by_its_age_and_never_for_being_off_policy() -> None:
    old = [segment(key(), [1], [2, 3], ((1, 0, 2),))]
    assert masks_of(old, Masking(off_policy=True)) == [[1, 1]]
    assert masks_of(old, Masking(max_staleness=2)) == [[0, 0]]


def test_the_newest_weights_are_those_of_tokens_that_train() -> None:
    """A tool's answer under newer weights must not take the whole sample out."""
    turns = [
        segment(key(), [1], [2, 3], ((1, 0, 2),)),
        segment(key(), [], [4], ((2, 0, 1),), mask=[0]),
    ]
    assert masks_of(turns, Masking(off_policy=True)) == [[1, 1], [0]]


def test_what_is_masked_keeps_its_place_in_the_batch_and_loses_its_log_probs() -> None:
    batch = batch_of((key(), resumed()), masking=Masking(off_policy=True))
    assert batch.tokens_N.tolist() == list(range(1, 12))
    assert batch.loss_mask_N.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert batch.rollout_log_probs_N.tolist() == [0.0] * 9 + [-1.0] * 2


def test_staleness_is_told_per_token_and_per_group_masked_or_not() -> None:
    fresh = [segment(key(6), [1], [2, 3], ((4, 0, 1), (5, 1, 2)))]
    batch = batch_of((key(), resumed()), (key(6), fresh), masking=Masking(max_staleness=2))
    assert staleness_metrics(batch) == pytest.approx(
        {
            "rollout/staleness_mean": (3 + 2 + 2 + 2 + 2) / 9,  # tokens 3, 4, 5, 8, 9; 10 and 11 and group 6 are new
            "rollout/staleness_max": 3,
            "rollout/group_staleness_mean": (11 / 7 + 0) / 2,
            "rollout/group_staleness_max": 11 / 7,
            "rollout/off_policy_ratio": 5 / 9,
            "rollout/masked_ratio": 1 / 9,
        }
    )


def test_a_synchronous_batch_has_staleness_zero() -> None:
    fresh = [segment(key(), [1], [2, 3], ((4, 0, 2),))]
    metrics = staleness_metrics(batch_of((key(), fresh), masking=Masking(off_policy=True, max_staleness=0)))
    assert set(metrics.values()) == {0.0}


def test_what_the_recipe_asks_for_is_masked() -> None:
    def masking(**keys: object) -> Masking:
        return Masking.of(RolloutConfig(rollout_batch_size=1, max_response_len=1, **keys))  # pyright: ignore[reportArgumentType]

    assert masking() == masking(max_token_staleness=2) == Masking()
    assert masking(max_token_staleness=2, stale_tokens="mask") == Masking(max_staleness=2)
    assert masking(mask_off_policy=True) == Masking(off_policy=True)


@st.composite
def samples(draw: st.DrawFn) -> list[Segment]:
    """Segments of one sample over several attempts; versions never go down, as engines' do not."""
    made: list[Segment] = []
    version, attempt = 1, 0
    for _ in range(draw(st.integers(1, 4))):
        attempt += draw(st.integers(0, 1))
        spans: list[tuple[int, int, int]] = []
        end = 0
        for _ in range(draw(st.integers(1, 3))):
            version = draw(st.integers(version, 5))
            start, end = end, end + draw(st.integers(1, 3))
            spans.append((version, start, end))
        mask = draw(st.lists(st.integers(0, 1), min_size=end, max_size=end))
        made.append(
            segment(key(attempt=attempt), draw(st.lists(st.just(1), max_size=2)), [2] * end, tuple(spans), mask=mask)
        )
    return made


maskings = st.builds(Masking, off_policy=st.booleans(), max_staleness=st.none() | st.integers(0, 4))


@given(samples(), maskings, st.integers(3, 6))
def test_masks_only_take_away_and_exactly_what_they_say(segments: list[Segment], masking: Masking, step: int) -> None:
    masks = masks_of(segments, masking, step)
    versions = [
        version
        for some in segments
        for span in some.weight_spans
        for version in [span.version] * (span.end - span.start)
    ]
    given_N = [int(value) for some in segments for value in np.asarray(some.loss_mask)]
    newest = max((version for version, value in zip(versions, given_N, strict=True) if value), default=0)
    for version, before, after in zip(versions, given_N, np.concatenate(masks).tolist(), strict=True):
        too_old = masking.max_staleness is not None and step - STEPS[version] > masking.max_staleness
        off_policy = masking.off_policy and version < newest
        assert after == (before and not too_old and not off_policy)


@given(samples(), maskings, st.integers(3, 6))
def test_masking_changes_the_mask_and_nothing_else_that_is_told(
    segments: list[Segment], masking: Masking, step: int
) -> None:
    plain = batch_of((key(), segments), step=step, masking=Masking())
    masked = batch_of((key(), segments), step=step, masking=masking)
    assert np.array_equal(plain.tokens_N, masked.tokens_N)
    assert np.array_equal(plain.staleness_N, masked.staleness_N)
    told, expected = staleness_metrics(masked), staleness_metrics(plain)
    assert told.pop("rollout/masked_ratio", 0.0) >= expected.pop("rollout/masked_ratio", 0.0) == 0.0
    assert told == expected
