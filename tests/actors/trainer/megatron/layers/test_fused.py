"""Our few operations against the formulae that they stand for, forward and backward."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.trainer.megatron.layers import fused
from actors.trainer.megatron.layers.attention import _short

ANGLES = torch.rand(5, 1, 1, 4, generator=torch.Generator().manual_seed(1)).repeat(1, 1, 1, 2) * 3


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def same(found: Callable[..., Tensor], expected: Callable[..., Tensor], *inputs: Tensor) -> None:
    given, exact = ([tensor.clone().to(dtype).requires_grad_() for tensor in inputs] for dtype in (None, torch.double))
    one, other = found(*given), expected(*exact)
    torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    mix = random(*one.shape)
    gradients = [
        torch.autograd.grad(result, into, mix.to(result.dtype)) for result, into in ((one, given), (other, exact))
    ]
    for mine, true in zip(*gradients, strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=1e-5)


def rotated(vectors: Tensor) -> Tensor:
    """By complex numbers: each plane is turned by its angle."""
    first, second = vectors.chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones(()).double(), ANGLES[..., :4].double())
    return torch.cat([turned.real, turned.imag], dim=-1)


def test_rotary_embedding_turns_each_plane_by_its_angle() -> None:
    apply = fused.rotary(lambda *_: pytest.fail("the usual form is ours"))
    same(lambda vectors: apply(vectors, ANGLES), rotated, random(5, 3, 2, 8))


@pytest.mark.parametrize("options", [{"rotary_interleaved": True}, {"mscale": 2.0}, {"multi_latent_attention": True}])
def test_other_rotary_embeddings_are_megatrons(options: dict[str, object]) -> None:
    apply = fused.rotary(lambda *_: torch.zeros(1))
    assert not apply(random(5, 3, 2, 8), ANGLES, **options).any()
    assert not apply(random(5, 3, 2, 10), ANGLES).any()


def test_rms_norm() -> None:
    same(
        lambda values, weight: fused.rms_norm(values, weight, 1e-3),
        lambda values, weight: F.rms_norm(values, weight.shape, weight, 1e-3),
        random(3, 4, 6),
        random(6) + 2,
    )


def test_rms_norm_in_bfloat16_is_rounded_once() -> None:
    """Outputs and gradients are those in float64 of the same numbers, up to the rounding of the result."""
    given = [random(30, 2, 64).bfloat16(), (random(64) + 2).bfloat16()]
    gradient = random(30, 2, 64).bfloat16()
    found = [each.clone().requires_grad_() for each in given]
    expected = [each.double().requires_grad_() for each in given]
    out = fused.rms_norm(*found, 1e-3)
    exact = F.rms_norm(expected[0], (64,), expected[1], 1e-3)
    out.backward(gradient)
    exact.backward(gradient.double())
    for one, other in ((out, exact), *((own.grad, far.grad) for own, far in zip(found, expected, strict=True))):
        assert one is not None
        assert other is not None
        assert one.dtype is torch.bfloat16
        torch.testing.assert_close(one.double(), other, rtol=2**-8, atol=1e-5)


class Swiglu(torch.autograd.Function):
    """As Megatron's."""

    @staticmethod
    def forward(ctx, joined):
        ctx.save_for_backward(joined)
        return fused.swiglu(joined)

    @staticmethod
    def backward(ctx, gradient):
        return fused.swiglu_back(gradient, *ctx.saved_tensors)


def test_swiglu() -> None:
    def formula(joined: Tensor) -> Tensor:
        gate, value = joined.chunk(2, -1)
        return F.silu(gate) * value

    same(Swiglu.apply, formula, random(7, 10))


@pytest.mark.parametrize("heads", [2, 4])
def test_attention_of_short_sequences_is_torchs(heads: int) -> None:
    same(
        lambda query, key, value: _short(query, key, value, None),
        lambda query, key, value: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True),
        random(3, heads, 7, 8),
        random(3, 2, 7, 8) + 0.1,
        random(3, 2, 7, 8) - 0.1,
    )
