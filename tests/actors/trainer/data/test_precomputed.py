"""Columns that are known before there is a batch."""

from dataclasses import replace

import numpy as np

from actors.trainer.data.precomputed import KnownLogProbs, LogProbs, unknown_groups
from tests.actors.trainer.tiny import random_batch

BATCH = random_batch(num_groups=3)
SEQS = {0: 10, 1: 20, 2: 30}
SIZES = [int(BATCH.lengths_B[BATCH.groups_B == group].sum()) for group in range(3)]


def column(group: int, value: float) -> np.ndarray:
    return np.full(SIZES[group], value, dtype=np.float32)


def test_what_is_known_of_a_group_stands_where_its_tokens_are() -> None:
    known = KnownLogProbs()
    known.add(10, LogProbs(column(0, -1), column(0, -2)))
    known.add(30, LogProbs(old_N=column(2, -3)))
    batch, share = known.put_into(BATCH, SEQS)
    assert batch.ref_log_probs_N is not None
    assert batch.old_log_probs_N is not None
    nothing = [np.nan] * SIZES[1]
    np.testing.assert_array_equal(batch.ref_log_probs_N, [*column(0, -1), *nothing, *[np.nan] * SIZES[2]])
    np.testing.assert_array_equal(batch.old_log_probs_N, [*column(0, -2), *nothing, *column(2, -3)])
    assert share == 2 / 3
    assert unknown_groups(batch, batch.ref_log_probs_N, batch.groups_B).tolist() == [1, 2]
    assert unknown_groups(batch, batch.old_log_probs_N, np.array([0, 2])).tolist() == []


def test_when_weights_move_the_old_ones_are_forgotten_and_groups_that_are_over() -> None:
    known = KnownLogProbs()
    known.add(10, LogProbs(column(0, -1), column(0, -2)))
    known.add(20, LogProbs(column(1, -1)))
    known.add(30, LogProbs(old_N=column(2, -3)))
    known.weights_moved({10: None, 30: None})
    assert [seq in known for seq in (10, 20, 30)] == [True, False, False]
    batch, _ = known.put_into(BATCH, SEQS)
    assert batch.old_log_probs_N is not None
    assert np.isnan(batch.old_log_probs_N).all()


def test_there_is_room_up_to_the_limit() -> None:
    known = KnownLogProbs(max_bytes=SIZES[0] * 8)
    known.add(10, LogProbs(column(0, -1)))
    assert known.has_room()
    known.add(11, LogProbs(column(0, -1)))
    assert not known.has_room()
    known.weights_moved({10: None})
    assert known.has_room()


def test_a_number_that_is_none_makes_its_group_unknown() -> None:
    values = np.zeros_like(BATCH.rollout_log_probs_N)
    values[-1] = np.nan
    assert unknown_groups(replace(BATCH, ref_log_probs_N=values), values, BATCH.groups_B).tolist() == [2]
