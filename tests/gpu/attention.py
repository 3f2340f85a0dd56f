"""The trainer's attention on packed rows against torch's SDPA, sequence by sequence, forward and backward."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.trainer.megatron import groups as ranks
from actors.trainer.megatron.layers.attention import CoreAttention
from actors.trainer.megatron.layers.rows import packing
from runtime.settings.tables.trainer import MegatronConfig
from tests.gpu.measured import Measured, forget_peak, peak_bytes, seconds

NO_WORSE: float = 2.0  # times SDPA's own error in the same dtype, from what it is in float32


class Size(NamedTuple):
    """Of the sequences and heads."""

    lengths: tuple[int, ...]
    heads: int = 16
    kv_heads: int = 8
    head_size: int = 128
    value_size: int = 128
    times: int = 20


FULL = Size((1, 17, 300, 1023, 2048, 4096, 707))
TINY = Size((1, 5, 30, 17), heads=4, kv_heads=2, head_size=16, value_size=16, times=1)
LATENT = {"heads": 16, "kv_heads": 16, "head_size": 192, "value_size": 128}  # DeepSeek-V3's sizes


def attention(device: str, *, tiny: bool = False) -> Measured:
    """On a GPU in bfloat16, by the variable-length kernel; on the CPU in float32, by the mask."""
    return _compared(device, TINY if tiny else FULL)


def latent_attention(device: str, *, tiny: bool = False) -> Measured:
    """The same of multi-latent attention, whose values are smaller than its queries and keys."""
    return _compared(device, TINY._replace(kv_heads=4, value_size=10) if tiny else FULL._replace(**LATENT))


def _compared(device: str, size: Size) -> Measured:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    ranks.join(ranks.Ranks(), MegatronConfig(), torch.device(device), seed=1)
    generator = torch.Generator(device=device).manual_seed(1)
    total = sum(size.lengths)
    shapes = [(size.heads, size.head_size), (size.kv_heads, size.head_size), (size.kv_heads, size.value_size)]
    query, key, value, gradient = (
        torch.randn((total, *shape), generator=generator, device=device, dtype=dtype)
        for shape in (*shapes, (size.heads, size.value_size))
    )
    packed = packing(np.concatenate([[0], np.cumsum(size.lengths)]).astype(np.int32), torch.device(device))
    layer = CoreAttention(None, 1, None, "self")

    def ours() -> list[Tensor]:
        return _with_gradients(
            lambda *inputs: layer(*inputs, None, packed_seq_params=packed), query, key, value, gradient
        )

    def by_sdpa() -> list[Tensor]:
        return _with_gradients(lambda *inputs: _one_by_one(*inputs, size.lengths), query, key, value, gradient)

    wide = [tensor.float() for tensor in (query, key, value, gradient)]
    exact = _with_gradients(lambda *inputs: _one_by_one(*inputs, size.lengths), *wide)
    numbers: dict[str, object] = {"dtype": str(dtype), "tokens": total, "sequences": len(size.lengths)}
    problems: list[str] = []
    names = ("output", "query gradient", "key gradient", "value gradient")
    for name, own, other, right in zip(names, ours(), by_sdpa(), exact, strict=True):
        errors = {"ours": _error(own, right), "sdpa": _error(other, right)}
        numbers[name] = errors
        if not errors["ours"] <= NO_WORSE * errors["sdpa"] + 1e-5:
            problems.append(f"{name}: {errors}")
    for name, call in {"ours": ours, "sdpa": by_sdpa}.items():
        forget_peak(device)
        numbers[f"{name} ms"] = 1e3 * seconds(call, device, times=size.times)
        numbers[f"{name} bytes"] = peak_bytes(device)
    return Measured(numbers, problems)


def _with_gradients(call, query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> list[Tensor]:  # type: ignore[no-untyped-def]
    inputs = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
    output = call(*inputs).reshape(gradient.shape)
    output.backward(gradient)
    return [output.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
    parts: list[Tensor] = []
    for each in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        inputs = [tensor.transpose(0, 1)[None] for tensor in each]
        parts.append(F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(parts)


def _error(found: Tensor, right: Tensor) -> float:
    """The largest, relative to the largest number."""
    return float((found.float() - right).abs().max() / right.abs().max())
