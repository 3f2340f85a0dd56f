"""Fused rotary embedding, RMSNorm and SwiGLU without a compiler or custom kernels, which Megatron's own need."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _Rotated(torch.autograd.Function):
    """Rotary embedding of [s, b, heads, d]. The result has the memory layout of attention: [b, heads, s, d]."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(cos, sin)
        length, batch, heads, size = vectors.shape
        out = vectors.new_empty(batch, heads, length, size).permute(2, 0, 1, 3)
        return _rotate(vectors, cos, sin, 1, out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _rotate(gradient, cos, sin, -1, gradient.new_empty(gradient.shape)), None, None


def _rotate(vectors: Tensor, cos: Tensor, sin: Tensor, sign: int, out: Tensor) -> Tensor:
    """Rotate the vectors. The two halves of each vector are the coordinates of its planes."""
    torch.mul(vectors, cos, out=out)
    (first, second), (out_first, out_second) = vectors.chunk(2, -1), out.chunk(2, -1)
    sin = sin.chunk(2, -1)[0]
    out_first.addcmul_(second, sin, value=-sign)
    out_second.addcmul_(first, sin, value=sign)
    return out


def rotary(general: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap Megatron's rotary embedding: use `_Rotated` in the usual case.

    Args:
        general: Megatron's own function, `_apply_rotary_pos_emb_bshd`.
    """

    def apply(
        t: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
    ) -> Tensor:
        is_usual = t.dim() == 4 and freqs.size(-1) == t.size(-1) and mscale == 1.0
        if rotary_interleaved or multi_latent_attention or not is_usual:
            return general(t, freqs, rotary_interleaved, multi_latent_attention, mscale)
        rotated: Any = _Rotated.apply(t, freqs.cos().to(t.dtype), freqs.sin().to(t.dtype))
        return rotated

    return apply


def packed_rotary(general: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make the rotary embedding of a packed row, [t, heads, d], without reading from the device.

    Megatron-core's own function copies the sequence starts from the device to the host.

    Args:
        general: Megatron's function for padded rows, `_apply_rotary_pos_emb_bshd`.
    """

    def apply(
        t: Tensor,
        cu_seqlens: Any,  # our `Positions`
        freqs: Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
        cp_group: Any = None,
    ) -> Tensor:
        row = t[:, None]
        is_usual = freqs.size(-1) == t.size(-1) and mscale == 1.0
        if rotary_interleaved or multi_latent_attention or not is_usual:
            angles = cu_seqlens.angles(freqs)
            return general(row, angles, rotary_interleaved, multi_latent_attention, mscale)[:, 0]
        rotated: Any = _Rotated.apply(row, *cu_seqlens.waves(freqs, t.dtype))
        return rotated[:, 0]

    return apply


class _RmsNorm(torch.autograd.Function):
    """RMSNorm in float32. Autograd would save and traverse every product of the formula."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, eps: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        wide = values.float()
        squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale = squares.div_(values.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(values, weight, scale)
        return _scaled(values, wide, scale).mul_(weight).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        values, weight, scale = ctx.saved_tensors
        normal = _scaled(values, values.float(), scale)
        wide, wide_weight = gradient.float(), weight.float()
        products = wide * normal
        along = (products @ wide_weight).div_(values.size(-1))[..., None]
        of_values = (wide * wide_weight).addcmul_(normal, along, value=-1).mul_(scale)
        return of_values.to(values.dtype), products.flatten(0, -2).sum(0).to(weight.dtype), None


def _scaled(values: Tensor, wide: Tensor, scale: Tensor) -> Tensor:
    """Return `wide` times `scale`: in place if it is a float32 copy of `values`."""
    return wide * scale if wide is values else wide.mul_(scale)


def rms_norm(values: Tensor, weight: Tensor, eps: float, *, is_centred: bool = False) -> Tensor:
    """Divide values by the root mean square along the last dimension, and multiply by a weight.

    Args:
        values: [..., n].
        weight: [n].
        eps: Added to the mean square.
        is_centred: Multiply by 1 plus the weight, a sum that bfloat16 would round.
    """
    if is_centred:
        weight = (weight.float() if weight.dtype is torch.bfloat16 else weight) + 1.0
    elif values.is_cuda or values.dtype not in (
        torch.float32,
        torch.bfloat16,
    ):  # torch has a kernel that sums in float32
        return F.rms_norm(values, weight.shape, weight, eps)
    normal: Any = _RmsNorm.apply(values, weight, eps)
    return normal


def swiglu(joined: Tensor) -> Tensor:
    """SwiGLU of concatenated gate and value, for Megatron's own autograd function."""
    gate, value = joined.chunk(2, -1)
    return F.silu(gate).mul_(value)


def swiglu_back(gradient: Tensor, joined: Tensor) -> Tensor:
    """Return the gradient of concatenated gate and value."""
    gate, value = joined.chunk(2, -1)
    out = torch.empty_like(joined)
    of_gate, of_value = out.chunk(2, -1)
    torch.mul(gradient, F.silu(gate), out=of_value)
    torch.ops.aten.silu_backward.grad_input(gradient * value, gate, grad_input=of_gate)
    return out
