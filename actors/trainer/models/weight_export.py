"""Weight export: full tensors from all ranks to a sink, such as the files of a directory."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist

from actors.trainer.megatron.groups import all_gather_objects
from actors.trainer.megatron.memory import host_copy
from actors.trainer.models.config import HfConfig
from actors.trainer.models.gathering import Bucket, Part, buckets, first_rank, stage_group, whole_entries, whole_tensors
from actors.trainer.models.publish import Written
from actors.trainer.models.shards import Entry, Shard, ShardWriter, bytes_of, cut_into_shards, named, write_index
from actors.trainer.sending.delta import DeltaWriter
from messages import FileSum
from runtime.models.delta import DeltaError, TensorDelta
from runtime.util.disk import is_full, no_space

WRITE_TIMEOUT_S = 3600.0  # seconds, for a bucket


class DeltaBase(NamedTuple):
    """Base version of a delta, which is written in addition to full files."""

    directory: Path  # of the delta; exists, and is the same for all ranks
    base: Path  # full files of the base version
    checksums: Mapping[str, str]  # of the base version's tensors


class _Share(NamedTuple):
    """Files, checksums and errors of the tensors that one rank wrote."""

    shards: Sequence[Shard]
    checksums: dict[str, str]  # by tensor
    files: dict[str, FileSum]  # by name
    error: str  # why writing failed; empty: it succeeded
    tensors: Sequence[TensorDelta]  # delta form of each tensor
    no_delta: str  # why there is no delta; empty: there is, or none was requested
    is_full: bool = False  # writing failed because the disk is full

    @property
    def size_bytes(self) -> int:
        """Size of the tensors in its files."""
        return sum(entry.size_bytes for shard in self.shards for entry in shard.entries)


class WeightConversion(NamedTuple):
    """Conversion of weights to another dtype or quantization (sending/cast.py).

    Raises ValueError for values that the target dtype cannot represent.
    """

    of_bucket: Callable[[Bucket], Bucket]
    of_entries: Callable[[Iterable[Entry]], list[Entry]]  # the same for metadata alone


def _unchanged(bucket: Bucket) -> Bucket:
    return bucket


AS_TRAINED: Final = WeightConversion(_unchanged, list)


class Sink(Protocol):
    """Destination of full tensors, on the first rank of each pipeline stage. Other ranks have a null sink."""

    @property
    def is_free(self) -> bool:
        """Whether the sink is idle."""
        ...

    def hand_over(self, bucket: Bucket, *, wait: bool = False) -> None:
        """Take a bucket, possibly empty, after the previous one is processed. Buckets after a failure are dropped.

        Args:
            bucket: full tensors by name.
            wait: return only after this bucket is processed, too.
        """
        ...

    def close(self) -> Any:
        """Wait until all buckets are processed, and return the result."""
        ...


class WeightFlow:
    """Gathers weights and passes them to sinks. All ranks create, drive and finish it together, on their torch threads.

    Two buckets are in memory at a time: one in the sink, one being filled.
    """

    def __init__(
        self,
        parts: list[Part],
        model: HfConfig,
        sink: Sink,
        *,
        device: torch.device,
        bucket_bytes: int,
        form: WeightConversion = AS_TRAINED,
    ) -> None:
        """Prepare the flow, without gathering yet.

        Args:
            parts: this rank's parts. The tensors must not change until `finish`; the list is emptied as they are
                gathered.
            model: configuration of the full model.
            sink: sink of this rank.
            device: device of this rank.
            bucket_bytes: maximum bytes of tensors gathered at a time; a larger tensor gets its own bucket.
            form: conversion of the tensors before the sink gets them.
        """
        self._sink = sink
        self._form = form
        self._error = ""
        self._buckets = buckets(whole_tensors(_taken(parts), model, device), bucket_bytes)
        self._bucket_bytes, self._device = bucket_bytes, device
        self._has_more = True

    def advance(self) -> bool:
        """Gather the next bucket, if the stage's sink is idle. All ranks of the stage call it together.

        Returns:
            Whether more buckets may remain.
        """
        if self._has_more and self._all_are_free():
            bucket = next(self._buckets, None)
            self._has_more = bucket is not None
            self._sink.hand_over(self._cast(bucket or []))
        return self._has_more

    def _cast(self, bucket: Bucket) -> Bucket:
        """Convert a bucket. After a failure, return empty buckets: the other ranks still iterate over all of them."""
        try:
            return [] if self._error else self._form.of_bucket(bucket)
        except ValueError as error:
            self._error = str(error)
            return []

    def _all_are_free(self) -> bool:
        """Whether the sink of the stage is idle. All ranks of the stage get the same answer."""
        group, free = stage_group(), self._sink.is_free
        if dist.get_world_size(group) == 1:
            return free
        flag = torch.tensor(int(free), dtype=torch.int32, device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
        return bool(flag.item())

    def finish(self) -> list[Any]:
        """Gather the remaining buckets.

        Returns:
            The result of each rank's sink.

        Raises:
            ValueError: the target dtype cannot represent a value. Raised on all ranks; names the tensor and the value.
        """
        for bucket in self._buckets:
            is_large = sum(tensor.nbytes for _, tensor in bucket) > self._bucket_bytes
            self._sink.hand_over(self._cast(bucket), wait=is_large)
        ended: list[tuple[str, Any]] = all_gather_objects((self._error, self._sink.close()))
        if errors := [error for error, _ in ended if error]:
            raise ValueError(f"weights cannot be sent to engines: {'; '.join(errors)}")
        return [result for _, result in ended]


class WeightExport:
    """Weight export to files. As with `WeightFlow`, all ranks act together.

    The first rank of each pipeline stage writes its stage's tensors on a separate thread.
    """

    def __init__(
        self,
        parts: list[Part],
        model: HfConfig,
        directory: Path,
        *,
        device: torch.device,
        bucket_bytes: int,
        form: WeightConversion = AS_TRAINED,
        delta_base: DeltaBase | None = None,
    ) -> None:
        """Plan the files.

        Args:
            parts: this rank's parts, as for `WeightFlow`.
            model: configuration of the full model.
            directory: existing directory, the same for all ranks.
            device: device of this rank.
            bucket_bytes: as for `WeightFlow`.
            form: as for `WeightFlow`.
            delta_base: base version of a delta to write in addition to the full files; None: only full files.
        """
        self._directory = directory
        entries = form.of_entries(whole_entries(parts, model)) if dist.get_rank() == first_rank() else []
        cut = cut_into_shards(entries)
        counts = all_gather_objects(len(cut))
        shards = named(cut, before=sum(counts[: dist.get_rank()]), total=sum(counts))
        changes = (
            None if delta_base is None else _Changes(delta_base, [rank for rank, count in enumerate(counts) if count])
        )
        self._writer = _Writer(ShardWriter(directory, shards), shards, changes)
        self._flow = WeightFlow(parts, model, self._writer, device=device, bucket_bytes=bucket_bytes, form=form)

    def advance(self) -> bool:
        """Gather the next bucket, if the stage's writer is idle. Returns whether more buckets may remain."""
        return self._flow.advance()

    @property
    def writing(self) -> "Future[None] | None":
        """Pending write of this rank's current bucket; None: nothing is being written."""
        return self._writer.writing

    def finish(self) -> Written:
        """Gather and write the remaining buckets. Rank 0 then writes the index of the full files.

        Returns:
            The written files and checksums, the same on every rank.

        Raises:
            OSError: a rank could not write; the message names it. NoSpace if the disk is full.
            ValueError: as in `WeightFlow.finish`.
        """
        shares: list[_Share] = self._flow.finish()
        errors = [f"rank {rank}: {share.error}" for rank, share in enumerate(shares) if share.error]
        if any(share.is_full for share in shares):
            raise no_space(self._directory, sum(share.size_bytes for share in shares))
        if errors:
            raise OSError(f"weights could not be written to {self._directory}: {'; '.join(errors)}")
        if dist.get_rank() == 0:
            write_index(self._directory, [shard for share in shares for shard in share.shards])
        reasons = [f"rank {rank}: {share.no_delta}" for rank, share in enumerate(shares) if share.no_delta]
        return Written(
            {name: checksum for share in shares for name, checksum in share.checksums.items()},
            [tensor for share in shares for tensor in share.tensors],
            "; ".join(reasons),
            {name: each for share in shares for name, each in share.files.items()},
        )


class _Changes:
    """Writes the delta of a rank's tensors. If it fails, only the full files are used."""

    def __init__(self, delta_base: DeltaBase, ranks: Sequence[int]) -> None:
        """Open the delta file, if this rank writes one.

        Args:
            delta_base: base version.
            ranks: ranks that write.
        """
        self.reason = ""  # why the delta failed; empty: it did not
        self._writer: DeltaWriter | None = None
        if dist.get_rank() in ranks:
            number = ranks.index(dist.get_rank()) + 1
            try:
                self._writer = DeltaWriter(
                    delta_base.directory, delta_base.base, delta_base.checksums, number=number, total=len(ranks)
                )
            except (OSError, ValueError) as error:
                self.reason = str(error)

    def write(self, entry: Entry, data: memoryview, checksum: str) -> None:
        """Write the delta of a tensor."""
        if self._writer is not None and not self.reason:
            try:
                self._writer.write(entry, data, checksum)
            except (OSError, DeltaError) as error:
                self.reason = str(error)

    def close(self) -> Sequence[TensorDelta]:
        """Sync the file to disk. Returns the delta form of each tensor."""
        try:
            return [] if self._writer is None else self._writer.close()
        except OSError as error:
            self.reason = self.reason or str(error)
            return []


class _Writer:
    """Writes a bucket on a separate thread while the next one is gathered."""

    def __init__(self, files: ShardWriter, shards: Sequence[Shard], changes: _Changes | None) -> None:
        self._files = files
        self._shards = shards
        self._changes = changes
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self.writing: Future[None] | None = None
        self._error = ""
        self._is_full = False

    @property
    def is_free(self) -> bool:
        """Whether nothing is being written."""
        return self.writing is None or self.writing.done()

    def hand_over(self, bucket: Bucket, *, wait: bool = False) -> None:
        """Write a bucket after the previous one. Buckets after a failure are dropped."""
        self._wait()
        if bucket and not self._error:
            data = [(name, bytes_of(tensor)) for name, tensor in bucket]  # copies from the GPU on this thread
            self.writing = self._executor.submit(self._write, data)
            del data
        if wait:
            self._wait()

    def close(self) -> _Share:
        """Wait until everything is written, and return the result."""
        self._wait()
        self._executor.shutdown()
        self._files.close()
        tensors = [] if self._changes is None else self._changes.close()
        no_delta = "" if self._changes is None else self._changes.reason
        return _Share(
            self._shards, self._files.checksums, self._files.files, self._error, tensors, no_delta, self._is_full
        )

    def _wait(self) -> None:
        writing, self.writing = self.writing, None
        if writing is not None:
            try:
                writing.result(WRITE_TIMEOUT_S)
            except (OSError, TimeoutError) as error:
                self._error, self._is_full = f"{type(error).__name__}: {error}", is_full(error)

    def _write(self, data: list[tuple[str, memoryview]]) -> None:
        while data:
            name, tensor = data.pop(0)
            entry = self._files.write(name, tensor)
            if self._changes is not None:
                self._changes.write(entry, tensor, self._files.checksums[name])


def copied(parts: Iterable[Part]) -> list[Part]:
    """Copy the parts' tensors to the host, so that the model's tensors may change."""
    return [part._replace(tensor=host_copy(part.tensor)) for part in parts]


def _taken(parts: list[Part]) -> Iterator[Part]:
    """Yield the parts without keeping references to them, so that their memory is freed early."""
    parts.reverse()
    while parts:
        yield parts.pop()
