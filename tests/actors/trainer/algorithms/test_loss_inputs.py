"""Sums over the sequences of a micro-batch."""

import pytest
import torch

from actors.trainer.algorithms.loss_inputs import Sequences


def test_every_token_gets_the_sum_and_the_mean_of_its_sequence() -> None:
    """Sequence 1 has no trained token on this rank."""
    sequences = Sequences(torch.tensor([0, 2, 0, 2, 2]), count=3)
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 6.0])
    assert sequences.sums(values).tolist() == [4.0, 12.0, 4.0, 12.0, 12.0]
    assert sequences.means(values).tolist() == [2.0, 4.0, 2.0, 4.0, 4.0]
    assert sequences.lengths.tolist() == [2, 3, 2, 3, 3]


def test_a_sum_passes_its_gradient_to_every_token_of_the_sequence() -> None:
    sequences = Sequences(torch.tensor([0, 1, 1]), count=2)
    values = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    (sequences.sums(values) * weights).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 110.0, 110.0]
    assert torch.autograd.gradcheck(lambda given: sequences.means(given).exp() * weights, values)


@pytest.mark.parametrize("count", [1, 3])
def test_no_tokens_have_no_sums(count: int) -> None:
    sequences = Sequences(torch.empty(0, dtype=torch.int64), count)
    assert sequences.means(torch.empty(0)).shape == (0,)
