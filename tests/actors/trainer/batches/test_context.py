"""Context-parallel ranks share every sequence without rest, and their micro-batches together are the whole one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.batches.batch import make_micro_batch, num_positions
from actors.trainer.batches.context import Context
from tests.actors.trainer.tiny import random_batch


def test_a_rank_has_a_chunk_of_the_front_and_one_of_the_back() -> None:
    lengths = np.array([4, 8])
    assert Context(0, 2).kept(lengths).tolist() == [0, 3, 4, 5, 10, 11]
    assert Context(1, 2).kept(lengths).tolist() == [1, 2, 6, 7, 8, 9]
    assert Context(0, 1).kept(lengths).tolist() == list(range(12))
    assert Context(0, 1).multiple == 1


@given(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_the_parts_are_a_partition_that_order_puts_together(size: int, chunks: list[int]) -> None:
    lengths = np.array(chunks) * Context(0, size).multiple
    parts = [Context(rank, size).kept(lengths) for rank in range(size)]
    assert {len(part) for part in parts} == {int(lengths.sum()) // size}
    together = np.concatenate(parts)
    assert together[Context(0, size).order(lengths)].tolist() == list(range(int(lengths.sum())))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tensor", [1, 2])
def test_micro_batches_of_all_ranks_are_the_whole_one(packed: bool, tensor: int) -> None:
    batch, size = random_batch(), 2
    multiple = Context(0, size).multiple * tensor
    for samples in (np.arange(0), np.arange(1), np.arange(3, 9)):
        parts = [
            make_micro_batch(batch, samples, packed=packed, multiple=multiple, context=Context(rank, size))
            for rank in range(size)
        ]
        whole = make_micro_batch(batch, samples, packed=False)
        assert sorted(np.concatenate([part.columns_M for part in parts])) == sorted(whole.columns_M)
        for part in parts:
            assert part.targets_M.tolist() == batch.tokens_N[part.columns_M].tolist()
            read = part.tokens.ravel()[part.rows_M]  # the token before the one that is predicted
            assert read.tolist() == batch.tokens_N[part.columns_M - 1].tolist()
            assert part.tokens.shape[1] % tensor == 0
        context = Context(0, size)
        positions = num_positions(batch.lengths_B, samples, packed=packed, multiple=multiple, context=context)
        assert positions == sum(part.tokens.size for part in parts)
