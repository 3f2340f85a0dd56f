"""Log-probs and entropy against torch's own softmax, forward and backward, and what they cost in memory."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from actors.trainer.algorithms import log_probs
from actors.trainer.algorithms.log_probs import log_probs_and_entropy

TEMPERATURE = 0.7
TARGETS = torch.tensor([0, 10, 4, 3, 3])
SIZES = {
    "one chunk": {},
    "two rows a chunk": {"CHUNK_ELEMENTS": {"cpu": 22}},
    "two rows a chunk, one kept": {"CHUNK_ELEMENTS": {"cpu": 22}, "KEPT_ELEMENTS": 22},
    "none kept": {"KEPT_ELEMENTS": 0},
}


def example(scale: float = 3.0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 6, generator=generator), torch.randn(11, 6, generator=generator)
    return (hidden * scale).to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def reference(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scaled = F.log_softmax(hidden @ weight.T / TEMPERATURE, dim=-1)
    return scaled[torch.arange(len(TARGETS)), TARGETS], -(scaled.exp() * scaled).sum(-1)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("scale", [3.0, 30.0])
@pytest.mark.parametrize("entropy", [0.3, 0.0])
def test_values_and_gradients_equal_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], scale: float, entropy: float
) -> None:
    for name, value in sizes.items():
        monkeypatch.setattr(log_probs, name, value)
    given, exact = example(scale), [tensor.detach().double().requires_grad_() for tensor in example(scale)]
    result = log_probs_and_entropy(*given, TARGETS, temperature=TEMPERATURE)
    expected = reference(exact[0], exact[1])
    for value, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-4)
    mix = torch.arange(1.0, 6.0)
    loss = result[0] @ mix
    (loss + entropy * (result[1] @ mix.flip(0)) if entropy else loss).backward()
    (expected[0] @ mix.double() + entropy * (expected[1] @ mix.flip(0).double())).backward()
    for one, other in zip(given, exact, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-3)


def test_no_position_at_all_gives_a_zero_gradient() -> None:
    hidden, weight = example()
    values, entropy = log_probs_and_entropy(hidden[:0], weight, TARGETS[:0])
    (values.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_in_bfloat16_sums_are_of_float32() -> None:
    hidden, weight = example(0.5, torch.bfloat16)
    result = log_probs_and_entropy(hidden, weight, TARGETS, temperature=TEMPERATURE)
    expected = reference(hidden.double(), weight.double())
    assert result[0].dtype is torch.float32
    torch.testing.assert_close(result[0].double(), expected[0], rtol=0, atol=3e-2)
    result[0].sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.bfloat16


class Largest(TorchDispatchMode):
    """Remembers the most elements that a tensor of two dimensions or more had, the weight's shape not counted."""

    def __init__(self, without: torch.Size) -> None:
        super().__init__()
        self._without = without
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape not in (self._without, self._without[::-1]):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("kept", [0, 40_000])
def test_logits_exist_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    chunk, vocabulary, positions = 20_000, 5_000, 300  # 1,500,000 logits in all
    monkeypatch.setattr(log_probs, "CHUNK_ELEMENTS", {"cpu": chunk})
    monkeypatch.setattr(log_probs, "KEPT_ELEMENTS", kept)
    hidden, weight = torch.randn(positions, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)
    with Largest(weight.shape) as largest:
        values, _ = log_probs_and_entropy(hidden, weight, torch.zeros(positions, dtype=torch.long))
        assert values.grad_fn is not None
        held = values.grad_fn.kept  # pyright: ignore[reportAttributeAccessIssue]
        assert sum(logits.numel() for logits in held.values()) == kept
        values.sum().backward()
    assert 0 < largest.elements <= chunk
    assert not held, "the backward pass keeps nothing"
