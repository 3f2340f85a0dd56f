"""A checkpoint that is written beside training: copied on the torch thread, written by a thread of each rank.

It is written under a name that starts with a dot and gets its own when all ranks have reported. Each rank syncs what it
wrote to the disk, and hashes it: `checksums.json` is what a start compares the files with. A death before the rename
leaves a directory that nobody takes for a checkpoint.
"""

import shutil
from collections.abc import Generator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from actors.trainer.checkpoints import RUN_FILE, SavedRun
from actors.trainer.file_checksums import FileChecksum, checksum_of, write_checksums
from actors.trainer.megatron.imports import (
    FullyParallelSaveStrategyWrapper,
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    dist_checkpointing,
    mcore_to_pyt_state_dict,
    parallel_state,
    quiet,
    replace_state_dict_keys_with_sharded_keys,
)
from runtime.disk import NoSpace, free_bytes, no_space, writing
from runtime.files import complete_directory

WRITE_TIMEOUT_S = 3600.0  # of a rank's files, once rank 0 has written its own


class Saving:
    """One checkpoint on its way. Making and finishing it are collectives of all ranks on their torch threads."""

    def __init__(self, state: dict[str, Any], path: Path, executor: Executor, *, said: SavedRun | None) -> None:
        """Plan it and copy what this rank writes; from here on the state may change.

        Args:
            state: what Megatron is to save.
            path: of the checkpoint. One that is there already is taken as this one.
            executor: a thread that writes.
            said: what it says of itself.

        Raises:
            NoSpace: it does not fit on the disk.
        """
        self.path = path
        self._said = said
        self._unfinished = path.with_name(f".{path.name}")
        self._is_there = path.exists()
        self._writer = _WritesLater(self._unfinished)
        dist.barrier()  # all have looked before one of them makes it
        if self._is_there:
            self.written: Future[None] = Future()
            self.written.set_result(None)
            return
        if dist.get_rank() == 0:
            shutil.rmtree(self._unfinished, ignore_errors=True)
            self._unfinished.mkdir(parents=True)
        needed_bytes = _check_room(self._unfinished, state)
        with quiet(), _written(self._unfinished, needed_bytes):
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)  # each writes a share of copies
            strategy = FullyParallelSaveStrategyWrapper(_SaveInProcess(self._writer), group)
            dist_checkpointing.save(state, str(self._unfinished), strategy)
        self.written = executor.submit(self._writer.write)  # this rank's files are on the disk

    def finish(self) -> Path:
        """Wait for all ranks' files and give the checkpoint its name; return it.

        Raises:
            OSError: this rank could not write; NoSpace where the disk is full.
        """
        self.written.result(WRITE_TIMEOUT_S)
        if self._is_there:
            return self.path
        with _written(self._unfinished):  # little: the disk need not have that much room again
            self._complete()
        dist.barrier()
        return self.path

    def _complete(self) -> None:
        self._writer.report()
        if dist.get_rank() == 0:
            if self._said is not None:
                (self._unfinished / RUN_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(self._said)))
            write_checksums(self._unfinished, self._writer.checksums)
            complete_directory(self._unfinished, self.path)


@contextmanager
def _written(unfinished: Path, needed_bytes: int | None = None) -> Generator[None]:
    """Write in the block. What a full disk leaves half written is deleted: others need the room."""
    try:
        with writing(unfinished, needed_bytes):
            yield
    except NoSpace:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _check_room(unfinished: Path, state: dict[str, Any]) -> int:
    """Bytes that this rank writes, once it is known that those of all ranks fit. A collective.

    Raises:
        NoSpace: they do not; of all ranks alike.
    """
    everywhere: list[Any] = [None] * dist.get_world_size()
    own = _size_of(state)
    dist.all_gather_object(everywhere, (own, free_bytes(unfinished)))  # and rank 0 has made the directory
    total = sum(size for size, _ in everywhere)
    if total > min(free for _, free in everywhere):
        error = no_space(unfinished, total)
        shutil.rmtree(unfinished, ignore_errors=True)
        raise error
    return own


def _size_of(value: Any) -> int:
    """Bytes of the tensors that this rank saves, of Megatron's descriptions and of tensors."""
    if isinstance(value, dict | list | tuple):
        items: Any = value.values() if isinstance(value, dict) else value
        return sum(map(_size_of, items))
    if isinstance(value, torch.Tensor):
        return value.nbytes
    replica: Any = getattr(value, "replica_id", None)
    is_saved = replica is not None and not any(replica if isinstance(replica, tuple) else (replica,))
    data = getattr(value, "data", None)
    return data.nbytes if is_saved and isinstance(data, torch.Tensor) else 0


class _WritesLater(FileSystemWriter):
    """torch's writer, whose files are written from copies once the plan stands, and whose index when all are there."""

    def __init__(self, directory: Path) -> None:
        """Nothing is planned yet."""
        super().__init__(directory, sync_files=True)
        self._directory = directory

    _metadata: Metadata | None = None  # on rank 0
    _results: list[WriteResult]
    size_bytes: int  # that this rank writes
    checksums: dict[str, FileChecksum]  # of this rank's files; once reported, on rank 0 of all ranks'

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Copy what is planned; called when the plan stands."""
        self._plan, self._copies = plan, _Copies(plan, planner)
        self.size_bytes = self._copies.size_bytes
        nothing: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called on rank 0 when all ranks have planned."""
        self._metadata = metadata

    def write(self) -> None:
        """Write this rank's files; on a thread of its own."""
        copies: Any = self._copies
        with _written(self._directory, self.size_bytes):
            self._results = super().write_data(self._plan, copies).value()  # not quiet(): filters are of all threads
        copies.clear()
        names = {result.storage_data.relative_path for result in self._results}
        self.checksums = {name: checksum_of(self._directory / name) for name in names}

    def report(self) -> None:
        """Write the index of all ranks' files. A collective."""
        reports: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object((self._results, self.checksums), reports)
        if reports is not None:
            assert self._metadata is not None
            super().finish(self._metadata, [results for results, _ in reports])
            self.checksums = {name: each for _, checksums in reports for name, each in checksums.items()}


class _Copies:
    """In a planner's place: what it had to say of each item, on the host."""

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._copies = {item.index: _copied(planner.resolve_data(item)) for item in plan.items}

    def resolve_data(self, item: WriteItem) -> Any:
        """As of a planner."""
        return self._copies[item.index]

    @property
    def size_bytes(self) -> int:
        """Of all of them."""
        return sum(
            data.nbytes if isinstance(data, torch.Tensor) else len(data.getbuffer()) for data in self._copies.values()
        )

    def clear(self) -> None:
        """Give the memory back."""
        self._copies.clear()


def _copied(data: Any) -> Any:
    """Bytes are serialized already."""
    return data.detach().to("cpu", copy=True).contiguous() if isinstance(data, torch.Tensor) else data


class _SaveInProcess(TorchDistSaveShardedStrategy):
    """Writes in this process. Megatron's own asynchronous strategy starts a manager process and forks a writer; both
    outlive a killed trainer, and forking a process with threads may hang."""

    def __init__(self, writer: FileSystemWriter) -> None:
        super().__init__("torch_dist", 1)
        self._file_writer = writer

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        """Called by dist_checkpointing.save on every rank."""
        flat, _, _ = replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        save_state_dict(mcore_to_pyt_state_dict(flat, False), storage_writer=self._file_writer, planner=planner)
