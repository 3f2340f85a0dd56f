"""Log-probs and entropies of target tokens, from hidden states and an output weight, vocabulary-parallel or whole.

M is the number of requested positions, H the hidden size, V the number of vocabulary entries on this rank, K the number
of kept tokens over all positions, L the number of further tokens at each position.

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
LEAST_ROWS = 256  # of a chunk, up to `MOST_ELEMENTS`: each chunk reads the weight and adds to its gradient
MOST_ELEMENTS = 1 << 24
BLOCK_ELEMENTS = 1 << 20  # of a temporary copy of logits
SLICE_ELEMENTS = 1 << 20  # of a product in bfloat16 that is added to float32
LOWEST = torch.finfo(torch.float32).min
KEPT_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 26}  # logits kept for the backward pass; the others are recomputed


class KeptTokens(NamedTuple):
    """Tokens that top-p and top-k kept at each position. The log-prob is then that of the softmax over them alone."""

    ids_K: Tensor  # token ids of the first position, then those of the second; different at one position
    counts_M: Tensor  # number of ids of each position; 0: the whole vocabulary


def log_probs_and_entropy(
    hidden_MH: Tensor,
    weight_VH: Tensor,
    targets_M: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    cap: float | None = None,
    group: Any = None,
    into_VH: Tensor | None = None,
    kept: KeptTokens | None = None,
    topk_MK: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compute natural log-probs of targets and entropies, differentiable in hidden states and weight.

    With logits z = hidden weight^T / temperature and p = softmax(z): log p of the target, and -sum p log p. At a
    position with kept tokens S, the log-prob is z_t - log sum_{k in S} exp(z_k). The entropy stays that of p.

    Args:
        hidden_MH: [M, H], hidden states, any float dtype.
        weight_VH: [V, H], this rank's slice of the output weight.
        targets_M: [M], int64, token ids in the whole vocabulary.
        temperature: Sampling temperature; the logits are divided by it. [M], float32: one for each position.
        cap: Largest size of the products of hidden states and weights: they become `cap * tanh(product / cap)` before
            the temperature divides them. None: they stay.
        group: Torch process group that shares the vocabulary, in vocabulary order. None: this rank has all of it.
        into_VH: [V, H], float32 buffer that accumulates the weight's gradient. Autograd then gets an uninitialised
            gradient for the weight, or none.
        kept: Tokens that the engine sampled from. The target has to be one of them. None: the whole vocabulary.
        topk_MK: [M, L], int64, further token ids at each position, whose log-probs over the whole vocabulary are
            returned, too. They may contain the target. None: none.

    Returns:
        Log-probs [M] and entropies [M], nats, float32, and with `topk_MK` the log-probs of these ids, [M, L].

    Edges:
        No positions: two empty tensors. float64 inputs are computed in float32, as in training. Nothing is clamped: the
        maximum of each position's logits is subtracted before the exponential.

    Source:
        The vocabulary-parallel softmax is that of Megatron-LM, arXiv 1909.08053. Its chunks are ours.
        The kept tokens are those of slime's `rollout_top_p_token_ids` (`_build_topp_keep_mask`, commit 624b824a), where
        the entropy stays that of the whole vocabulary, too.
    """
    keeps = torch.is_grad_enabled()
    given = hidden_MH, weight_VH, targets_M, temperature, cap, group, into_VH, kept, keeps, topk_MK
    log_probs, entropy, topk = _LogProbsAndEntropy.apply(*given)  # pyright: ignore
    return (log_probs, entropy) if topk is None else (log_probs, entropy, topk)


class _Statistics(NamedTuple):
    """Softmax statistics of each position, [M]. z is the logits minus their maximum, e = exp(z)."""

    highest: Tensor  # maximum logit
    normaliser: Tensor  # sum of e
    weighted: Tensor  # sum of e z
    chosen: Tensor  # z of the target, 0 where another rank holds it
    here: Tensor  # 1 where this rank holds the target


class _KeptRows(NamedTuple):
    """The kept tokens of all positions, as rows and columns of this rank's logits."""

    rows_K: Tensor
    columns_K: Tensor  # clamped where another rank holds the token
    inside_K: Tensor  # true where this rank holds the token
    starts: list[int]  # place of each position's first token, and the end
    is_whole_M: Tensor  # true where the log-prob is over the whole vocabulary

    def of(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows within a chunk of positions, columns, and whether this rank holds them."""
        places = slice(self.starts[rows.start], self.starts[rows.stop])
        return self.rows_K[places] - rows.start, self.columns_K[places], self.inside_K[places]


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
        temperature: float | Tensor,
        cap: float | None,
        group: Any,
        into_VH: Tensor | None,
        kept: KeptTokens | None,
        keeps: bool,
        topk_MK: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        first = 0 if group is None else dist.get_rank(group) * weight_VH.size(0)
        own_M = targets_M - first
        kept_rows = None if kept is None else _kept_rows(kept, first, weight_VH.size(0))
        highest_kept, sum_kept = hidden_MH.new_empty(2, len(hidden_MH), dtype=torch.float32)
        own = _Statistics(*hidden_MH.new_empty(len(_Statistics._fields), len(hidden_MH), dtype=torch.float32))
        own_topk = None if topk_MK is None else topk_MK - first
        chosen_topk = None if topk_MK is None else hidden_MH.new_empty(topk_MK.shape, dtype=torch.float32)
        ctx.kept, room = {}, KEPT_ELEMENTS[hidden_MH.device.type] if keeps else 0
        for rows in _chunks(hidden_MH, weight_VH):
            logits = _logits(hidden_MH[rows], weight_VH, _of_rows(temperature, rows), cap)
            _measure(logits, own_M[rows], _Statistics(*(column[rows] for column in own)))
            if kept_rows is not None:
                _measure_kept(logits, kept_rows.of(rows), highest_kept[rows], sum_kept[rows])
            if own_topk is not None and chosen_topk is not None:
                local, inside = _local(own_topk[rows], logits.size(1))
                torch.mul(logits.gather(1, local), inside, out=chosen_topk[rows])
            room -= logits.numel()
            if room >= 0:
                ctx.kept[rows.start] = logits
        whole = _over_vocabulary(own, group)
        log_sum, mean = whole.normaliser.log(), whole.weighted / whole.normaliser
        lower = own.highest - whole.highest
        log_probs, log_scale_kept = whole.chosen - log_sum, None
        topk = None
        if own_topk is not None and chosen_topk is not None:
            topk = _topk_over_vocabulary(chosen_topk, own_topk, weight_VH.size(0), lower, group) - log_sum[:, None]
        if kept_rows is not None:
            highest_kept, log_sum_kept = _kept_over_vocabulary(highest_kept + lower, sum_kept, group)
            log_scale_kept = lower - highest_kept - log_sum_kept
            of_kept = whole.chosen - highest_kept - log_sum_kept  # the difference first: both may be far below 0
            log_probs = torch.where(kept_rows.is_whole_M, log_probs, of_kept)
        ctx.save_for_backward(hidden_MH, weight_VH, own_M, own.highest, lower - log_sum, mean - lower)
        ctx.temperature, ctx.cap, ctx.group, ctx.into_VH = temperature, cap, group, into_VH
        ctx.kept_rows, ctx.log_scale_kept, ctx.own_topk = kept_rows, log_scale_kept, own_topk
        ctx.set_materialize_grads(False)
        return log_probs, log_sum - mean, topk

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, grad_topk: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None, None, None, None, None, None, None]:
        hidden_MH, weight_VH, own_M, highest, log_scale, mean = ctx.saved_tensors
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_scale)
        of_hidden = torch.empty_like(hidden_MH)
        of_weight: Tensor | None = ctx.into_VH
        if of_weight is None and ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight_VH, dtype=torch.float32)
        for rows in _chunks(hidden_MH, weight_VH):
            logits = ctx.kept.pop(rows.start, None)
            own_temperature = _of_rows(ctx.temperature, rows)
            if logits is None:
                logits = _logits(hidden_MH[rows], weight_VH, own_temperature, ctx.cap).sub_(highest[rows, None])
            slope = None if ctx.cap is None else _slope(logits, highest[rows], own_temperature, ctx.cap)
            own_grad, kept = grad_log_probs[rows], None
            if ctx.kept_rows is not None:
                kept = _kept_gradient(logits, ctx.kept_rows.of(rows), ctx.log_scale_kept[rows], own_grad)
                own_grad = own_grad * ctx.kept_rows.is_whole_M[rows]
            if grad_topk is not None:  # every one of them has the normaliser of the whole vocabulary
                own_grad = own_grad + grad_topk[rows].sum(dim=1)
            gradient = _gradient(
                logits, log_scale[rows], own_grad, None if grad_entropy is None else (grad_entropy[rows], mean[rows])
            )
            if kept is not None:
                gradient.index_put_(kept[:2], kept[2], accumulate=True)
            local, inside = _local(own_M[rows], logits.size(1))
            gradient.scatter_add_(1, local[:, None], (grad_log_probs[rows] * inside)[:, None])
            if grad_topk is not None:
                local, inside = _local(ctx.own_topk[rows], logits.size(1))
                gradient.scatter_add_(1, local, grad_topk[rows] * inside)
            gradient = _tempered(gradient, own_temperature)
            gradient = (gradient if slope is None else gradient.mul_(slope)).to(hidden_MH.dtype)
            of_hidden[rows] = torch.mm(gradient, weight_VH)  # without out=, which actors.bfloat16 does not replace
            if of_weight is None:
                continue
            _add_product(of_weight, gradient.t(), hidden_MH[rows])
        if ctx.group is not None:
            dist.all_reduce(of_hidden, group=ctx.group)
        returned = None
        if ctx.needs_input_grad[1] and of_weight is not None:
            is_added = ctx.into_VH is not None
            returned = torch.empty_like(weight_VH) if is_added else of_weight.to(weight_VH.dtype)
        return of_hidden, returned, None, None, None, None, None, None, None, None


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product of matrices to a float32 matrix.

    Factors in bfloat16 are multiplied in slices on the CPU: there the product of all rows, and the float32 copy of it
    that the addition makes, would be written to memory and read again.
    """
    if left.dtype is torch.float32:
        into.addmm_(left, right)
        return
    num_rows = len(into) if into.is_cuda else max(SLICE_ELEMENTS // right.size(1), 1)
    for own, factor in zip(into.split(num_rows), left.split(num_rows), strict=True):
        own += torch.mm(factor, right)


def _chunks(hidden_MH: Tensor, weight_VH: Tensor) -> Iterator[slice]:
    """Yield equal chunks of the positions; the last one may be smaller."""
    width = weight_VH.size(0)
    size = max(CHUNK_ELEMENTS[hidden_MH.device.type] // width, min(LEAST_ROWS, MOST_ELEMENTS // width), 1)
    count = len(hidden_MH)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _blocks(logits_MV: Tensor) -> Iterator[slice]:
    """Yield blocks of a chunk's positions. On the CPU, copies of the logits are made block by block, in its cache."""
    count, width = logits_MV.shape
    size = count if logits_MV.is_cuda else max(BLOCK_ELEMENTS // width, 1)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _of_rows(temperature: float | Tensor, rows: slice) -> float | Tensor:
    """Return the temperature of a chunk of positions: one number, or a column."""
    return temperature[rows, None] if isinstance(temperature, Tensor) else temperature


def _logits(hidden_MH: Tensor, weight_VH: Tensor, temperature: float | Tensor, cap: float | None) -> Tensor:
    logits = torch.mm(hidden_MH, weight_VH.t()).float()
    return _tempered(logits if cap is None else logits.div_(cap).tanh_().mul_(cap), temperature)


def _slope(logits_MV: Tensor, highest: Tensor, temperature: float | Tensor, cap: float) -> Tensor:
    """Return the derivatives of capped logits, given logits minus the maximum of each position: 1 - (logit / cap)^2."""
    capped = (logits_MV + highest[:, None]).mul_(temperature).div_(cap)
    return capped.square_().neg_().add_(1.0)


def _tempered(values_MV: Tensor, temperature: float | Tensor) -> Tensor:
    """Divide in place, if that changes anything."""
    is_one = not isinstance(temperature, Tensor) and temperature == 1.0
    return values_MV if is_one else values_MV.div_(temperature)


def _measure(logits_MV: Tensor, targets_M: Tensor, out: _Statistics) -> None:
    """Write the statistics of this rank's logits to `out`, and subtract the maximum from the logits in place."""
    for rows in _blocks(logits_MV):
        logits = logits_MV[rows]
        torch.amax(logits, dim=1, out=out.highest[rows])
        logits.sub_(out.highest[rows, None])
        exponentials = logits.exp()
        torch.sum(exponentials, dim=1, out=out.normaliser[rows])
        torch.sum(exponentials.mul_(logits), dim=1, out=out.weighted[rows])
    local, inside = _local(targets_M, logits_MV.size(1))
    torch.mul(logits_MV.gather(1, local[:, None])[:, 0], inside, out=out.chosen)
    out.here.copy_(inside)


def _kept_rows(kept: KeptTokens, first: int, size: int) -> _KeptRows:
    """Find the kept tokens in this rank's slice of the vocabulary, which starts at token `first`."""
    counts_M = kept.counts_M
    starts: list[int] = [0, *counts_M.cumsum(0).tolist()]
    rows_K = torch.repeat_interleave(torch.arange(len(counts_M), device=counts_M.device), counts_M)
    columns_K, inside_K = _local(kept.ids_K.long() - first, size)
    return _KeptRows(rows_K, columns_K, inside_K > 0, starts, counts_M == 0)


def _measure_kept(logits_MV: Tensor, kept: tuple[Tensor, Tensor, Tensor], highest: Tensor, total: Tensor) -> None:
    """Write the maximum of each position's kept logits, -inf without one, and the sum of their exponentials over it."""
    rows, columns, inside = kept
    values = torch.where(inside, logits_MV[rows, columns], -torch.inf)
    highest.fill_(-torch.inf).scatter_reduce_(0, rows, values, "amax")
    total.zero_().scatter_add_(0, rows, torch.exp(values - highest.clamp(min=LOWEST)[rows]))


def _kept_over_vocabulary(highest: Tensor, total: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Combine the kept logits of all ranks: their maximum, and the log of the sum of exponentials over it."""
    if group is None:
        return highest, total.log()
    whole = highest.clone()
    dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
    summed = total * torch.exp(highest - whole.clamp(min=LOWEST))
    dist.all_reduce(summed, group=group)
    return whole, summed.log()


def _kept_gradient(
    logits_MV: Tensor, kept: tuple[Tensor, Tensor, Tensor], log_scale: Tensor, grad_log_probs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradient of the log-normaliser over the kept tokens: rows, columns and values."""
    rows, columns, inside = kept
    probabilities = torch.exp(logits_MV[rows, columns] + log_scale[rows])
    return rows, columns, torch.where(inside, -grad_log_probs[rows] * probabilities, 0.0)


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


def _topk_over_vocabulary(chosen: Tensor, own_topk: Tensor, size: int, lower: Tensor, group: Any) -> Tensor:
    """Combine the chosen logits of all ranks: each is above the maximum over the whole vocabulary, or below it.

    Args:
        chosen: [M, L], minus the maximum of this rank's logits; 0 where another rank holds the token.
        own_topk: [M, L], token ids as columns of this rank's slice.
        size: Number of columns of this rank.
        lower: [M], this rank's maximum minus that of all ranks.
        group: Torch process group that shares the vocabulary. None: this rank has all of it.
    """
    if group is None:
        return chosen
    whole = chosen + lower[:, None] * _local(own_topk, size)[1]
    dist.all_reduce(whole, group=group)
    return whole


def _gradient(
    logits_MV: Tensor, log_scale: Tensor, grad_log_probs: Tensor, entropy: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Compute the gradient of the logits in place, without the part of the targets' own logits.

    Args:
        logits_MV: Logits minus the maximum of each position.
        log_scale: [M]; adding it to the logits gives log-probabilities.
        grad_log_probs: [M]; 0 where the log-prob is over kept tokens alone.
        entropy: Gradient of the entropy, and mean of `logits_MV` under the softmax, each [M]. None: no loss uses the
            entropy.
    """
    scale = -log_scale.exp()
    if entropy is None:
        return logits_MV.exp_().mul_((scale * grad_log_probs)[:, None])
    grad_entropy, mean = entropy
    constant, slope = scale * (grad_log_probs - grad_entropy * mean), scale * grad_entropy
    for rows in _blocks(logits_MV):
        logits = logits_MV[rows]
        weight = torch.addcmul(constant[rows, None], logits, slope[rows, None])
        logits.exp_().mul_(weight)
    return logits_MV


def _local(targets_M: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the targets as columns of this rank's slice, and 1.0 where the slice contains them."""
    inside = (targets_M >= 0) & (targets_M < size)
    return targets_M.clamp(0, size - 1), inside.float()
