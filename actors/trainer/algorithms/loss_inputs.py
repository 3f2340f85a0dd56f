"""What a loss gets and returns: columns of one micro-batch, and sums over its sequences.

M is the number of trained tokens that this rank has of one micro-batch, S the number of its sequences. Tokens that do
not train are in no column, so a loss has no mask. A sequence is one sample, and its tokens may stand anywhere.

Example:
    ```python
    import torch

    from actors.trainer.algorithms.loss_inputs import LossInputs, Sequences

    old = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64)
    inputs = LossInputs(
        log_probs=torch.tensor([-0.9, -0.6, -2.0], dtype=torch.float64, requires_grad=True),
        old_log_probs=old,
        rollout_log_probs=old,  # of the engine
        advantages=torch.tensor([1.0, 1.0, -0.5], dtype=torch.float64),
        entropy=torch.zeros(3, dtype=torch.float64),
        sequences=Sequences(torch.tensor([0, 0, 1]), count=2),  # two tokens, then one
    )
    assert inputs.sequences.lengths.tolist() == [2, 2, 1]
    assert inputs.sequences.sums(inputs.advantages).tolist() == [2.0, 2.0, -0.5]
    assert inputs.sequences.means(inputs.advantages).tolist() == [1.0, 1.0, -0.5]
    ```
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

MAX_LOG_RATIO: Final = 20.0  # nats; the default of the setting of that name
_COLUMNS: Final = (
    "old_log_probs",
    "rollout_log_probs",
    "advantages",
    "entropy",
    "sequences",
    "rollouts",
    "ref_log_probs",
    "rewards",
    "trainer_log_probs",
    "teacher_log_probs",
)


class Sequences:
    """Sums over the sequences of a micro-batch: differentiable, and right where ranks hold parts of a sequence.

    A sequence is one sample. Only trained tokens count. With context parallelism every rank of the group calls the same
    methods in the same order.
    """

    def __init__(self, numbers_M: Tensor, count: int, group: Any = None) -> None:
        """Describe the sequences.

        Args:
            numbers_M: [M], int64, the number of each token's sequence, 0 to count - 1.
            count: S, the number of sequences, the same on every rank of the group.
            group: Torch process group of the ranks that share the sequences. None: this rank has them whole.
        """
        self._numbers_M = numbers_M
        self._count = count
        self._group = group

    @property
    def shape(self) -> torch.Size:
        """Number of tokens, (M,)."""
        return self._numbers_M.shape

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all tokens of each sequence."""
        return self._group is None

    @property
    def numbers(self) -> Tensor:
        """Number of each token's sequence, [M], int64."""
        return self._numbers_M

    @cached_property
    def lengths(self) -> Tensor:
        """Number of trained tokens in the sequence of each token, [M], int64, at least 1."""
        return self.sums(torch.ones_like(self._numbers_M)).clamp(min=1)

    def sums(self, values_M: Tensor) -> Tensor:
        """Sum over each token's sequence, [M]: every token of a sequence gets the sequence's sum."""
        sums_S = values_M.new_zeros(self._count).index_add(0, self._numbers_M, values_M)
        if self._group is not None:
            sums_S = _SumOverRanks.apply(sums_S, self._group)
        return sums_S[self._numbers_M]  # pyright: ignore[reportOptionalSubscript]

    def means(self, values_M: Tensor) -> Tensor:
        """Average over each token's sequence, [M]."""
        return self.sums(values_M) / self.lengths


class _SumOverRanks(torch.autograd.Function):
    """Sum over the ranks of a group. Each rank's loss depends on the sum, so the gradient is summed too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return _summed(values, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _summed(gradient, ctx.group), None


def _summed(values: Tensor, group: Any) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Per-token inputs of a loss, [M] each, float32 or float64, nats. Log-probs are at the rollout temperature.

    Gradients flow through `log_probs`, `entropy` and `topk_log_probs` alone. A function names the columns that it uses;
    the others may have any values of the same shape. Results have the dtype of the columns. A column of another shape
    raises a ValueError, and so does a function that needs a column which is None.
    """

    log_probs: Tensor  # of the policy being trained
    old_log_probs: Tensor  # of the old policy, the one before the first optimizer step of the batch
    rollout_log_probs: Tensor  # of the engine that sampled the tokens
    advantages: Tensor  # of the tokens; positive ones make their tokens likelier
    entropy: Tensor  # of the policy being trained
    sequences: Sequences
    rollouts: Sequences | None = None  # sums over rollouts, where a micro-batch has them whole: preference pairs
    ref_log_probs: Tensor | None = None  # of the reference model; None: no term needs them
    rewards: Tensor | None = None  # of each token's sample; None: no term needs them
    trainer_log_probs: Tensor | None = None  # before the first optimizer step; None: no metric needs them
    teacher_log_probs: Tensor | None = None  # of the teacher of a distillation; None: no advantage follows it
    topk_log_probs: Tensor | None = None  # [M, K], of the policy for the teacher's likeliest tokens, with gradient
    teacher_topk_log_probs: Tensor | None = None  # [M, K], of the teacher for the same tokens; None: no term needs them

    def __post_init__(self) -> None:
        size = tuple(self.log_probs.shape)
        if len(size) != 1:
            raise ValueError(f"log_probs has shape {size}, expected one dimension: the trained tokens")
        for name in _COLUMNS:
            if (values := getattr(self, name)) is not None and tuple(values.shape) != size:
                raise ValueError(f"{name} has shape {tuple(values.shape)}, expected {size}")
        topk = [values for values in (self.topk_log_probs, self.teacher_topk_log_probs) if values is not None]
        shapes = [tuple(values.shape) for values in topk]
        if topk and (len(topk) < 2 or shapes[0] != shapes[1] or len(shapes[0]) != 2 or shapes[0][0] != size[0]):
            raise ValueError(f"top-k log-probs have shapes {shapes}, expected two of ({size[0]}, K)")

    def needed(self, name: str) -> Tensor:
        """Return an optional column, [M]. It raises a ValueError if the column is None."""
        if (values := getattr(self, name)) is None:
            raise ValueError(f"{name} is None, and this function needs it")
        return values


class Terms(NamedTuple):
    """Loss per token, [M], with its gradient, and metrics per token, [M] each, by the name that users see."""

    loss: Tensor
    metrics: Mapping[str, Tensor]


def bounded(log_ratios: Tensor, limit: float = MAX_LOG_RATIO) -> Tensor:
    """Clamp log-ratios to +-limit. Clamped elements have no gradient.

    min(max(log-ratio, -limit), limit). Without a limit the exponential overflows float32 from 88 on, and the gradient
    behind a clip is 0 * inf.

    Args:
        log_ratios: [M], nats.
        limit: Largest absolute value, nats. Infinity: no limit.

    Returns:
        [M], nats.

    Edges:
        NaN stays NaN, in the gradient too, so that the optimizer step is skipped instead of trained without these
        tokens. An element exactly at the limit keeps its gradient.

    Source:
        The limit of 20 is verl's.
    """
    return torch.where(log_ratios.abs() > limit, log_ratios.clamp(-limit, limit), log_ratios)
