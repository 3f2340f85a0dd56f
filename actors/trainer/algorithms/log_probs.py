"""Log-probs of given tokens and entropy, over a vocabulary that may be cut between ranks.

T positions, V vocabulary entries of this rank, M positions that are asked for.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # logits in float32 at a time: 64 MB


def log_probs_and_entropy(
    logits_TV: Tensor, rows_M: Tensor, targets_M: Tensor, *, temperature: float = 1.0, group: Any = None
) -> tuple[Tensor, Tensor]:
    """Natural log-probs of targets and entropies at the given rows, differentiable in the logits.

    Args:
        logits_TV: this rank's slice of the vocabulary, any float dtype.
        rows_M: positions, distinct.
        targets_M: token ids over the whole vocabulary.
        temperature: divides the logits, as it did when the tokens were sampled.
        group: ranks that share the vocabulary, in its order; none: this rank has all of it.

    Returns:
        Log-probs [M] and entropies [M], nats, float32.
    """
    log_probs, entropy = _LogProbsAndEntropy.apply(logits_TV, rows_M, targets_M, temperature, group)  # pyright: ignore
    return log_probs, entropy


class _LogProbsAndEntropy(torch.autograd.Function):
    """Both in one pass, in chunks, forward and backward: no float32 copy of all logits, no softmax kept.

    With p the softmax of z: d log p_t / dz = onehot - p, and dH / dz = -p (z - sum p z).
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, logits_TV: Tensor, rows_M: Tensor, targets_M: Tensor, temperature: float, group: Any
    ) -> tuple[Tensor, Tensor]:
        offset = 0 if group is None else dist.get_rank(group) * logits_TV.size(1)
        parts = [
            _forward_chunk(logits_TV[rows].float() / temperature, targets - offset, group)
            for rows, targets in _chunks(logits_TV, rows_M, targets_M)
        ]
        log_probs, log_sum, mean = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(logits_TV, rows_M, targets_M - offset, log_sum, mean)
        ctx.temperature = temperature
        return log_probs, log_sum - mean

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        logits_TV, rows_M, targets_M, log_sum, mean = ctx.saved_tensors
        gradient = torch.zeros_like(logits_TV)
        per_token = (targets_M, log_sum, mean, grad_log_probs, grad_entropy)
        for rows, *columns in _chunks(logits_TV, rows_M, *per_token):
            scaled = logits_TV[rows].float() / ctx.temperature
            gradient[rows] = _backward_chunk(scaled, *columns).div_(ctx.temperature).to(gradient.dtype)
        return gradient, None, None, None, None


def _chunks(logits_TV: Tensor, *columns_M: Tensor) -> list[tuple[Tensor, ...]]:
    size = max(CHUNK_ELEMENTS // logits_TV.size(1), 1)
    return list(zip(*(column.split(size) for column in columns_M), strict=True))


def _forward_chunk(logits_MV: Tensor, targets_M: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, log of the normaliser, and mean logit, each [M] over the whole vocabulary."""
    highest = logits_MV.amax(dim=1)
    if group is not None:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    exponentials = (logits_MV - highest[:, None]).exp_()
    normaliser = exponentials.sum(dim=1)
    mean = exponentials.mul_(logits_MV).sum(dim=1)
    local, inside = _local(targets_M, logits_MV.size(1))
    chosen = logits_MV.gather(1, local[:, None])[:, 0] * inside
    if group is not None:
        sums = torch.stack([normaliser, mean, chosen])
        dist.all_reduce(sums, group=group)
        normaliser, mean, chosen = sums.unbind()
    log_sum = highest + normaliser.log()
    return chosen - log_sum, log_sum, mean / normaliser


def _backward_chunk(
    logits_MV: Tensor, targets_M: Tensor, log_sum: Tensor, mean: Tensor, grad_log_probs: Tensor, grad_entropy: Tensor
) -> Tensor:
    probabilities = (logits_MV - log_sum[:, None]).exp_()
    weight = grad_log_probs[:, None] + grad_entropy[:, None] * (logits_MV - mean[:, None])
    gradient = probabilities.mul_(weight).neg_()
    local, inside = _local(targets_M, logits_MV.size(1))
    return gradient.scatter_add_(1, local[:, None], (grad_log_probs * inside)[:, None])


def _local(targets_M: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Targets as columns of this rank's slice, and 1.0 where they lie in it."""
    inside = (targets_M >= 0) & (targets_M < size)
    return targets_M.clamp(0, size - 1), inside.float()
