"""Weight export: full tensors from all ranks, bucket by bucket, to the sinks of a transport.

Begin an export, advance it between micro-batches or not at all, and finish it. A live export gathers the model's own
tensors, an async one a copy of them, and weights that were gathered before come from the host: only the source of the
buckets differs. Sinks are in files.py, delta.py, engines.py (broadcast, shared memory) and here (a copy on the host).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from actors.trainer.megatron.groups import all_gather_objects
from actors.trainer.megatron.memory import host_copy
from actors.trainer.models.config import HfConfig
from actors.trainer.models.shards import Entry
from actors.trainer.weights.gathering import Bucket, Part, buckets, stage_group, whole_tensors

WORK_TIMEOUT_S: Final = 3600.0  # seconds, for a bucket
T = TypeVar("T")
Work = Callable[[], None]


class WeightConversion(NamedTuple):
    """Conversion of weights to another dtype or quantization (weights/cast.py).

    Raises ValueError for values that the target dtype cannot represent.
    """

    of_bucket: Callable[[Bucket], Bucket]
    of_entries: Callable[[Iterable[Entry]], list[Entry]]  # the same for metadata alone


def _unchanged(bucket: Bucket) -> Bucket:
    return bucket


AS_TRAINED: Final = WeightConversion(_unchanged, list)


class Sink(Protocol):
    """Destination of full tensors, on the first rank of each pipeline stage. It keeps the reason of its own failure."""

    def take(self, bucket: Bucket) -> Work:
        """Take a bucket of at least one tensor, and return the work that the weight thread has to do for it.

        Called while the weight thread may still work for the bucket before. Buckets after a failure are dropped.
        """
        ...

    def close(self) -> Any:
        """Return the result, after all work."""
        ...


def weight_thread() -> ThreadPoolExecutor:
    """Create the one thread of a rank that writes and sends weights."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")


class BucketWriter:
    """Passes buckets to sinks. The weight thread works for one bucket while the next one is gathered."""

    def __init__(self, sinks: Sequence[Sink], thread: ThreadPoolExecutor) -> None:
        """Start without a bucket. Without sinks, buckets are empty: this rank receives no tensors."""
        self._sinks = sinks
        self._thread = thread
        self.pending: Future[None] | None = None  # the work for the last bucket

    @property
    def is_free(self) -> bool:
        """Whether the weight thread has nothing to do here."""
        return self.pending is None or self.pending.done()

    def put(self, bucket: Bucket, *, wait: bool = False) -> None:
        """Pass a bucket on after the previous one.

        Args:
            bucket: full tensors by name; empty on ranks that receive none.
            wait: return only after the work for this bucket, too.
        """
        works = [sink.take(bucket) for sink in self._sinks] if bucket else []
        self.wait()
        if works:
            self.pending = self._thread.submit(_do, works)
        if wait:
            self.wait()

    def work(self, bucket: Bucket) -> None:
        """Pass a bucket on and do the work for it. Called on the weight thread."""
        for sink in self._sinks:
            sink.take(bucket)()

    def wait(self) -> None:
        """Wait until the weight thread has done its work here.

        Raises:
            TimeoutError: it did not within WORK_TIMEOUT_S.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result(WORK_TIMEOUT_S)

    def close(self) -> list[Any]:
        """Wait, and return the result of each sink."""
        self.wait()
        return [sink.close() for sink in self._sinks]


def _do(works: list[Work]) -> None:
    while works:
        works.pop(0)()  # each holds a bucket's bytes


class WeightExport(Generic[T]):
    """One export. All ranks begin, advance and finish it together, on their torch threads.

    Two buckets are in memory at a time: one in the sinks, one being filled.
    """

    def __init__(
        self,
        source: Iterator[Bucket],
        sinks: Sequence[Sink],
        result: Callable[[list[list[Any]]], T],
        thread: ThreadPoolExecutor,
        *,
        device: torch.device,
        bucket_bytes: int = 0,
        form: WeightConversion = AS_TRAINED,
    ) -> None:
        """Begin an export, without gathering yet.

        Args:
            source: buckets of this rank: `gathered`, or `kept`.
            sinks: sinks of this rank; none if it receives no tensors.
            result: makes the result from those of all ranks' sinks, in their order.
            thread: the rank's weight thread.
            device: device of this rank.
            bucket_bytes: a larger bucket is the only one in memory; 0: no limit.
            form: conversion of the tensors before the sinks get them.
        """
        self._source = source
        self._writer = BucketWriter(sinks, thread)
        self._result = result
        self._thread = thread
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._form = form
        self._error = ""
        self._has_more = True
        self._in_background: Future[None] | None = None

    @property
    def pending(self) -> "Future[None] | None":
        """Pending work of this rank's weight thread for the last bucket; None: there is none."""
        return self._writer.pending

    def advance(self) -> bool:
        """Gather the next bucket, if the sinks of the stage are idle. All ranks of the stage call it together.

        Returns:
            Whether more buckets may remain.
        """
        if self._has_more and self._all_are_free():
            bucket = next(self._source, None)
            self._has_more = bucket is not None
            self._writer.put(self._converted(bucket or []))
        return self._has_more

    def continue_in_background(self) -> "Future[None]":
        """Pass on all buckets of a source that needs no other rank, on the weight thread. Then call `finish`."""
        self._in_background = self._thread.submit(self._drain)
        return self._in_background

    def _drain(self) -> None:
        for bucket in self._source:
            if converted := self._converted(bucket):
                self._writer.work(converted)

    def finish(self) -> T:
        """Pass on the remaining buckets, and wait until the sinks have worked for all of them.

        Raises:
            ValueError: the target dtype cannot represent a value. Raised on all ranks; names the tensor and the value.
        """
        if self._in_background is not None:
            self._in_background.result()
        for bucket in self._source:
            is_large = 0 < self._bucket_bytes < sum(tensor.nbytes for _, tensor in bucket)
            self._writer.put(self._converted(bucket), wait=is_large)
        ended: list[tuple[str, list[Any]]] = all_gather_objects((self._error, self._writer.close()))
        if errors := [error for error, _ in ended if error]:
            raise ValueError(f"weights cannot be sent to engines: {'; '.join(errors)}")
        return self._result([results for _, results in ended])

    def _converted(self, bucket: Bucket) -> Bucket:
        """Convert a bucket. After a failure, return empty buckets: the other ranks still iterate over all of them."""
        try:
            return [] if self._error else self._form.of_bucket(bucket)
        except ValueError as error:
            self._error = str(error)
            return []

    def _all_are_free(self) -> bool:
        """Whether the sinks of the stage are idle. All ranks of the stage get the same answer."""
        group, free = stage_group(), self._writer.is_free
        if dist.get_world_size(group) == 1:
            return free
        flag = torch.tensor(int(free), dtype=torch.int32, device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
        return bool(flag.item())


class HostCopy:
    """Sink that keeps its buckets on the host."""

    def __init__(self) -> None:
        """Start empty."""
        self.buckets: list[Bucket] = []

    def take(self, bucket: Bucket) -> Work:
        """Keep a bucket. Tensors on the host are not copied."""
        self.buckets.append([(name, host_copy(each) if each.is_cuda else each) for name, each in bucket])
        return _nothing

    def close(self) -> None:
        """Do nothing: the buckets stay here, since results go to all ranks."""


def _nothing() -> None:
    pass


def gathered(parts: list[Part], model: HfConfig, device: torch.device, bucket_bytes: int) -> Iterator[Bucket]:
    """Gather the tensors of all ranks of the stage; buckets are empty on ranks that receive none.

    Args:
        parts: this rank's parts. The tensors must not change meanwhile; the list is emptied as they are gathered.
        model: configuration of the full model.
        device: device of this rank.
        bucket_bytes: maximum bytes of tensors gathered at a time; a larger tensor gets its own bucket.
    """
    return buckets(whole_tensors(_taken(parts), model, device), bucket_bytes)


def kept(host_buckets: Sequence[Bucket], device: torch.device) -> Iterator[Bucket]:
    """Yield buckets that a HostCopy holds, on a device."""
    for bucket in host_buckets:
        yield [(name, tensor.to(device)) for name, tensor in bucket]


def copied(parts: Iterable[Part]) -> list[Part]:
    """Copy the parts' tensors to the host, so that the model's tensors may change."""
    return [part._replace(tensor=host_copy(part.values()), merge=None) for part in parts]


def _taken(parts: list[Part]) -> Iterator[Part]:
    """Yield the parts without keeping references to them, so that their memory is freed early."""
    parts.reverse()
    while parts:
        yield parts.pop()
