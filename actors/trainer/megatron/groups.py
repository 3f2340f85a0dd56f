"""The trainer's processes as torch.distributed and Megatron see them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from actors.trainer.megatron import cpu
from actors.trainer.megatron.imports import initialize_rng_tracker, model_parallel_cuda_manual_seed, parallel_state
from runtime.settings.topology import MegatronConfig

T = TypeVar("T")

COLLECTIVE_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Who this process is among the trainer's."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # GPU of this process on its node
    store: Any = None  # a torch.distributed Store that all ranks reach; none for a single process


def device_of(kind: str, ranks: Ranks) -> torch.device:
    """The device of this rank.

    Raises:
        ValueError: a GPU is asked for and there is none.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if cpu.needed():
        raise ValueError("trainer.device = 'cuda', but torch finds no GPU here: set trainer.device = 'cpu'")
    return torch.device("cuda", ranks.local_rank)


def join(ranks: Ranks, layout: MegatronConfig, device: torch.device, *, seed: int) -> None:
    """Join the process group and build Megatron's groups. Once per process; again with the same layout does nothing.

    Raises:
        ValueError: the layout does not divide the ranks.
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
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo else looks up this host's name, which may not resolve
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
    initialize_rng_tracker(inference_rng_tracker=device.type == "cpu")  # the CPU has no CUDA generator to keep track of
    torch.manual_seed(seed)
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(seed)


def data_parallel_rank() -> int:
    """Which replica this rank belongs to."""
    return parallel_state.get_data_parallel_rank()


def data_parallel_size() -> int:
    """Replicas of the model."""
    return parallel_state.get_data_parallel_world_size()


def is_last_stage() -> bool:
    """Whether this rank sees logits."""
    return parallel_state.is_pipeline_last_stage()


def sum_over_replicas(values: torch.Tensor) -> torch.Tensor:
    """Sum numbers of the last pipeline stages over all replicas; every stage gets the result.

    Args:
        values: on the CPU, same shape on every rank.
    """
    return _over_replicas(values, dist.ReduceOp.SUM)


def max_over_replicas(values: torch.Tensor) -> torch.Tensor:
    """Like `sum_over_replicas`, the maximum."""
    return _over_replicas(values, dist.ReduceOp.MAX)


def _over_replicas(values: torch.Tensor, operation: Any) -> torch.Tensor:
    if dist.get_world_size() == 1:
        return values
    on_device = values.to(torch.cuda.current_device())
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)  # whose ranks have a part of the tokens
    dist.all_reduce(on_device, op=operation, group=group)
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(on_device, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return on_device.cpu()


def own_rows(column: NDArray[Any] | None, rows_of_replica: Sequence[NDArray[np.int64]]) -> NDArray[Any] | None:
    """The rows of a column that this rank's replica takes. A collective of all ranks.

    Args:
        column: [N, E], on rank 0 alone; none: there is none, on any rank.
        rows_of_replica: which rows each replica takes; the same on every rank.
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
    """Their bytes, and what is missing to as many as another has."""
    found = torch.zeros_like(like)
    sent = torch.from_numpy(np.ascontiguousarray(rows).view(np.uint8).ravel())
    found[: len(sent)].copy_(sent)
    return found


def on_any_rank(flags: torch.Tensor) -> torch.Tensor:
    """Flags that any rank has set, equal on all of them.

    Args:
        flags: on the CPU, same shape on every rank.
    """
    if dist.get_world_size() == 1:
        return flags
    on_device = flags.to(torch.cuda.current_device(), torch.uint8)
    dist.all_reduce(on_device, op=dist.ReduceOp.MAX)
    return on_device.cpu().bool()


def told(value: T) -> list[T]:
    """What each rank says, on all of them."""
    values: list[T] = [value] * dist.get_world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def leave() -> None:
    """Leave the process group, if joined."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
