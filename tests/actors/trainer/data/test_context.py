"""Context-parallel ranks share every sequence without rest, and their micro-batches together are the whole one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.data.batch import MicroBatch, TrainBatch, make_micro_batch
from actors.trainer.data.context import Context
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
        read = np.concatenate([part.sources[part.sources >= 0] for part in parts])
        assert sorted(read) == sorted(whole.sources[whole.sources >= 0])
        assert sum(part.num_tokens for part in parts) == np.maximum(batch.lengths_B[samples] - 1, 0).sum()
        assert {part.num_sequences for part in parts} == {parts[0].num_sequences}
        for part in parts:  # positions of one sequence read one sample
            pairs = {(sequence, sample) for sequence, sample in zip(*_of_tokens(batch, part), strict=True)}
            assert len(pairs) == len({sequence for sequence, _ in pairs}) == len({sample for _, sample in pairs})


def _of_tokens(batch: TrainBatch, part: MicroBatch) -> tuple[list[int], list[int]]:
    """The sequence and the sample of each token."""
    is_token = part.sources >= 0
    samples = np.searchsorted(batch.starts_B, part.sources[is_token], side="right") - 1
    return part.sequences[is_token].tolist(), samples.tolist()
