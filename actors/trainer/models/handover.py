"""The current weights on their way from all ranks: to a sink, as to the files of a directory."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist

from actors.trainer.megatron.groups import told
from actors.trainer.megatron.memory import host_copy
from actors.trainer.models.config import HfConfig
from actors.trainer.models.gathering import Bucket, Part, buckets, first_rank, stage_group, whole_entries, whole_tensors
from actors.trainer.models.publish import Written
from actors.trainer.models.shards import Entry, Shard, ShardWriter, bytes_of, cut_into_shards, named, write_index
from actors.trainer.sending.delta import DeltaWriter
from messages import FileSum
from runtime.disk import is_full, no_space
from runtime.weights.delta import DeltaError, TensorDelta

WRITE_TIMEOUT_S = 3600.0  # of a bucket


class Against(NamedTuple):
    """What changed since a version is to be written, too."""

    directory: Path  # where that goes; exists, and is the same for all ranks
    base: Path  # whole files of that version
    checksums: Mapping[str, str]  # of its tensors


class _Share(NamedTuple):
    """What a rank has written."""

    shards: Sequence[Shard]
    checksums: dict[str, str]  # by tensor
    files: dict[str, FileSum]  # by name
    error: str  # why it could not; empty: it could
    tensors: Sequence[TensorDelta]  # how each goes as changes
    no_delta: str  # why they cannot be had; empty: nothing speaks against it
    is_full: bool = False  # the disk is, that is why

    @property
    def size_bytes(self) -> int:
        """Of its files' tensors."""
        return sum(entry.size_bytes for shard in self.shards for entry in shard.entries)


class Form(NamedTuple):
    """What becomes of weights on their way (sending/cast.py); raises ValueError of numbers that it has not."""

    of_bucket: Callable[[Bucket], Bucket]
    of_entries: Callable[[Iterable[Entry]], list[Entry]]  # the same without the tensors


def _unchanged(bucket: Bucket) -> Bucket:
    return bucket


AS_TRAINED: Final = Form(_unchanged, list)


class Sink(Protocol):
    """Where whole tensors go, on the first rank of each pipeline stage; other ranks have one to which none come."""

    @property
    def is_free(self) -> bool:
        """Whether it has nothing to do."""
        ...

    def hand_over(self, bucket: Bucket, *, wait: bool = False) -> None:
        """Take a bucket, which may be empty, once the one before is done with. What comes after a failure is dropped.

        Args:
            wait: return when this one is done with, too.
        """
        ...

    def close(self) -> Any:
        """Wait until all is done with, and say what became of it."""
        ...


class WeightFlow:
    """Weights on their way to sinks. Made, driven and finished by all ranks together, on their torch threads.

    Two buckets are in memory at a time: one that the sink has, one that is filled.
    """

    def __init__(
        self,
        parts: list[Part],
        model: HfConfig,
        sink: Sink,
        *,
        device: torch.device,
        bucket_bytes: int,
        form: Form = AS_TRAINED,
    ) -> None:
        """Nothing flows yet.

        Args:
            parts: what this rank has of the model; the tensors must not change until `finish`, and the list is emptied
                as they are gathered.
            model: the whole one.
            sink: of this rank.
            device: of this rank.
            bucket_bytes: of tensors that are gathered at a time; a larger tensor alone is one bucket.
            form: in which the sink gets them.
        """
        self._sink = sink
        self._form = form
        self._error = ""
        self._buckets = buckets(whole_tensors(_taken(parts), model, device), bucket_bytes)
        self._bucket_bytes, self._device = bucket_bytes, device
        self._has_more = True

    def advance(self) -> bool:
        """Gather the next bucket, if the stage's sink has nothing to do. All ranks of the stage call it.

        Returns:
            Whether there may be more.
        """
        if self._has_more and self._all_are_free():
            bucket = next(self._buckets, None)
            self._has_more = bucket is not None
            self._sink.hand_over(self._cast(bucket or []))
        return self._has_more

    def _cast(self, bucket: Bucket) -> Bucket:
        """In the form that is wanted. After a failure nothing: the other ranks go through all buckets all the same."""
        try:
            return [] if self._error else self._form.of_bucket(bucket)
        except ValueError as error:
            self._error = str(error)
            return []

    def _all_are_free(self) -> bool:
        """Whether the rank whose sink gets tensors is; the same on all ranks of the stage."""
        group, free = stage_group(), self._sink.is_free
        if dist.get_world_size(group) == 1:
            return free
        flag = torch.tensor(int(free), dtype=torch.int32, device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
        return bool(flag.item())

    def finish(self) -> list[Any]:
        """Gather what is left; what each rank's sink says became of it.

        Raises:
            ValueError: there are numbers that the form has not; on all ranks, with tensor and number.
        """
        for bucket in self._buckets:
            is_large = sum(tensor.nbytes for _, tensor in bucket) > self._bucket_bytes
            self._sink.hand_over(self._cast(bucket), wait=is_large)
        ended: list[tuple[str, Any]] = told((self._error, self._sink.close()))
        if errors := [error for error, _ in ended if error]:
            raise ValueError(f"weights cannot be handed to engines: {'; '.join(errors)}")
        return [result for _, result in ended]


class Handover:
    """Weights that are being written. As for `WeightFlow`, all ranks do it together.

    The first rank of each pipeline stage writes its stage's tensors on a thread of its own.
    """

    def __init__(
        self,
        parts: list[Part],
        model: HfConfig,
        directory: Path,
        *,
        device: torch.device,
        bucket_bytes: int,
        form: Form = AS_TRAINED,
        against: Against | None = None,
    ) -> None:
        """Plan the files.

        Args:
            parts: what this rank has of the model, as for `WeightFlow`.
            model: the whole one.
            directory: exists, and is the same for all ranks.
            device: of this rank.
            bucket_bytes: as for `WeightFlow`.
            form: as for `WeightFlow`.
            against: a version to write the changes since, beside the whole files; none: these alone.
        """
        self._directory = directory
        entries = form.of_entries(whole_entries(parts, model)) if dist.get_rank() == first_rank() else []
        cut = cut_into_shards(entries)
        counts = told(len(cut))
        shards = named(cut, before=sum(counts[: dist.get_rank()]), total=sum(counts))
        changes = None if against is None else _Changes(against, [rank for rank, count in enumerate(counts) if count])
        self._writer = _Writer(ShardWriter(directory, shards), shards, changes)
        self._flow = WeightFlow(parts, model, self._writer, device=device, bucket_bytes=bucket_bytes, form=form)

    def advance(self) -> bool:
        """Gather the next bucket, if the stage's writer has nothing to do; whether there may be more."""
        return self._flow.advance()

    @property
    def writing(self) -> "Future[None] | None":
        """Of the bucket that this rank writes now."""
        return self._writer.writing

    def finish(self) -> Written:
        """Gather and write what is left; rank 0 then writes the index of the whole files.

        Returns:
            What was written, the same on all ranks.

        Raises:
            OSError: a rank could not write; says which. NoSpace where the disk is full.
            ValueError: as `WeightFlow.finish`.
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
    """What changed of a rank's tensors, as long as that can be had: whole files do without."""

    def __init__(self, against: Against, ranks: Sequence[int]) -> None:
        """Open the file of a rank that writes.

        Args:
            against: the version before.
            ranks: those that write.
        """
        self.reason = ""  # why it cannot be had
        self._writer: DeltaWriter | None = None
        if dist.get_rank() in ranks:
            number = ranks.index(dist.get_rank()) + 1
            try:
                self._writer = DeltaWriter(
                    against.directory, against.base, against.checksums, number=number, total=len(ranks)
                )
            except (OSError, ValueError) as error:
                self.reason = str(error)

    def write(self, entry: Entry, data: memoryview, checksum: str) -> None:
        """Write what changed of a tensor."""
        if self._writer is not None and not self.reason:
            try:
                self._writer.write(entry, data, checksum)
            except (OSError, DeltaError) as error:
                self.reason = str(error)

    def close(self) -> Sequence[TensorDelta]:
        """Put it on the disk; how each tensor goes."""
        try:
            return [] if self._writer is None else self._writer.close()
        except OSError as error:
            self.reason = self.reason or str(error)
            return []


class _Writer:
    """A thread that writes a bucket while the next one is gathered."""

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
        """Have a bucket written, once the one before is. What comes after a failure is dropped."""
        self._wait()
        if bucket and not self._error:
            data = [(name, bytes_of(tensor)) for name, tensor in bucket]  # from the GPU on this thread
            self.writing = self._executor.submit(self._write, data)
            del data
        if wait:
            self._wait()

    def close(self) -> _Share:
        """Wait until all is written and say what was."""
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
    """Parts whose tensors are this host's, so that those of the model may change."""
    return [part._replace(tensor=host_copy(part.tensor)) for part in parts]


def _taken(parts: list[Part]) -> Iterator[Part]:
    """The parts, which are held here no longer than they are needed."""
    parts.reverse()
    while parts:
        yield parts.pop()
