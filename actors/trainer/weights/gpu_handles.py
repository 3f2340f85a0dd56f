"""Sending of buckets to engines on the trainer's GPUs: calls carry CUDA IPC handles, the data stays on the GPUs.

Each GPU of an engine has a trainer rank, and an engine process that reads a handle created on that GPU. A bucket
therefore goes from its stage's first rank to all ranks. Each rank creates a handle of its copy, and the first rank
calls the engines to load it. The copies live until all engines have answered. CUDA frees the memory of a process that
dies. If an engine dies with a bucket, the trainer may keep its copy: torch waits until the reader releases it.

All ranks act together on their torch threads, bucket by bucket and stage by stage. A broadcast concurrent with another
collective of the same ranks could deadlock.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Final, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from actors.trainer.megatron.groups import COLLECTIVE_TIMEOUT_S, all_gather_objects
from actors.trainer.weights.calls import POOL, Ask
from actors.trainer.weights.engines import Sent, aligned, described, fingerprints_of, flattened
from actors.trainer.weights.export import WeightConversion
from actors.trainer.weights.gathering import Bucket
from actors.trainer.weights.shared_memory import PickledCall, bucket_payload, places_of
from messages import BucketSent
from runtime.settings.placement import gpus_of
from runtime.settings.topology import Topology

ASK_TIMEOUT_S: Final = COLLECTIVE_TIMEOUT_S / 2  # the other ranks wait for the answer in a collective

T = TypeVar("T")


def ranks_at_engines(topology: Topology) -> dict[str, tuple[int, ...]]:
    """Map each engine to the trainer's ranks on its GPUs, in the order of the engine's ranks.

    Args:
        topology: topology whose engines use the trainer's GPUs.
    """
    pool = topology.engines[POOL]
    ranks = {gpu: rank for rank, gpu in enumerate(gpus_of(topology, topology.trainer.gpus))}
    gpus, size = gpus_of(topology, pool.gpus), pool.num_gpus_per_engine
    return {
        f"engine.{POOL}.{index}": tuple(ranks[gpu] for gpu in gpus[index * size : (index + 1) * size])
        for index in range(len(gpus) // size)
    }


def handle_of(flat: Tensor) -> PickledCall:
    """Create a handle with which another process rebuilds a tensor of this GPU. SGLang finds the GPU by its UUID.

    Processes number the GPUs that they see, so torch's device index may mean another GPU there.
    """
    torch.cuda.current_stream(flat.device).synchronize()
    _, arguments = reductions.reduce_tensor(flat)
    uuid = str(torch.cuda.get_device_properties(flat.device).uuid)
    return PickledCall(reductions.rebuild_cuda_tensor, *arguments[:6], uuid, *arguments[7:])


class HandleSender:
    """Sends the buckets of a weight sync. All ranks create and use it together."""

    def __init__(
        self,
        session: str,
        readers: Mapping[str, int],
        at_engines: Mapping[str, Sequence[int]],
        ask: Ask,
        *,
        device: torch.device,
        fingerprints: bool,
        timeout_s: float,
    ) -> None:
        """Prepare to send the buckets of one weight sync.

        Args:
            session: ID of the weight sync.
            readers: number of ranks of each member engine.
            at_engines: the trainer's ranks on the GPUs of each engine.
            ask: calls the member engines.
            device: device of this rank.
            fingerprints: compute fingerprints of the tensors.
            timeout_s: seconds for a bucket.

        Raises:
            ValueError: an engine's number of ranks is not its number of GPUs. Raised on all ranks.
        """
        wrong = [engine for engine, number in readers.items() if len(at_engines.get(engine, ())) != number]
        if wrong:
            raise ValueError(f"{wrong[0]} has {readers[wrong[0]]} ranks, but one for each of its GPUs was expected")
        self._session = session
        self._at_engines = {engine: at_engines[engine] for engine in readers}
        self._ask = ask
        self._device = device
        self._timeout_s = min(timeout_s, ASK_TIMEOUT_S)
        self._num_buckets = self._size_bytes = 0
        self._takes_fingerprints = fingerprints
        self._fingerprints: dict[str, str] = {}
        self._failed: dict[str, str] = {}

    def send(self, weights: Iterator[Bucket], form: WeightConversion, *, stage: int, firsts: Sequence[int]) -> Sent:
        """Send the tensors of all stages. Returns the result of this rank.

        Args:
            weights: buckets of this rank's stage; empty buckets on ranks that receive no tensors.
            form: conversion of the tensors before they are sent.
            stage: pipeline stage of this rank.
            firsts: first rank of each stage.
        """
        for number, first in enumerate(firsts):
            if not self._send_stage(number, first, weights if number == stage else None, form):
                break
        return Sent(self._num_buckets, self._size_bytes, self._fingerprints, failed=self._failed)

    def _send_stage(self, stage: int, first: int, weights: Iterator[Bucket] | None, form: WeightConversion) -> bool:
        """Send the tensors of a stage. Returns whether all engines loaded them."""
        for index in count():
            bucket = None if weights is None else next(weights, None)
            is_first = dist.get_rank() == first
            if bucket is not None and is_first:
                bucket = self._cast(bucket, form)
            step = _from(first, described(self._session, stage, index, bucket) if bucket else None)
            if step is not None:
                self._send_bucket(step, bucket if is_first else None, first)
            if failed := _from(first, self._failed):
                return not failed
            if step is None:
                return True
        raise AssertionError

    def _cast(self, bucket: Bucket, form: WeightConversion) -> Bucket | None:
        try:
            return aligned(form.of_bucket(bucket))
        except ValueError as error:
            self._failed[""] = str(error)
            return None

    def _send_bucket(self, step: BucketSent, bucket: Bucket | None, first: int) -> None:
        """Broadcast a bucket to every rank, and have the engines load it there."""
        if bucket is None:
            flat = torch.empty(places_of(step)[-1].end_idx, dtype=torch.uint8, device=self._device)
        else:
            flat = flattened(bucket)
        dist.broadcast(flat, src=first)
        is_needed = any(dist.get_rank() in ranks for ranks in self._at_engines.values())
        payloads = all_gather_objects(bucket_payload(handle_of(flat), step) if is_needed else "")
        if bucket is not None:
            by_engine = {engine: tuple(payloads[rank] for rank in ranks) for engine, ranks in self._at_engines.items()}
            self._have_taken(msgspec.structs.replace(step, payloads=by_engine), bucket)
            self._size_bytes += flat.nbytes
        dist.barrier()  # every rank keeps its copy until here
        del flat
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def _have_taken(self, step: BucketSent, bucket: Bucket) -> None:
        """Have the engines load a bucket. Record errors instead of raising: the other ranks wait for this rank."""
        try:
            request = self._ask(step, self._timeout_s)
            if self._takes_fingerprints:  # while the engines load it
                self._fingerprints |= fingerprints_of(bucket)
            failed = request.result()
        except (RuntimeError, OSError, ValueError) as error:
            failed = {"": str(error)}
        self._failed |= {engine: f"bucket {step.index}: {reason}" for engine, reason in failed.items()}
        self._num_buckets += 1


def _from(rank: int, value: T) -> T:
    """Broadcast a value from one rank to all."""
    values: list[Any] = [value]
    dist.broadcast_object_list(values, src=rank)
    return values[0]
