"""What an MTP layer reads and predicts, against a walk over the samples, token by token."""

import numpy as np
import pytest

from actors.trainer.data.batch import make_micro_batch, num_mtp_tokens, with_mtp
from actors.trainer.data.context import Context
from tests.actors.trainer.tiny import random_batch


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_each_token_that_trains_is_predicted_from_two_before_it(packed: bool, size: int) -> None:
    batch, samples = random_batch(), np.arange(3, 14)
    expected = set()
    for sample in samples:
        start, end = int(batch.starts_B[sample]), int(batch.starts_B[sample] + batch.lengths_B[sample])
        for column in range(start + 2, end):
            if batch.loss_mask_N[column]:
                expected.add((column - 2, int(batch.tokens_N[column - 1]), int(batch.tokens_N[column])))
    found = set()
    for rank in range(size):
        context = Context(rank, size)
        part = make_micro_batch(batch, samples, packed=packed, multiple=context.multiple, context=context)
        mtp = with_mtp(batch, part).mtp
        assert mtp is not None
        assert mtp.tokens.shape == part.tokens.shape
        sources, tokens = part.sources.ravel()[mtp.rows_F], mtp.tokens.ravel()[mtp.rows_F]
        found |= set(zip(sources.tolist(), tokens.tolist(), mtp.targets_F.tolist(), strict=True))
    assert found == expected
    assert num_mtp_tokens(batch, samples) == len(expected)


def test_an_empty_micro_batch_predicts_nothing() -> None:
    batch = random_batch()
    empty = make_micro_batch(batch, np.arange(0), packed=True, multiple=4)
    mtp = with_mtp(batch, empty).mtp
    assert mtp is not None
    assert mtp.tokens.tolist() == [[0, 0, 0, 0]]
    assert len(mtp.rows_F) == len(mtp.targets_F) == num_mtp_tokens(batch, np.arange(0)) == 0
