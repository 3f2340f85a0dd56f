"""Log-probs and entropies of target tokens, from hidden states and an output weight, vocabulary-parallel or whole.

M is the number of requested positions, H the hidden size, V the number of vocabulary entries on this rank.

Example:
    ```python
    import torch

    from actors.trainer.algorithms.log_probs import log_probs_and_entropy

    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3, 4, generator=generator), torch.randn(5, 4, generator=generator)
    targets = torch.tensor([0, 4, 2])
    log_probs, entropy = log_probs_and_entropy(hidden, weight, targets, temperature=0.8)
    whole = torch.log_softmax(hidden @ weight.T / 0.8, dim=1)
    assert torch.allclose(log_probs, whole[torch.arange(3), targets], atol=1e-6)
    assert torch.allclose(entropy, -(whole.exp() * whole).sum(dim=1), atol=1e-6)
    ```
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}  # float32 logits per chunk; a CPU chunk should fit the CPU cache
KEPT_ELEMENTS = 1 << 26  # logits kept for the backward pass, 256 MB; the others are recomputed


def log_probs_and_entropy(
    hidden_MH: Tensor,
    weight_VH: Tensor,
    targets_M: Tensor,
    *,
    temperature: float = 1.0,
    group: Any = None,
    into_VH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute natural log-probs of targets and entropies, differentiable in hidden states and weight.

    With logits z = hidden weight^T / temperature and p = softmax(z): log p of the target, and -sum p log p.

    Args:
        hidden_MH: [M, H], hidden states, any float dtype.
        weight_VH: [V, H], this rank's slice of the output weight.
        targets_M: [M], int64, token ids in the whole vocabulary.
        temperature: Sampling temperature; the logits are divided by it.
        group: Torch process group that shares the vocabulary, in vocabulary order. None: this rank has all of it.
        into_VH: [V, H], float32 buffer that accumulates the weight's gradient. Autograd then gets an uninitialised
            gradient for the weight, or none.

    Returns:
        Log-probs [M] and entropies [M], nats, float32.

    Edges:
        No positions: two empty tensors. float64 inputs are computed in float32, as in training.

    Source:
        The vocabulary-parallel softmax is that of Megatron-LM, arXiv 1909.08053. Its chunks are ours.
    """
    keeps = torch.is_grad_enabled()
    given = hidden_MH, weight_VH, targets_M, temperature, group, into_VH, keeps
    log_probs, entropy = _LogProbsAndEntropy.apply(*given)  # pyright: ignore
    return log_probs, entropy


class _Statistics(NamedTuple):
    """Softmax statistics of each position, [M]. z is the logits minus their maximum, e = exp(z)."""

    highest: Tensor  # maximum logit
    normaliser: Tensor  # sum of e
    weighted: Tensor  # sum of e z
    chosen: Tensor  # z of the target, 0 where another rank holds it
    here: Tensor  # 1 where this rank holds the target


class _LogProbsAndEntropy(torch.autograd.Function):
    """Fused output projection and log-softmax, in chunks of positions: never materialises all logits.

    With p = softmax(z): d log p_t / dz = onehot - p, and dH / dz = -p (z - sum p z).
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        targets_M: Tensor,
        temperature: float,
        group: Any,
        into_VH: Tensor | None,
        keeps: bool,
    ) -> tuple[Tensor, Tensor]:
        own_M = targets_M if group is None else targets_M - dist.get_rank(group) * weight_VH.size(0)
        own = _Statistics(*hidden_MH.new_empty(len(_Statistics._fields), len(hidden_MH), dtype=torch.float32))
        ctx.kept, room = {}, KEPT_ELEMENTS if keeps else 0
        for rows in _chunks(hidden_MH, weight_VH):
            logits = _logits(hidden_MH[rows], weight_VH, temperature)
            _measure(logits, own_M[rows], _Statistics(*(column[rows] for column in own)))
            room -= logits.numel()
            if room >= 0:
                ctx.kept[rows.start] = logits
        whole = _over_vocabulary(own, group)
        log_sum, mean = whole.normaliser.log(), whole.weighted / whole.normaliser
        lower = own.highest - whole.highest
        ctx.save_for_backward(hidden_MH, weight_VH, own_M, own.highest, lower - log_sum, mean - lower)
        ctx.temperature, ctx.group, ctx.into_VH = temperature, group, into_VH
        ctx.set_materialize_grads(False)
        return whole.chosen - log_sum, log_sum - mean

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None, None, None, None]:
        hidden_MH, weight_VH, own_M, highest, log_scale, mean = ctx.saved_tensors
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_scale)
        of_hidden = torch.empty_like(hidden_MH)
        of_weight: Tensor | None = ctx.into_VH
        if of_weight is None and ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight_VH, dtype=torch.float32)
        for rows in _chunks(hidden_MH, weight_VH):
            logits = ctx.kept.pop(rows.start, None)
            if logits is None:
                logits = _logits(hidden_MH[rows], weight_VH, ctx.temperature).sub_(highest[rows, None])
            gradient = _gradient(
                logits,
                own_M[rows],
                log_scale[rows],
                grad_log_probs[rows],
                None if grad_entropy is None else (grad_entropy[rows], mean[rows]),
            )
            gradient = gradient.div_(ctx.temperature).to(hidden_MH.dtype)
            torch.mm(gradient, weight_VH, out=of_hidden[rows])
            if of_weight is None:
                continue
            if gradient.dtype is torch.float32:
                of_weight.addmm_(gradient.t(), hidden_MH[rows])
            else:
                of_weight += gradient.t() @ hidden_MH[rows]
        if ctx.group is not None:
            dist.all_reduce(of_hidden, group=ctx.group)
        returned = None
        if ctx.needs_input_grad[1] and of_weight is not None:
            is_added = ctx.into_VH is not None
            returned = torch.empty_like(weight_VH) if is_added else of_weight.to(weight_VH.dtype)
        return of_hidden, returned, None, None, None, None, None


def _chunks(hidden_MH: Tensor, weight_VH: Tensor) -> Iterator[slice]:
    """Yield equal chunks of the positions; the last one may be smaller."""
    size = max(CHUNK_ELEMENTS[hidden_MH.device.type] // weight_VH.size(0), 1)
    count = len(hidden_MH)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _logits(hidden_MH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    logits = torch.mm(hidden_MH, weight_VH.t()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _measure(logits_MV: Tensor, targets_M: Tensor, out: _Statistics) -> None:
    """Write the statistics of this rank's logits to `out`, and subtract the maximum from the logits in place."""
    torch.amax(logits_MV, dim=1, out=out.highest)
    logits_MV.sub_(out.highest[:, None])
    exponentials = logits_MV.exp()
    torch.sum(exponentials, dim=1, out=out.normaliser)
    torch.sum(exponentials.mul_(logits_MV), dim=1, out=out.weighted)
    local, inside = _local(targets_M, logits_MV.size(1))
    torch.mul(logits_MV.gather(1, local[:, None])[:, 0], inside, out=out.chosen)
    out.here.copy_(inside)


def _over_vocabulary(own: _Statistics, group: Any) -> _Statistics:
    """Combine the statistics of all ranks that share the vocabulary."""
    if group is None:
        return own
    highest = own.highest.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    lower = own.highest - highest
    scale = lower.exp()
    weighted = (own.weighted + lower * own.normaliser) * scale
    sums = torch.stack([own.normaliser * scale, weighted, own.chosen + lower * own.here, own.here])
    dist.all_reduce(sums, group=group)
    return _Statistics(highest, *sums)


def _gradient(
    logits_MV: Tensor,
    targets_M: Tensor,
    log_scale: Tensor,
    grad_log_probs: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Compute the gradient of the logits in place.

    Args:
        logits_MV: Logits minus the maximum of each position.
        targets_M: Targets as columns of this rank's slice.
        log_scale: [M]; adding it to the logits gives log-probabilities.
        grad_log_probs: [M].
        entropy: Gradient of the entropy, and mean of `logits_MV` under the softmax, each [M]. None: no loss uses the
            entropy.
    """
    scale = -log_scale.exp()
    if entropy is None:
        gradient = logits_MV.exp_().mul_((scale * grad_log_probs)[:, None])
    else:
        grad_entropy, mean = entropy
        constant, slope = scale * (grad_log_probs - grad_entropy * mean), scale * grad_entropy
        weight = torch.addcmul(constant[:, None], logits_MV, slope[:, None])
        gradient = logits_MV.exp_().mul_(weight)
    local, inside = _local(targets_M, logits_MV.size(1))
    return gradient.scatter_add_(1, local[:, None], (grad_log_probs * inside)[:, None])


def _local(targets_M: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the targets as columns of this rank's slice, and 1.0 where the slice contains them."""
    inside = (targets_M >= 0) & (targets_M < size)
    return targets_M.clamp(0, size - 1), inside.float()
