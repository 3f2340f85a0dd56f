"""Weights to files: full safetensors files, and the delta to the version before.

Full files are always written: the next delta is made against them. If the delta cannot be written, they are published.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from actors.trainer.megatron.groups import all_gather_objects
from actors.trainer.models.config import HfConfig
from actors.trainer.models.shards import Shard, ShardWriter, bytes_of, cut_into_shards, entry_of, named, write_index
from actors.trainer.weights.delta import DeltaWriter
from actors.trainer.weights.engine_sums import Layout, SumsSink, joined_sums
from actors.trainer.weights.export import AS_TRAINED, Sink, WeightConversion, WeightExport, Work, gathered
from actors.trainer.weights.gathering import Bucket, Part, first_rank, whole_entries
from actors.trainer.weights.publish import Written
from messages import FileSum
from runtime.models.delta import DeltaError, TensorDelta
from runtime.util.disk import is_full, no_space


class DeltaBase(NamedTuple):
    """Base version of a delta, which is written in addition to full files."""

    directory: Path  # of the delta; exists, and is the same for all ranks
    base: Path  # full files of the base version
    checksums: Mapping[str, str]  # of the base version's tensors


class FilesShare(NamedTuple):
    """Files, checksums and errors of the tensors that one rank wrote."""

    shards: Sequence[Shard]
    checksums: dict[str, str]  # by tensor
    files: dict[str, FileSum]  # by name
    error: str  # why writing failed; empty: it succeeded
    is_full: bool  # writing failed because the disk is full

    @property
    def size_bytes(self) -> int:
        """Size of the tensors in its files."""
        return sum(entry.size_bytes for shard in self.shards for entry in shard.entries)


class DeltaShare(NamedTuple):
    """Delta form of the tensors that one rank wrote."""

    tensors: Sequence[TensorDelta] = ()
    error: str = ""  # why there is no delta; empty: there is, or none was requested


class FilesSink:
    """Writes full safetensors files, and computes the checksums of their tensors."""

    def __init__(self, directory: Path, shards: Sequence[Shard]) -> None:
        """Plan the files, without opening one.

        Args:
            directory: existing directory.
            shards: every tensor of this rank, in the order of the buckets.
        """
        self._shards = shards
        self._files = ShardWriter(directory, shards)
        self._error = ""
        self._is_full = False

    @property
    def checksums(self) -> Mapping[str, str]:
        """Checksums of the tensors that are written, by name."""
        return self._files.checksums

    def take(self, bucket: Bucket) -> Work:
        """Take a bucket on the host."""
        data = [(name, bytes_of(tensor)) for name, tensor in bucket]
        return lambda: self._write(data)

    def _write(self, data: list[tuple[str, memoryview]]) -> None:
        try:
            while data and not self._error:
                self._files.write(*data.pop(0))
        except OSError as error:
            self._error, self._is_full = f"{type(error).__name__}: {error}", is_full(error)

    def close(self) -> FilesShare:
        """Close the files."""
        self._files.close()
        return FilesShare(self._shards, self._files.checksums, self._files.files, self._error, self._is_full)


class DeltaSink:
    """Writes the delta of a rank's tensors, after the files have their checksums."""

    def __init__(self, base: DeltaBase, files: FilesSink, *, number: int, total: int) -> None:
        """Open the delta file.

        Args:
            base: base version.
            files: sink of the full files, which works for each bucket before this one.
            number: number of this rank among those that write, from 1.
            total: number of ranks that write.
        """
        self._files = files
        self._error = ""
        self._writer: DeltaWriter | None = None
        try:
            self._writer = DeltaWriter(base.directory, base.base, base.checksums, number=number, total=total)
        except (OSError, ValueError) as error:
            self._error = str(error)

    def take(self, bucket: Bucket) -> Work:
        """Take a bucket on the host."""
        data = list(bucket)
        return lambda: self._write(data)

    def _write(self, data: list[tuple[str, torch.Tensor]]) -> None:
        try:
            while data and self._writer is not None and not self._error:
                name, tensor = data.pop(0)
                checksum = self._files.checksums.get(name)
                self._writer.write(entry_of(name, tensor), bytes_of(tensor), checksum)
        except (OSError, DeltaError) as error:
            self._error = str(error)

    def close(self) -> DeltaShare:
        """Sync the file to disk."""
        try:
            return DeltaShare([] if self._writer is None else self._writer.close(), self._error)
        except OSError as error:
            return DeltaShare((), self._error or str(error))


class OnHost:
    """Copies each bucket to the host once, for several sinks that work there."""

    def __init__(self, sinks: Sequence[Sink], *, concurrent: Sequence[Sink] = ()) -> None:
        """Pass buckets to `sinks`, in their order, and to those of `concurrent` at the same time."""
        self._sinks = sinks
        self._concurrent = concurrent
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-sums")

    def take(self, bucket: Bucket) -> Work:
        """Copy a bucket to the host, and pass it on."""
        on_host = [(name, tensor.cpu()) for name, tensor in bucket]
        works, others = ([sink.take(on_host) for sink in sinks] for sinks in (self._sinks, self._concurrent))
        return lambda: self._work(works, others)

    def _work(self, works: list[Work], others: list[Work]) -> None:
        other = self._thread.submit(_all, others)
        try:
            _all(works)
        finally:
            wait([other])
        other.result()

    def close(self) -> list[Any]:
        """Return the result of each sink."""
        self._thread.shutdown()
        return [sink.close() for sink in (*self._sinks, *self._concurrent)]


def _all(works: list[Work]) -> None:
    while works:
        works.pop(0)()


def export_to_files(
    parts: list[Part],
    model: HfConfig,
    directory: Path,
    thread: ThreadPoolExecutor,
    *,
    device: torch.device,
    bucket_bytes: int,
    form: WeightConversion = AS_TRAINED,
    delta_base: DeltaBase | None = None,
    layout: Layout | str = "",
) -> WeightExport[Written]:
    """Begin an export to files. All ranks call it together; the first rank of each stage writes its tensors.

    `finish` raises OSError if a rank could not write (the message names it), or NoSpace if the disk is full.

    Args:
        parts: this rank's parts, as for `gathered`.
        model: configuration of the full model.
        directory: existing directory, the same for all ranks.
        thread: the rank's weight thread.
        device: device of this rank.
        bucket_bytes: maximum bytes of tensors gathered at a time.
        form: conversion of the tensors.
        delta_base: base version of a delta to write in addition to the full files; None: only full files.
        layout: of the engines whose checksums are computed meanwhile, or why none are.
    """
    entries = form.of_entries(whole_entries(parts, model)) if dist.get_rank() == first_rank() else []
    cut = cut_into_shards(entries)
    counts = all_gather_objects(len(cut))
    files = FilesSink(directory, named(cut, before=sum(counts[: dist.get_rank()]), total=sum(counts)))
    sinks: list[Sink] = [files]
    writers = [rank for rank, count in enumerate(counts) if count]
    if delta_base is not None and dist.get_rank() in writers:
        sinks.append(DeltaSink(delta_base, files, number=writers.index(dist.get_rank()) + 1, total=len(writers)))
    sums = [SumsSink(model, layout)] if isinstance(layout, Layout) else []
    return WeightExport(
        gathered(parts, model, device, bucket_bytes),
        [OnHost(sinks, concurrent=sums)],
        lambda results: _written(directory, [each for (each,) in results], layout),
        thread,
        device=device,
        bucket_bytes=bucket_bytes,
        form=form,
    )


def _written(directory: Path, by_rank: Sequence[Sequence[Any]], layout: Layout | str) -> Written:
    """Join what the ranks wrote. Rank 0 writes the index of the full files."""
    shares: list[FilesShare] = [results[0] for results in by_rank]
    deltas = [each for results in by_rank for each in results if isinstance(each, DeltaShare)]
    sums: list[dict[str, list[str]]] = [each for results in by_rank for each in results if isinstance(each, dict)]
    if any(share.is_full for share in shares):
        raise no_space(directory, sum(share.size_bytes for share in shares))
    if errors := [f"rank {rank}: {share.error}" for rank, share in enumerate(shares) if share.error]:
        raise OSError(f"weights could not be written to {directory}: {'; '.join(errors)}")
    if dist.get_rank() == 0:
        write_index(directory, [shard for share in shares for shard in share.shards])
    return Written(
        {name: checksum for share in shares for name, checksum in share.checksums.items()},
        [tensor for delta in deltas for tensor in delta.tensors],
        "; ".join(f"rank {rank}: {delta.error}" for rank, delta in enumerate(deltas) if delta.error),
        {name: each for share in shares for name, each in share.files.items()},
        *((joined_sums(layout, sums), "") if isinstance(layout, Layout) else (None, layout)),
    )
