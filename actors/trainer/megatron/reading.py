"""Safe reading of torch_dist checkpoints: nothing that their files name is executed.

Torch pickles the index (`.metadata`) and the non-tensor data of such a checkpoint. It reads both with `pickle.load`,
which can execute code. Here an index may name only the types of an index, and data only what
`torch.load(weights_only=True)` allows. Tensors may lie only in files of the checkpoint's own directory.
"""

import io
import pickle
import re
from collections.abc import Generator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from runtime.util.files import path_inside

INDEX: Final = ".metadata"
MAX_REASON: Final = 200  # characters of a library's error
COMMON: Final = "common.pt"
_BLOCKED: Final = re.compile(r"GLOBAL (\S+)")
_TORCH: Final = "torch.distributed.checkpoint"
OF_AN_INDEX: Final = {
    f"{_TORCH}.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    f"{_TORCH}.filesystem": {"_StorageInfo"},
    # save plans of all ranks, which Megatron-LM stores with --ckpt-assume-constant-structure
    f"{_TORCH}.planner": {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    # TensorProperties up to torch 2.3
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
}


class UnsafeCheckpoint(ValueError):
    """A checkpoint is damaged, or names a type that no checkpoint needs, or a file elsewhere. The text says which."""


class _Unpickler(pickle.Unpickler):
    """Unpickler that allows only the types of an index."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("builtins", "getattr"):  # some versions of Python pickle Enum members this way
            return _member
        if name not in OF_AN_INDEX.get(module, ()):
            raise UnsafeCheckpoint(f"it names {module}.{name}, which the index of a checkpoint does not need")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[name]
    raise UnsafeCheckpoint(f"it reads {name!r} of something that is not an Enum")


def read_index(directory: Path) -> Metadata:
    """Read the index of a checkpoint.

    Raises:
        UnsafeCheckpoint: The index names a type that no index needs, or a file elsewhere. Nothing was executed.
        OSError: The index cannot be read.
    """
    path = directory / INDEX
    try:
        found = _Unpickler(io.BytesIO(path_inside(directory, INDEX).read_bytes())).load()
        if not isinstance(found, Metadata):
            raise UnsafeCheckpoint(f"it is a {type(found).__name__}")
        for name in dict.fromkeys(stored.relative_path for stored in (found.storage_data or {}).values()):
            path_inside(directory, name)
        for beside in directory.iterdir():
            path_inside(directory, beside.name)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise UnsafeCheckpoint(f"{path} is not the index of a checkpoint: {error}; it was not loaded") from error
    return found


class CheckedReader(FileSystemReader):
    """Torch's reader with the index from `read_index`, which is read once."""

    _index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index. Torch and Megatron call this."""
        if self._index is None:
            self._index = read_index(Path(self.path))
            if getattr(self._index, "storage_meta", None) is None:
                self._index.storage_meta = StorageMeta()
        return self._index


@contextmanager
def reading(directory: Path) -> Generator[None]:
    """Check a checkpoint's index before the block reads it. Any error of the block gets the directory's name.

    Raises:
        UnsafeCheckpoint: The checkpoint is damaged, or its index names a type that none needs, or files elsewhere.
        OSError: The checkpoint cannot be read.
    """
    read_index(directory)
    try:
        yield
    except (OSError, UnsafeCheckpoint):
        raise
    except CheckpointException as error:  # of torch, with the errors of all ranks; no Exception
        found = [each for each, _ in error.failures.values()]
        plain = next((each for each in found if isinstance(each, OSError | UnsafeCheckpoint)), None)
        raise plain or _damaged(directory, found[0] if found else error) from error
    except Exception as error:  # a damaged file can raise anything
        raise _damaged(directory, error) from error


def _damaged(place: Path | str, error: BaseException) -> UnsafeCheckpoint:
    lines = str(error).splitlines()
    reason = f"{type(error).__name__}: {lines[0][:MAX_REASON]}" if lines else type(error).__name__
    return UnsafeCheckpoint(f"{place} is damaged, or another version wrote it: {reason}")


def checked_reader(checkpoint_dir: str | Path, cache_metadata: bool = False) -> CheckedReader:
    """Replace Megatron's _get_filesystem_reader."""
    del cache_metadata  # the index is always cached
    return CheckedReader(checkpoint_dir)


def load_plain(self: Any, read_item: ReadItem, value: io.BytesIO) -> None:
    """Replace a planner's `load_bytes`, which would unpickle any object."""
    name = read_item.dest_index.fqn
    found = _plain(value, f"{name} of the checkpoint")
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], found)
    else:
        self.state_dict[name] = found


def load_common(self: Any, checkpoint_dir: str | Path) -> dict[str, Any]:
    """Replace `load_common` of Megatron's common strategy, whose errors do not name the file."""
    del self
    path = Path(checkpoint_dir) / COMMON
    return _plain(path, str(path))


def _plain(file: Path | io.BytesIO, name: str) -> Any:
    """Load tensors and plain values only."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:
        found = _BLOCKED.search(str(error))
        what = f"names {found[1]}" if found else "cannot be unpickled"
        raise UnsafeCheckpoint(
            f"{name} {what}, which is neither a tensor nor a plain value; it was not loaded"
        ) from error
    except Exception as error:  # a damaged file can raise anything
        raise _damaged(name, error) from error
