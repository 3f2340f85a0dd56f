"""Background checkpoint saving, by a thread of each rank, while training continues.

A small state is copied first. A large one on the CPU is read where it is: the next forward and backward passes leave it
alone, and before an optimizer step changes it, `Saving.settle` waits for the writer and copies the rest.
A checkpoint is written under a name that starts with a dot, and renamed when all ranks have reported. Each rank syncs
its files to disk and hashes them; a start compares the files with `checksums.json`. A crash before the rename leaves a
directory that no start recognises as a checkpoint.
"""

import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from threading import Condition
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
from actors.trainer.file_checksums import absent_files, write_checksums
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
from messages import CheckpointFile
from runtime.models.checkpoint_files import FileChecksum, checksum_of
from runtime.process.actor import InputError
from runtime.util.disk import NoSpace, free_bytes, no_space, writing
from runtime.util.files import begin_directory, complete_directory, hidden_name
from runtime.util.formatting import count_of

SHOWN_FILES = 3  # in an error
SEEN_WITHIN_S = 30.0  # for files of other ranks on a network file system
POOL_BYTES = 384 << 20  # of copies of this rank's state at a time, on the CPU
LARGE_BYTES = 1 << 18  # smaller tensors are copied at once
WRITE_TIMEOUT_S = 3600.0  # for a rank's files, counted from when `finish` is called


class Saving:
    """One checkpoint being saved. Creating and finishing it are collectives of all ranks on their torch threads."""

    def __init__(
        self,
        state: dict[str, Any],
        path: Path,
        executor: Executor,
        *,
        run_file: SavedRun | None,
        part: str = "",
        nodes: Sequence[str] = (),
    ) -> None:
        """Plan the checkpoint and begin to write this rank's part. The state may change once `settle` has returned.

        Args:
            state: Megatron's sharded state dict.
            path: Directory of the checkpoint. If it exists, nothing is written and it counts as this checkpoint.
            executor: Thread that writes the files.
            run_file: Contents of the checkpoint's run file.
            part: Name of the part that these ranks write, whose ranks are not those of the rest. Empty: the rest.
            nodes: Node of each rank, if each node has a directory of its own. Empty: all ranks share one.

        Raises:
            NoSpace: The checkpoint does not fit on the disk.
        """
        self.path = path
        self._run_file = run_file
        directory = _place_of_part(path, part) if part else path
        self._unfinished = hidden_name(directory)
        self._is_there = path.exists()
        self._nodes = nodes
        if nodes:  # a start has each node fetch the newest checkpoint, so the first rank's node has all
            is_there = [self._is_there]
            dist.broadcast_object_list(is_there)
            self._is_there = is_there[0]
        self._writer = _DeferredWriter(self._unfinished)
        dist.barrier()  # all ranks have checked the path before one of them creates it
        if self._is_there:
            self.written: Future[None] = Future()
            self.written.set_result(None)
            return
        if nodes.index(nodes[dist.get_rank()]) == dist.get_rank() if nodes else dist.get_rank() == 0:
            begin_directory(directory)
        needed_bytes = _check_room(self._unfinished, state)
        with quiet(), _written(self._unfinished, needed_bytes):
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)  # each rank writes a share
            strategy = FullyParallelSaveStrategyWrapper(SaveInProcess(self._writer), group)
            dist_checkpointing.save(state, str(self._unfinished), strategy)
        self.written = executor.submit(self._writer.write)  # done when this rank's files are on disk

    def settle(self) -> None:
        """Return once the state may change. Until then it is read for the files. Not a collective.

        Raises:
            TimeoutError: As in `_Data.settle`.
        """
        self._writer.settle()

    def finish(self, parts: Mapping[str, Mapping[str, FileChecksum]] | None = None) -> Path:
        """Wait for the files of all ranks, rename the checkpoint and return its path.

        Args:
            parts: Checksums of the files of each part that other ranks wrote, on rank 0.

        Raises:
            OSError: This rank could not write; NoSpace if the disk is full.
            InputError: Rank 0 does not see a file of another rank.
        """
        self.written.result(WRITE_TIMEOUT_S)
        if self._is_there or self._nodes:  # the node daemons give it its name
            return self.path
        with _written(self._unfinished):  # only small files: no check for the checkpoint's whole size
            self._complete(parts or {})
        dist.barrier()
        return self.path

    def finish_files(self) -> dict[str, CheckpointFile]:
        """Wait for the files of all ranks, each in its node's directory. Return them on rank 0, or none if it is there.

        Raises:
            OSError: This rank could not write; NoSpace if the disk is full.
        """
        self.written.result(WRITE_TIMEOUT_S)
        if self._is_there:
            return {}
        with _written(self._unfinished):
            self._writer.report()
            if dist.get_rank() != 0:
                return {}
            assert self._run_file is not None
            (self._unfinished / RUN_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(self._run_file)))
            own = {path.name for path in self._unfinished.iterdir()} - self._writer.checksums.keys()
            found = {name: (checksum_of(self._unfinished / name), self._nodes[0]) for name in own}
        for rank, names in enumerate(self._writer.names_by_rank):
            found |= {name: (self._writer.checksums[name], self._nodes[rank]) for name in names}
        return {
            name: CheckpointFile(size_bytes=each.size_bytes, sha256=each.sha256, node=node)
            for name, (each, node) in found.items()
        }

    def finish_part(self) -> dict[str, FileChecksum]:
        """Wait for the files of the part, whose ranks this is a collective of; return their checksums on rank 0.

        Raises:
            OSError: This rank could not write; NoSpace if the disk is full.
        """
        self.written.result(WRITE_TIMEOUT_S)
        if self._is_there:
            return {}
        with _written(self._unfinished):
            self._writer.report()
        return self._writer.checksums

    def _complete(self, parts: Mapping[str, Mapping[str, FileChecksum]]) -> None:
        self._writer.report()
        if dist.get_rank() == 0:
            for part, checksums in parts.items():
                hidden_name(_place_of_part(self.path, part)).rename(self._unfinished / part)
                self._writer.checksums |= {f"{part}/{name}": each for name, each in checksums.items()}
            self._look_for_all_files()
            if self._run_file is not None:
                (self._unfinished / RUN_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(self._run_file)))
            write_checksums(self._unfinished, self._writer.checksums)
            complete_directory(self._unfinished, self.path)

    def _look_for_all_files(self) -> None:
        """Raise InputError if a rank's file is not there: without it, no start can load the checkpoint."""
        absent = absent_files(self._unfinished, self._writer.checksums, SEEN_WITHIN_S)
        if absent:
            named = ", ".join(absent[:SHOWN_FILES]) + (", ..." if len(absent) > SHOWN_FILES else "")
            raise InputError(
                f"{self.path}: {len(absent)} of {count_of(len(self._writer.checksums), 'file')} that the ranks wrote "
                f"are not there ({named}); all ranks of a trainer need one common directory: run.dir"
            )


def _place_of_part(path: Path, part: str) -> Path:
    """Return where a part of a checkpoint is written, before it moves into the checkpoint."""
    return path.with_name(f"{path.name}.{part}")


@contextmanager
def _written(unfinished: Path, needed_bytes: int | None = None) -> Generator[None]:
    """Write in the block. If the disk is full, delete the partial checkpoint to free its space."""
    try:
        with writing(unfinished, needed_bytes):
            yield
    except NoSpace:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _check_room(unfinished: Path, state: dict[str, Any]) -> int:
    """Check that the checkpoint fits on the disk, and return the bytes that this rank writes. A collective.

    Raises:
        NoSpace: It does not fit. All ranks raise.
    """
    everywhere: list[Any] = [None] * dist.get_world_size()
    own = _size_of(state)
    dist.all_gather_object(everywhere, (own, free_bytes(unfinished)))  # also waits for rank 0 to make the directory
    total = sum(size for size, _ in everywhere)
    if total > min(free for _, free in everywhere):
        error = no_space(unfinished, total)
        shutil.rmtree(unfinished, ignore_errors=True)
        raise error
    return own


def _size_of(value: Any) -> int:
    """Count the bytes of the tensors that this rank saves, in Megatron's sharded tensors and in plain ones."""
    if isinstance(value, dict | list | tuple):
        items: Any = value.values() if isinstance(value, dict) else value
        return sum(map(_size_of, items))
    if isinstance(value, torch.Tensor):
        return value.nbytes
    replica: Any = getattr(value, "replica_id", None)
    is_saved = replica is not None and not any(replica if isinstance(replica, tuple) else (replica,))
    data = getattr(value, "data", None)
    return data.nbytes if is_saved and isinstance(data, torch.Tensor) else 0


class _DeferredWriter(FileSystemWriter):
    """Torch's checkpoint writer, with files written later, and the index after all ranks' files."""

    def __init__(self, directory: Path) -> None:
        """Start without a plan."""
        super().__init__(directory, sync_files=True)
        self._directory = directory

    _metadata: Metadata | None = None  # on rank 0
    _data: "_Data | None" = None
    _results: list[WriteResult]
    size_bytes: int  # bytes that this rank writes
    checksums: dict[str, FileChecksum]  # of this rank's files; after `report`, on rank 0, of all ranks' files
    names_by_rank: list[list[str]]  # after `report`, on rank 0: of the files of each rank

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Keep the planned data. Called by torch when the plan is complete."""
        self._plan, self._data = plan, _Data(plan, planner)
        self.size_bytes = self._data.size_bytes
        nothing: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keep the index. Called by torch on rank 0 when all ranks have planned."""
        self._metadata = metadata

    def write(self) -> None:
        """Write this rank's files. Runs on a thread of its own."""
        data: Any = self._data
        try:
            with _written(self._directory, self.size_bytes):
                self._results = super().write_data(self._plan, data).value()  # no quiet(): it affects all threads
        finally:
            data.clear()
        names = {result.storage_data.relative_path for result in self._results}
        self.checksums = {name: checksum_of(self._directory / name) for name in names}

    def settle(self) -> None:
        """Return once the live state may change."""
        if self._data is not None:
            self._data.settle()

    def report(self) -> None:
        """Write the index of all ranks' files. A collective."""
        reports: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object((self._results, self.checksums), reports)
        if reports is not None:
            assert self._metadata is not None
            super().finish(self._metadata, [results for results, _ in reports])
            self.checksums = {name: each for _, checksums in reports for name, each in checksums.items()}
            self.names_by_rank = [list(checksums) for _, checksums in reports]


class _Data:
    """The planned data until they are written. Replaces the planner when the files are written.

    Large tensors on the CPU are written from the live ones, not from copies, if all data are more than `POOL_BYTES`.
    """

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        found = {item.index: planner.resolve_data(item) for item in plan.items}
        self.size_bytes = sum(map(_bytes_in, found.values()))
        self._changed = Condition()
        self._live: dict[Any, torch.Tensor] = {}
        if self.size_bytes > POOL_BYTES and not torch.cuda.is_available():  # torch reads ahead where it sees a GPU
            large = {index: data for index, data in found.items() if _bytes_in(data) >= LARGE_BYTES}
            self._live = {index: data for index, data in large.items() if isinstance(data, torch.Tensor)}
        self._versions = {index: data._version for index, data in self._live.items()}  # torch counts changes in place
        self._copies = {index: _copied(data) for index, data in found.items() if index not in self._live}
        self._written_now: Any = None  # index of the live tensor that is being written
        self._spent: torch.Tensor | None = None  # copy that is being written

    def resolve_data(self, item: WriteItem) -> Any:
        """Return the data of an item, like a planner. Those returned before are written."""
        with self._changed:
            self._release()
            live = self._live.get(item.index)
            if live is not None and live.is_contiguous() and live.untyped_storage().nbytes() == live.nbytes:
                self._written_now = item.index
                return live.detach()
            data = self._copies.pop(item.index) if live is None else _copied(self._live.pop(item.index))
            self._spent = data if isinstance(data, torch.Tensor) else None
            return data

    def settle(self) -> None:
        """Return once no live tensor is read: wait until those to be written fit in the pool, and copy them.

        Raises:
            TimeoutError: Writing takes longer than `WRITE_TIMEOUT_S`.
        """
        with self._changed:
            self._wait_for(lambda: sum(data.nbytes for data in self._live.values()) <= POOL_BYTES)
            for index in self._live.keys() - {self._written_now}:
                self._copies[index] = _copied(self._live.pop(index))
            self._wait_for(lambda: not self._live)

    def clear(self) -> None:
        """Free all data: they are written, or never will be."""
        with self._changed:
            self._live.clear()
            self._copies.clear()
            self._release()

    def _release(self) -> None:
        """Free what was returned last. Torch's writer keeps each tensor until its file ends, so a copy is emptied."""
        written = self._live.pop(self._written_now, None)
        assert written is None or written._version == self._versions[self._written_now], "changed before `settle`"
        self._written_now = None
        if self._spent is not None:
            self._spent.untyped_storage().resize_(0)
            self._spent = None
        self._changed.notify_all()

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        if not self._changed.wait_for(condition, WRITE_TIMEOUT_S):
            raise TimeoutError(f"a checkpoint's files were not written within {WRITE_TIMEOUT_S:.0f} s")


def _bytes_in(data: Any) -> int:
    return data.nbytes if isinstance(data, torch.Tensor) else len(data.getbuffer())


def _copied(data: Any) -> Any:
    """Copy a tensor to the host. Other data is serialized bytes already, and is returned as it is."""
    return data.detach().to("cpu", copy=True).contiguous() if isinstance(data, torch.Tensor) else data


class SaveInProcess(TorchDistSaveShardedStrategy):
    """Save strategy that writes in this process.

    Megatron's own asynchronous strategy starts a manager process and forks a writer. Both outlive a killed trainer, and
    forking a process with threads may hang.
    """

    def __init__(self, writer: FileSystemWriter) -> None:
        super().__init__("torch_dist", 1)
        self._file_writer = writer

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        """Save the state. dist_checkpointing.save calls this on every rank."""
        flat, _, _ = replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        save_state_dict(mcore_to_pyt_state_dict(flat, False), storage_writer=self._file_writer, planner=planner)
