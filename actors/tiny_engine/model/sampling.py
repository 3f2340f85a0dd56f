"""Samples one token per running request, with a fast path if no request truncates its distribution.

Sampling inverts the cumulative distribution at one uniform number, a hash of the request's seed and the token's
absolute position. Up to rounding in matrix products, a request's samples thus do not depend on concurrent requests.
A request continued from its own tokens under the same seed samples the same tokens as without the interruption.
"""

import hashlib
from typing import Final, NamedTuple

import torch
from torch import Tensor

# SplitMix64's constants, as signed integers for torch.
_GOLDEN: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2: Final = 0x94D049BB133111EB - (1 << 64)
_MASK_34: Final = (1 << 34) - 1  # arithmetic right shifts copy the sign; these masks clear it
_MASK_37: Final = (1 << 37) - 1
_MASK_23: Final = (1 << 23) - 1


def request_seed(*parts: object) -> int:
    """Hash values that distinguish requests into a 63-bit seed."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Uniform float32 numbers in [0, 1), multiples of 2**-23, one per (seed, position): SplitMix64.

    Args:
        seeds: [n] int64.
        positions: [n] int64.
    """
    z = torch.add(seeds, positions, alpha=_GOLDEN)
    z = (z ^ ((z >> 30) & _MASK_34)) * _MIX_1
    z = (z ^ ((z >> 27) & _MASK_37)) * _MIX_2
    return ((z >> 41) & _MASK_23).to(torch.float32).mul_(2.0**-23)


def draw(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Sample one token per row.

    Args:
        log_probs: [n, vocabulary], normalized.
        uniform: [n] in [0, 1).

    Returns:
        Tokens [n], none with probability zero: scaling by the last sum keeps the target below it despite rounding.
    """
    cumulative = log_probs.exp().cumsum_(-1)
    target = uniform.unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


class Truncated(NamedTuple):
    """What top-k, top-p and min-p leave of a distribution per row, [n, vocabulary], likeliest tokens first."""

    probs: Tensor  # not normalized; 0 where the token is not kept
    tokens: Tensor


def truncated(log_probs: Tensor, *, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Truncated:
    """Apply top-k, top-p and min-p, with SGLang's definitions.

    Args:
        log_probs: [n, vocabulary], normalized.
        top_k: [n] number of most likely tokens to keep, at least 1.
        top_p: [n] keeps a token if the more likely ones sum to at most this.
        min_p: [n] keeps a token if its probability is at least this share of the highest one.
    """
    probs, order = log_probs.exp().sort(dim=-1, descending=True, stable=True)
    keep = (probs.cumsum(-1) - probs) <= top_p.unsqueeze(-1)
    keep &= torch.arange(probs.shape[-1]) < top_k.unsqueeze(-1)
    keep &= probs >= min_p.unsqueeze(-1) * probs[:, :1]
    return Truncated(torch.where(keep, probs, 0.0), order)


def draw_truncated(kept: Truncated, uniform: Tensor) -> Tensor:
    """Sample one token per row, given what is kept and uniform numbers [n] in [0, 1)."""
    cumulative = kept.probs.cumsum(-1)
    target = uniform.unsqueeze(-1) * cumulative[:, -1:]
    ranks = torch.searchsorted(cumulative, target, right=True)
    ranks.clamp_(max=kept.tokens.shape[-1] - 1)  # NaNs yield an index past the last one
    return kept.tokens.gather(-1, ranks).squeeze(-1)


def sampling_mask(kept: Truncated, row: int, token: int) -> tuple[list[int], float]:
    """Return the kept tokens of a row, likeliest first, and the natural log-prob of one of them among them."""
    probs = kept.probs[row]
    number = int((probs > 0).sum())
    tokens = kept.tokens[row, :number]
    own = probs[:number][tokens == token].sum()
    return tokens.tolist(), float((own / probs.sum()).log())
