"""The experts of a rank in one matrix product each way: Megatron's local experts, with torch's grouped_mm."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from actors.trainer.megatron.imports import SequentialMLP, weighted_bias_swiglu_impl

# torch 2.10 and later have it: forward and backward passes in bfloat16, float16 and float32
GROUPED: Final[Callable[..., Tensor] | None] = getattr(torch.nn.functional, "grouped_mm", None)
ALIGNMENT: Final = 16  # bytes, of each row of what is multiplied
KERNEL_SINCE: Final = (9, 0)  # compute capability
LAYERS: Final = ("linear_fc1", "linear_fc2")


def why_one_by_one(device: torch.device, dtype: torch.dtype, *sizes: int) -> str | None:
    """Why experts are computed one after the other there; none: torch has a kernel for all of them together.

    Args:
        device: of the rank.
        dtype: of the weights.
        sizes: of the experts' matrices on this rank.
    """
    if GROUPED is None:
        return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
    if device.type != "cuda":
        return "torch's grouped_mm is a loop over experts on the CPU, which copies their weights"
    if torch.cuda.get_device_capability(device) < KERNEL_SINCE or dtype is not torch.bfloat16:
        return "torch's grouped_mm has a kernel for bfloat16 from compute capability 9.0 on, and else waits for the GPU"
    return misaligned(dtype, *sizes)


def misaligned(dtype: torch.dtype, *sizes: int) -> str | None:
    """Which size torch's grouped_mm does not take; none: it takes all of them."""
    multiple = ALIGNMENT // dtype.itemsize
    wrong = [size for size in sizes if size % multiple]
    return f"torch's grouped_mm takes sizes that {multiple} divides in {dtype}, not {wrong[0]}" if wrong else None


class GroupedExperts(SequentialMLP):
    """Megatron's experts, in one product where there is a kernel for it, and else one after the other.

    Parameters keep their names, so that checkpoints and published weights do not depend on how they are computed.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        first, second = (getattr(self.local_experts[0], name).weight for name in LAYERS)
        self.one_by_one = why_one_by_one(first.device, first.dtype, *first.shape, *second.shape)  # none: together

    def forward(self, hidden: Tensor, tokens_per_expert: Any, probs: Tensor) -> tuple[Tensor, None]:
        """Return the experts' outputs, each weighted.

        Args:
            hidden: [T, h], tokens of the first expert before those of the second.
            tokens_per_expert: how many each has.
            probs: [T], the weights.
        """
        if not len(hidden) or self.num_local_experts == 1 or self.one_by_one is not None:
            return super().forward(hidden, tokens_per_expert, probs)
        ends = torch.as_tensor(tokens_per_expert).to(hidden.device).cumsum(0, dtype=torch.int32)
        first, second = ([getattr(expert, name).weight for expert in self.local_experts] for name in LAYERS)
        between = weighted_bias_swiglu_impl(grouped_linear(hidden, ends, first), None, probs[:, None], False)
        return grouped_linear(between, ends, second), None


def grouped_linear(inputs: Tensor, ends: Tensor, weights: list[Tensor]) -> Tensor:
    """Each group of rows times a weight of its own.

    Args:
        inputs: [T, in].
        ends: where each group of rows ends, int32; the last one is T.
        weights: [out, in] of each group.

    Returns:
        [T, out].
    """
    product: Any = _GroupedLinear.apply(inputs, ends, *weights)
    return product


class _GroupedLinear(torch.autograd.Function):
    """Weights are stacked for each pass and not kept: for the backward pass there are the parameters."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert GROUPED is not None
        ctx.save_for_backward(inputs, ends, *weights)
        return GROUPED(inputs, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert GROUPED is not None
        inputs, ends, *weights = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_inputs = GROUPED(gradient, torch.stack(weights), offs=ends)
        of_weights = GROUPED(gradient.t(), inputs, offs=ends)
        # Kernels leave what they found in memory to a group without rows (pytorch/pytorch#172439, #174314).
        has_rows = ends.diff(prepend=ends.new_zeros(1)) > 0
        return of_inputs, None, *torch.where(has_rows[:, None, None], of_weights, 0.0).unbind()
