"""Log-probs and entropy against torch's own softmax, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from actors.trainer.algorithms import log_probs
from actors.trainer.algorithms.log_probs import log_probs_and_entropy

TEMPERATURE = 0.7
ROWS = torch.tensor([0, 2, 3, 7, 8])
TARGETS = torch.tensor([0, 10, 4, 3, 3])


def example(scale: float = 3.0) -> torch.Tensor:
    return (torch.randn(9, 11, generator=torch.Generator().manual_seed(0)) * scale).requires_grad_()


def reference(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scaled = F.log_softmax(logits[ROWS].double() / TEMPERATURE, dim=-1)
    return scaled[torch.arange(len(ROWS)), TARGETS], -(scaled.exp() * scaled).sum(-1)


@pytest.mark.parametrize("chunk_elements", [1 << 24, 22], ids=["one chunk", "two rows a chunk"])
@pytest.mark.parametrize("scale", [3.0, 60.0])
def test_values_and_gradients_equal_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, chunk_elements: int, scale: float
) -> None:
    monkeypatch.setattr(log_probs, "CHUNK_ELEMENTS", chunk_elements)
    logits, expected_logits = example(scale), example(scale)
    result = log_probs_and_entropy(logits, ROWS, TARGETS, temperature=TEMPERATURE)
    expected = reference(expected_logits)
    for value, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-5)
    mix = torch.arange(1.0, 6.0)
    (result[0] @ mix + 0.3 * (result[1] @ mix.flip(0))).backward()
    (expected[0] @ mix.double() + 0.3 * (expected[1] @ mix.flip(0).double())).backward()
    torch.testing.assert_close(logits.grad, expected_logits.grad, rtol=1e-4, atol=1e-5)


def test_positions_that_are_not_asked_for_get_no_gradient() -> None:
    logits = example()
    log_probs_and_entropy(logits, ROWS, TARGETS)[0].sum().backward()
    assert logits.grad is not None
    assert not logits.grad[torch.tensor([1, 4, 5, 6])].any()


def test_no_position_at_all_gives_a_zero_gradient() -> None:
    logits = example()
    nothing = torch.empty(0, dtype=torch.long)
    values, entropy = log_probs_and_entropy(logits, nothing, nothing)
    (values.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert not logits.grad.any()


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits = example().detach().bfloat16()
    result = log_probs_and_entropy(logits, ROWS, TARGETS, temperature=TEMPERATURE)
    torch.testing.assert_close(result[0].double(), reference(logits)[0], rtol=1e-5, atol=1e-5)
