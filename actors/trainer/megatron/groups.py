"""Process groups of torch.distributed and Megatron for the trainer's ranks."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo

from actors.trainer.megatron import cpu
from actors.trainer.megatron.imports import initialize_rng_tracker, model_parallel_cuda_manual_seed, parallel_state
from runtime.settings.tables.trainer import MegatronConfig

T = TypeVar("T")

COLLECTIVE_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Rank of this process and size of the trainer."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # GPU of this process on its node
    store: Any = None  # torch.distributed Store shared by all ranks; None for a single process


@cache
def gloo_devices(interfaces: str) -> list[Any]:
    """Return gloo's devices of this process, on the named network interfaces; by default on that of the host name."""
    if interfaces:
        return [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
    return [ProcessGroupGloo.create_default_device()]


class SharedGloo(ProcessGroupGloo):
    """A process group on the devices of all others of this process.

    The thread of a device wakes up 100 times a second, and torch makes a device for each group. Megatron-core makes 32
    groups: their threads took 3 % of an idle core, and more of a busy one.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        """Take what torch passes to the class that this one replaces."""
        options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue] - not in torch's stubs
        options._devices = gloo_devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
        options._threads = 2 * len(options._devices)  # as torch has them
        options._timeout = timeout
        super().__init__(store, rank, size, options)


def device_of(kind: str, ranks: Ranks) -> torch.device:
    """Return the device of this rank.

    Raises:
        ValueError: The setting is "cuda" and torch finds no GPU.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if cpu.needed():
        raise ValueError("trainer.device = 'cuda', but torch finds no GPU here: set trainer.device = 'cpu'")
    return torch.device("cuda", ranks.local_rank)


def join(ranks: Ranks, layout: MegatronConfig, device: torch.device, *, seed: int) -> None:
    """Join the process group and build Megatron's parallel groups. Does nothing in a process that has joined already.

    Raises:
        ValueError: The layout does not divide the number of ranks.
    """
    tensor, pipeline = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    context, virtual = layout.context_parallel_size, layout.virtual_pipeline_model_parallel_size or 1
    if ranks.world_size % (tensor * pipeline * context):
        sizes = f"{tensor} x {pipeline} x {context}"
        raise ValueError(f"{ranks.world_size} ranks do not divide into replicas of {sizes} ranks")
    if dist.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif ranks.world_size == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise gloo resolves the host name, which may fail
    if device.type == "cpu":
        distributed_c10d.ProcessGroupGloo = SharedGloo
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=ranks.store or dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage] - documented as public
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    parallel_state.initialize_model_parallel(
        tensor,
        pipeline,
        virtual if virtual > 1 else None,
        context_parallel_size=context,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
    )
    initialize_rng_tracker(inference_rng_tracker=device.type == "cpu")  # the CPU has no CUDA generator to track
    torch.manual_seed(seed)
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(seed)


def data_parallel_rank() -> int:
    """Return the data-parallel rank: the replica that this rank belongs to."""
    return parallel_state.get_data_parallel_rank()


def data_parallel_size() -> int:
    """Return the number of model replicas."""
    return parallel_state.get_data_parallel_world_size()


def context_parallel_group() -> Any:
    """Return the process group of the ranks that hold parts of the same sequences."""
    return parallel_state.get_context_parallel_group()


def sum_over_replicas(values: torch.Tensor) -> torch.Tensor:
    """Sum values of the last pipeline stages over all replicas. Every stage gets the result.

    Args:
        values: On the CPU, same shape on every rank.
    """
    return _over_replicas(values, dist.ReduceOp.SUM)


def max_over_replicas(values: torch.Tensor) -> torch.Tensor:
    """Take the maximum over all replicas, like `sum_over_replicas`."""
    return _over_replicas(values, dist.ReduceOp.MAX)


def _over_replicas(values: torch.Tensor, operation: Any) -> torch.Tensor:
    if dist.get_world_size() == 1:
        return values
    on_device = values.to(torch.cuda.current_device())
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)  # CP ranks hold parts of the tokens
    dist.all_reduce(on_device, op=operation, group=group)
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(on_device, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return on_device.cpu()


def own_rows(column: NDArray[Any] | None, rows_of_replica: Sequence[NDArray[np.int64]]) -> NDArray[Any] | None:
    """Scatter the rows of a column to the replicas, and return those of this rank. A collective of all ranks.

    Args:
        column: [N, E], on rank 0 alone. None on rank 0: there is no column, and every rank gets None.
        rows_of_replica: Rows of each replica, the same on every rank.
    """
    own = rows_of_replica[data_parallel_rank()]
    if dist.get_world_size() == 1:
        return None if column is None else column[own]
    device = torch.cuda.current_device()
    form = torch.zeros(2, dtype=torch.int64, device=device)
    replicas = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(replicas, torch.tensor([data_parallel_rank()], dtype=torch.int64, device=device))
    if column is not None:
        form.copy_(torch.tensor([column.shape[1], column.dtype.itemsize]))
    dist.broadcast(form, src=0)
    width, item_bytes = form.tolist()
    if not width:
        return None
    received = torch.empty(max(map(len, rows_of_replica)) * width * item_bytes, dtype=torch.uint8, device=device)
    parts = None
    if column is not None:
        of_replica = [_padded(column[rows], received) for rows in rows_of_replica]
        parts = [of_replica[int(replica)] for replica in replicas]
    dist.scatter(received, parts, src=0)
    whole = received.cpu().numpy()[: len(own) * width * item_bytes]
    return whole.view({1: np.uint8, 2: np.int16}[item_bytes]).reshape(len(own), width)


def _padded(rows: NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the rows, zero-padded to the size of `like`."""
    found = torch.zeros_like(like)
    sent = torch.from_numpy(np.ascontiguousarray(rows).view(np.uint8).ravel())
    found[: len(sent)].copy_(sent)
    return found


def on_any_rank(flags: torch.Tensor) -> torch.Tensor:
    """Combine flags over all ranks with a logical or. Every rank gets the result.

    Args:
        flags: On the CPU, same shape on every rank.
    """
    if dist.get_world_size() == 1:
        return flags
    on_device = flags.to(torch.cuda.current_device(), torch.uint8)
    dist.all_reduce(on_device, op=dist.ReduceOp.MAX)
    return on_device.cpu().bool()


def all_gather_objects(value: T) -> list[T]:
    """All-gather one object per rank."""
    values: list[T] = [value] * dist.get_world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def leave() -> None:
    """Leave the process group, if this process has joined one."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
