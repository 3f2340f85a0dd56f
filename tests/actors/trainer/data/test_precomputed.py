"""Columns that are known before there is a batch."""

from dataclasses import replace

import numpy as np

from actors.trainer.data.precomputed import LogProbs, PrecomputedLogProbs, groups_to_compute
from tests.actors.trainer.tiny import random_batch

BATCH = random_batch(num_groups=3)
SEQS = {0: 10, 1: 20, 2: 30}
SIZES = [int(BATCH.lengths_B[BATCH.groups_B == group].sum()) for group in range(3)]


def column(group: int, value: float) -> np.ndarray:
    return np.full(SIZES[group], value, dtype=np.float32)


def test_what_is_known_of_a_group_stands_where_its_tokens_are() -> None:
    precomputed = PrecomputedLogProbs()
    precomputed.add(10, LogProbs(column(0, -1), column(0, -2)))
    precomputed.add(30, LogProbs(old_N=column(2, -3)))
    batch, share = precomputed.put_into(BATCH, SEQS)
    assert batch.ref_log_probs_N is not None
    assert batch.old_log_probs_N is not None
    nothing = [np.nan] * SIZES[1]
    np.testing.assert_array_equal(batch.ref_log_probs_N, [*column(0, -1), *nothing, *[np.nan] * SIZES[2]])
    np.testing.assert_array_equal(batch.old_log_probs_N, [*column(0, -2), *nothing, *column(2, -3)])
    assert share == 2 / 3
    assert groups_to_compute(batch, batch.ref_log_probs_N, batch.groups_B).tolist() == [1, 2]
    assert groups_to_compute(batch, batch.old_log_probs_N, np.array([0, 2])).tolist() == []


def test_when_weights_move_the_old_ones_are_forgotten_and_groups_that_are_over() -> None:
    precomputed = PrecomputedLogProbs()
    precomputed.add(10, LogProbs(column(0, -1), column(0, -2)))
    precomputed.add(20, LogProbs(column(1, -1)))
    precomputed.add(30, LogProbs(old_N=column(2, -3)))
    precomputed.weights_moved({10: None, 30: None})
    assert [seq in precomputed for seq in (10, 20, 30)] == [True, False, False]
    batch, _ = precomputed.put_into(BATCH, SEQS)
    assert batch.old_log_probs_N is not None
    assert np.isnan(batch.old_log_probs_N).all()


def test_there_is_room_up_to_the_limit() -> None:
    precomputed = PrecomputedLogProbs(max_bytes=SIZES[0] * 8)
    precomputed.add(10, LogProbs(column(0, -1)))
    assert precomputed.has_room()
    precomputed.add(11, LogProbs(column(0, -1)))
    assert not precomputed.has_room()
    precomputed.weights_moved({10: None})
    assert precomputed.has_room()


def test_a_number_that_is_none_makes_its_group_unknown() -> None:
    values = np.zeros_like(BATCH.rollout_log_probs_N)
    values[-1] = np.nan
    assert groups_to_compute(replace(BATCH, ref_log_probs_N=values), values, BATCH.groups_B).tolist() == [2]
