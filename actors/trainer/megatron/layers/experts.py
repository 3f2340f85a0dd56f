"""Grouped GEMM for a rank's experts: Megatron's local experts, computed by torch's grouped_mm."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actors.trainer.megatron.imports import MoELayer, SequentialMLP, weighted_bias_swiglu_impl

# in torch 2.10 and later: forward and backward passes in bfloat16, float16 and float32
GROUPED: Final[Callable[..., Tensor] | None] = getattr(torch.nn.functional, "grouped_mm", None)
ALIGNMENT: Final = 16  # bytes, of each row of the operands
KERNEL_SINCE: Final = (9, 0)  # compute capability
LAYERS: Final = ("linear_fc1", "linear_fc2")


def why_one_by_one(device: torch.device, dtype: torch.dtype, *sizes: int) -> str | None:
    """Return why experts must be computed one after another. None: torch computes all of them in one kernel.

    Args:
        device: Device of the rank.
        dtype: Dtype of the weights.
        sizes: Sizes of the experts' matrices on this rank.
    """
    if GROUPED is None:
        return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
    if device.type != "cuda":
        return "on the CPU, torch's grouped_mm loops over the experts and copies their weights"
    if torch.cuda.get_device_capability(device) < KERNEL_SINCE or dtype is not torch.bfloat16:
        return "grouped_mm needs bfloat16 and compute capability 9.0 or later; otherwise torch blocks the CPU in it"
    return misaligned(dtype, *sizes)


def misaligned(dtype: torch.dtype, *sizes: int) -> str | None:
    """Name a size that torch's grouped_mm does not support. None: it supports all of them."""
    multiple = ALIGNMENT // dtype.itemsize
    wrong = [size for size in sizes if size % multiple]
    return f"torch's grouped_mm needs sizes divisible by {multiple} in {dtype}, not {wrong[0]}" if wrong else None


class GroupedExperts(SequentialMLP):
    """Megatron's experts in one grouped product where torch has a kernel for it, otherwise one after another.

    Parameters keep their names, so that checkpoints and published weights do not depend on the kernel.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        first, second = (getattr(self.local_experts[0], name).weight for name in LAYERS)
        self.one_by_one = why_one_by_one(first.device, first.dtype, *first.shape, *second.shape)  # None: grouped
        if self.config.activation_func is not F.silu:
            self.one_by_one = "experts whose units are not SwiGLU are not grouped"
        for expert in self.local_experts if self.config.add_bias_linear else ():
            self.one_by_one = "experts with biases are not grouped"
            expert.linear_fc2.bias.sequence_parallel = False  # Megatron would sum those of different experts
            # Otherwise Megatron takes those of all but the first tensor-parallel rank for copies, and the gradient norm
            # lacks them.
            expert.linear_fc2.bias.tensor_model_parallel = True
            expert.linear_fc2.register_forward_hook(_copied)

    def forward(self, hidden: Tensor, tokens_per_expert: Any, probs: Tensor) -> tuple[Tensor, None]:
        """Return the experts' weighted outputs.

        Args:
            hidden: [T, h], sorted by expert.
            tokens_per_expert: Number of tokens of each expert.
            probs: [T], weights of the outputs.
        """
        if not len(hidden) or self.num_local_experts == 1 or self.one_by_one is not None:
            return super().forward(hidden, tokens_per_expert, probs)
        ends = torch.as_tensor(tokens_per_expert).to(hidden.device).cumsum(0, dtype=torch.int32)
        first, second = ([getattr(expert, name).weight for expert in self.local_experts] for name in LAYERS)
        between = weighted_bias_swiglu_impl(grouped_linear(hidden, ends, first), None, probs[:, None], False)
        return grouped_linear(between, ends, second), None


class NormedExperts(MoELayer):
    """Megatron's experts and shared expert, which read the residual itself through norms of their own.

    What each of them adds is normalized, too.
    """

    def __init__(self, config: Any, *args: Any, norm: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__(config, *args, **options)
        make = partial(norm, config, config.hidden_size, config.layernorm_epsilon)
        self.before_shared, self.after_shared = make(), make()
        self.before_experts, self.after_experts = make(), make()

    def forward(
        self, hidden: Tensor, intermediate_tensors: None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Return what both add to the residual [s, b, h], and no bias."""
        del intermediate_tensors, padding_mask  # of graphs on GPUs, and of Megatron's router losses
        shared = self.after_shared(self.shared_experts_compute(self.before_shared(hidden)))
        probs, routing_map = self.route(hidden)
        inner, probs = self.preprocess(self.before_experts(hidden), probs, routing_map)
        output, _ = self.routed_experts_compute(*self.dispatch(inner, probs))
        return shared + self.after_experts(self.postprocess(self.combine(output), None)), None


def _copied(_module: Any, _inputs: Any, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Copy a layer's output, to which Megatron adds the bias in place: autograd forbids that for a view."""
    output, bias = found
    return output.clone(), bias


def grouped_linear(inputs: Tensor, ends: Tensor, weights: list[Tensor]) -> Tensor:
    """Multiply each block of rows by its own weight.

    Args:
        inputs: [T, in].
        ends: End of each block of rows, int32; the last one is T.
        weights: [out, in] of each block.

    Returns:
        [T, out].
    """
    product: Any = _GroupedLinear.apply(inputs, ends, *weights)
    return product


class _GroupedLinear(torch.autograd.Function):
    """Grouped product. Weights are stacked in each pass and not saved: the backward pass has the parameters."""

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
        # The kernels leave uninitialised memory for a block without rows (pytorch/pytorch#172439, #174314).
        has_rows = ends.diff(prepend=ends.new_zeros(1)) > 0
        return of_inputs, None, *torch.where(has_rows[:, None, None], of_weights, 0.0).unbind()
