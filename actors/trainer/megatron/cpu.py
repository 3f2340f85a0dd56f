"""CPU shim: redirects Megatron-core's CUDA calls to the CPU, so that it trains unmodified without a GPU."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Megatron's optimizers and gradient clipper compare the strings that Tensor.type() returns.
_CUDA_TYPES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}
# Functions that create tensors on a named device.
_NEW = ("arange", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")
_LIKE = ("empty_like", "full_like", "ones_like", "zeros_like")


def needed() -> bool:
    """Whether this process has no GPU: the machine has none, or CUDA_VISIBLE_DEVICES hides them."""
    return not torch.cuda.is_available()


class _Stream:
    """Replacement for a CUDA stream. There is only one, always current and always synchronised."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_error: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Callable[..., "_Stream"]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: self


def install() -> None:
    """Replace the CUDA functions that Megatron calls, for the whole process.

    A TorchFunctionMode would intercept every torch call instead: that cost about 7 % of a small model's step.

    Raises:
        RuntimeError: The process sees a GPU.
    """
    if not needed():
        raise RuntimeError(
            "this process sees a GPU, but the CPU shim needs none: set CUDA_VISIBLE_DEVICES to an empty string"
        )
    _without_compiler()
    replacements: dict[str, Any] = {
        "Stream": _Stream,
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "current_stream": _Stream,
        "default_stream": _Stream,
        "stream": _Stream,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    with torch.device("cpu"):
        torch.empty(0)  # `with torch.device` recognises torch's functions by identity from its first use on
    for name in (*_NEW, *_LIKE):
        setattr(torch, name, _on_the_cpu(getattr(torch, name)))
    methods = {"cuda": _itself, "record_stream": lambda *_: None, "type": _type_on_a_gpu(Tensor.type)}
    for name, method in methods.items():
        setattr(Tensor, name, method)


def _on_the_cpu(maker: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a tensor function: CUDA devices become the CPU, and memory is not pinned, which needs a GPU."""

    @wraps(maker)
    def make(*args: Any, **options: Any) -> Tensor:
        if _is_cuda(options.get("device")):
            options["device"] = "cpu"
        options.pop("pin_memory", None)
        return maker(*args, **options)

    return make


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda"))


def _itself(tensor: Tensor, *_args: Any, **_options: Any) -> Tensor:
    return tensor


def _type_on_a_gpu(of: Callable[..., Any]) -> Callable[..., Any]:
    def name(tensor: Tensor, *args: Any, **options: Any) -> Any:
        found = of(tensor, *args, **options)
        return _CUDA_TYPES.get(found, found) if isinstance(found, str) else found

    return name


def install_random_state(random: Any) -> None:
    """Make Megatron's recomputation save and restore the CPU's random state instead of a GPU's.

    Args:
        random: The module megatron.core.tensor_parallel.random.
    """

    def get(*_args: Any, **_options: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def put(state: torch.Tensor, *_args: Any, **_options: Any) -> None:
        torch.set_rng_state(state)

    random._get_cuda_rng_state, random._set_cuda_rng_state = get, put


def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replace Megatron's maybe_move_tensor_to_cpu, which acts on GPU tensors only. Token counts become NumPy arrays."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _GatherParts(torch.autograd.Function):
    """All-gather of parts of different sizes, which gloo lacks. The backward pass sums the gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, sizes: Sequence[int]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group, ctx.sizes = group, sizes
        return _gathered(part, group, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _summed_part(gradient, ctx.group, ctx.sizes), None, None


class _SumParts(torch.autograd.Function):
    """Reduce-scatter with parts of different sizes. The backward pass gathers the gradients."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Any, sizes: Sequence[int]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group, ctx.sizes = group, sizes
        return _summed_part(whole, group, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gathered(gradient, ctx.group, ctx.sizes), None, None


def _gathered(part: Tensor, group: Any, sizes: Sequence[int]) -> Tensor:
    padded = part.new_zeros(max(sizes), *part.shape[1:])
    padded[: len(part)] = part
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([whole[:size] for whole, size in zip(parts, sizes, strict=True)])


def _summed_part(whole: Tensor, group: Any, sizes: Sequence[int]) -> Tensor:
    total = whole.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total.split(list(sizes))[dist.get_rank(group)]


def gather(general: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap Megatron's gather_from_sequence_parallel_region: with split sizes, use `_GatherParts`."""

    def apply(input_: Tensor, *args: Any, output_split_sizes: Sequence[int] | None = None, **options: Any) -> Any:
        if output_split_sizes is None:
            return general(input_, *args, **options)
        return _GatherParts.apply(input_, options["group"], output_split_sizes)

    return apply


def sum_parts(general: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap Megatron's reduce_scatter_to_sequence_parallel_region: with split sizes, use `_SumParts`."""

    def apply(input_: Tensor, *args: Any, input_split_sizes: Sequence[int] | None = None, **options: Any) -> Any:
        if input_split_sizes is None:
            return general(input_, *args, **options)
        return _SumParts.apply(input_, options["group"], input_split_sizes)

    return apply


def _without_compiler() -> None:
    """Call what torch hides from its compiler, and the steps of optimizers, directly: both load the compiler."""
    optimizer = torch.optim.Optimizer
    hidden = (optimizer.add_param_group, optimizer.zero_grad, optimizer.state_dict, optimizer.load_state_dict)
    for function in (*hidden, checkpoint):
        plain: Any = getattr(function, "__wrapped__", None)
        if plain is not None:
            plain.__dynamo_disable = plain
    for kind in (torch.optim.Adam, torch.optim.SGD):  # AdamW is an Adam
        step: Any = getattr(kind.step, "__wrapped__", None)
        if step is not None:
            kind.step = torch.no_grad()(step)


@contextmanager
def eager_imports() -> Generator[None]:
    """Make torch.compile the identity while Megatron is imported.

    Megatron decorates its fused functions with torch.compile at import, which alone loads the compiler (1.1 s). The CPU
    path uses none of them. Compiling one would take about 20 s and a C++ compiler.
    """

    def identity(model: Any = None, **_options: Any) -> Any:
        return (lambda decorated: decorated) if model is None else model

    compile_function: Any = torch.compile
    torch.compile = identity  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.compile = compile_function
