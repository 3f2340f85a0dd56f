"""Log-probs and entropy against torch's own softmax, forward and backward, and what they cost in memory."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from actors.trainer.algorithms import log_probs
from actors.trainer.algorithms.log_probs import KeptTokens, log_probs_and_entropy
from tests.actors.trainer.measured import peak_of_tensors

TEMPERATURE = 0.7
TARGETS = torch.tensor([0, 10, 4, 3, 3])
SIZES = {
    "one chunk": {},
    "two rows a chunk": {"CHUNK_ELEMENTS": {"cpu": 22}, "LEAST_ROWS": 1},
    "two rows a chunk, one kept": {"CHUNK_ELEMENTS": {"cpu": 22}, "LEAST_ROWS": 1, "KEPT_ELEMENTS": {"cpu": 22}},
    "none kept": {"KEPT_ELEMENTS": {"cpu": 0}},
    "blocks of two rows": {"BLOCK_ELEMENTS": 22},
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


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_each_position_may_have_a_temperature_of_its_own(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any]
) -> None:
    """As if the positions were computed apart."""
    for name, value in sizes.items():
        monkeypatch.setattr(log_probs, name, value)
    temperatures, mix = torch.tensor([0.5, 2.0, 0.7, 1.0, 1.3]), torch.arange(1.0, 6.0)
    given, apart = example(), example()
    result = log_probs_and_entropy(*given, TARGETS, temperature=temperatures)
    rows = [
        log_probs_and_entropy(apart[0][[row]], apart[1], TARGETS[[row]], temperature=temperature)
        for row, temperature in enumerate(temperatures.tolist())
    ]
    expected = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    for value, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(value, wanted)
    (result[0] @ mix + result[1] @ mix.flip(0)).backward()
    (expected[0] @ mix + expected[1] @ mix.flip(0)).backward()
    for one, other in zip(given, apart, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_capped_logits_are_those_of_tanh(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any]) -> None:
    """Values and gradients, each position at a temperature of its own, with log-probs of further tokens."""
    for name, value in sizes.items():
        monkeypatch.setattr(log_probs, name, value)
    cap, temperatures, mix = 2.5, torch.tensor([0.5, 2.0, 0.7, 1.0, 1.3]), torch.arange(1.0, 6.0)
    further = torch.tensor([[0, 1], [2, 10], [4, 5], [9, 3], [0, 3]])
    given, exact = example(), [tensor.detach().double().requires_grad_() for tensor in example()]
    result = log_probs_and_entropy(*given, TARGETS, temperature=temperatures, cap=cap, topk_MK=further)
    capped = cap * torch.tanh(exact[0] @ exact[1].T / cap) / temperatures[:, None].double()
    whole = capped.log_softmax(-1)
    expected = whole[torch.arange(5), TARGETS], -(whole.exp() * whole).sum(-1), whole.gather(1, further)
    for value, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-5)
    weights = [mix, 0.3 * mix.flip(0), further.float()]
    sum((value * own).sum() for value, own in zip(result, weights, strict=True)).backward()
    sum((value * own).sum() for value, own in zip(expected, weights, strict=True)).backward()
    for one, other in zip(given, exact, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-4)


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
    monkeypatch.setattr(log_probs, "KEPT_ELEMENTS", {"cpu": kept})
    monkeypatch.setattr(log_probs, "LEAST_ROWS", 1)
    hidden, weight = torch.randn(positions, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)
    with Largest(weight.shape) as largest:
        values, _ = log_probs_and_entropy(hidden, weight, torch.zeros(positions, dtype=torch.long))
        assert values.grad_fn is not None
        held = values.grad_fn.kept  # pyright: ignore[reportAttributeAccessIssue]
        assert sum(logits.numel() for logits in held.values()) == kept
        values.sum().backward()
    assert 0 < largest.elements <= chunk
    assert not held, "the backward pass keeps nothing"


def test_a_chunk_is_not_copied_whole() -> None:
    hidden = torch.randn(256, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(20_000, 8, dtype=torch.bfloat16)
    logits = len(hidden) * len(weight) * 4

    def work() -> None:
        values, entropy = log_probs_and_entropy(hidden, weight, torch.zeros(len(hidden), dtype=torch.long))
        (values.sum() + entropy.sum()).backward()

    assert logits < peak_of_tensors(work) < 1.8 * logits


# Row 1 is not restricted, row 3 keeps its target alone, row 4 keeps unlikely tokens only.
KEPT = [[0, 3, 9], [], [4, 2], [3], [3, 10, 1, 5]]


def kept_tokens(kept: list[list[int]] = KEPT) -> KeptTokens:
    ids, counts = [token for row in kept for token in row], [len(row) for row in kept]
    return KeptTokens(torch.tensor(ids, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64))


def kept_reference(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-softmax over logits that are -inf outside of the kept tokens; entropy of the whole vocabulary."""
    logits = hidden @ weight.T / TEMPERATURE
    allowed = torch.zeros_like(logits, dtype=torch.bool)
    for row, tokens in enumerate(KEPT):
        allowed[row, tokens or slice(None)] = True
    masked = logits.masked_fill(~allowed, -torch.inf)
    whole = F.log_softmax(logits, dim=-1)
    return masked.log_softmax(-1)[torch.arange(len(TARGETS)), TARGETS], -(whole.exp() * whole).sum(-1)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize(("scale", "entropy"), [(3.0, 0.3), (3.0, 0.0), (30.0, 0.3)])
def test_log_probs_over_kept_tokens_equal_those_of_masked_logits(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], scale: float, entropy: float
) -> None:
    for name, value in sizes.items():
        monkeypatch.setattr(log_probs, name, value)
    given, exact = example(scale), [tensor.detach().double().requires_grad_() for tensor in example(scale)]
    result = log_probs_and_entropy(*given, TARGETS, temperature=TEMPERATURE, kept=kept_tokens())
    expected = kept_reference(exact[0], exact[1])
    for value, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-4)
    assert result[0][3] == 0.0
    mix = torch.arange(1.0, 6.0)
    loss = result[0] @ mix
    (loss + entropy * (result[1] @ mix.flip(0)) if entropy else loss).backward()
    (expected[0] @ mix.double() + entropy * (expected[1] @ mix.flip(0).double())).backward()
    for one, other in zip(given, exact, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-3)


def test_log_probs_over_kept_tokens_by_hand() -> None:
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [1.0], [2.0], [500.0]])
    for kept, wanted in (([0, 1], -0.31326169), ([1], 0.0), ([1, 2], -1.31326169), ([], -499.0)):
        value, _ = log_probs_and_entropy(hidden, weight, torch.tensor([1]), kept=kept_tokens([kept]))
        assert value.item() == pytest.approx(wanted, abs=1e-6)


def test_kept_tokens_of_the_whole_vocabulary_change_nothing() -> None:
    plain, restricted = example(), example()
    values, _ = log_probs_and_entropy(*plain, TARGETS)
    same, _ = log_probs_and_entropy(*restricted, TARGETS, kept=kept_tokens([[*range(11)]] * 5))
    torch.testing.assert_close(same, values, rtol=1e-6, atol=1e-6)
    values.sum().backward()
    same.sum().backward()
    for one, other in zip(plain, restricted, strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-5, atol=1e-5)


def test_no_kept_token_at_all_gives_a_zero_gradient() -> None:
    hidden, weight = example()
    values, _ = log_probs_and_entropy(hidden[:0], weight, TARGETS[:0], kept=kept_tokens([]))
    values.sum().backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()


TOPK = torch.tensor([[0, 3, 9], [10, 1, 0], [4, 2, 6], [3, 7, 8], [5, 10, 1]])  # rows 0, 3 and 4 contain their targets


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("scale", [3.0, 30.0])
@pytest.mark.parametrize("kept", [None, KEPT], ids=["whole vocabulary", "kept tokens"])
def test_log_probs_of_further_tokens_and_their_gradients_equal_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], scale: float, kept: list[list[int]] | None
) -> None:
    for name, value in sizes.items():
        monkeypatch.setattr(log_probs, name, value)
    given, exact = example(scale), [tensor.detach().double().requires_grad_() for tensor in example(scale)]
    tokens = None if kept is None else kept_tokens(kept)
    result = log_probs_and_entropy(*given, TARGETS, temperature=TEMPERATURE, kept=tokens, topk_MK=TOPK)
    targets, entropy = (reference if kept is None else kept_reference)(exact[0], exact[1])
    further = F.log_softmax(exact[0] @ exact[1].T / TEMPERATURE, dim=-1).gather(1, TOPK)
    for value, wanted in zip(result, (targets, entropy, further), strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-4)
    mix, weights = torch.arange(1.0, 6.0), torch.linspace(-1, 2, 15).reshape(5, 3)
    (result[0] @ mix + 0.3 * (result[1] @ mix.flip(0)) + (result[2] * weights).sum()).backward()
    (targets @ mix.double() + 0.3 * (entropy @ mix.flip(0).double()) + (further * weights).sum()).backward()
    for one, other in zip(given, exact, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-3)


def test_the_gradient_of_further_tokens_alone() -> None:
    given, exact = example(), [tensor.detach().double().requires_grad_() for tensor in example()]
    log_probs_and_entropy(*given, TARGETS, topk_MK=TOPK)[2].sum().backward()
    F.log_softmax(exact[0] @ exact[1].T, dim=-1).gather(1, TOPK).sum().backward()
    for one, other in zip(given, exact, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-4)
