"""Safe reader of the pickled tensors in POST /update_weights_from_tensor: runs no code that they name.

A tensor's bytes are in the pickle or in a shared memory segment that it names. torch keeps a reference count in
the segment's first bytes; the last user removes the segment.
"""

import base64
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, _utils
from torch.multiprocessing import reductions

from actors.tiny_engine.model.receiving import Named, view

REBUILDING: Final[dict[tuple[str, str], Callable[..., Any]]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): _utils._rebuild_tensor_v2,  # pyright: ignore[reportPrivateUsage]
    ("torch._utils", "_rebuild_parameter"): _utils._rebuild_parameter,  # pyright: ignore[reportPrivateUsage]
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"): reductions.rebuild_storage_filename,
    ("torch.multiprocessing.reductions", "rebuild_tensor"): reductions.rebuild_tensor,
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"): reductions.rebuild_typed_storage,
    ("torch", "Tensor"): Tensor,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("types", "SimpleNamespace"): SimpleNamespace,
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): SimpleNamespace,
}


class _Unpickler(pickle.Unpickler):
    """Unpickler restricted to the classes and functions that tensors and their metadata need."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        try:
            return REBUILDING[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"Blocked unsafe global ({module}.{name})") from None


def _storage(data: bytes) -> Any:
    """Load a torch storage; torch's own function would unpickle without restrictions."""
    return torch.load(io.BytesIO(data), weights_only=True)


def decoded(payload: str) -> Any:
    """Decode a payload.

    Raises:
        ValueError: it is not base64, not a pickle, or names a class or function that tensors do not need.
    """
    try:
        return _Unpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load()
    except Exception as error:  # a pickle is a program and may raise anything
        raise ValueError(f"unreadable tensors: {error}") from error


def named_of(payload: str, load_format: str | None) -> Named:
    """Decode the named tensors of a payload.

    Raises:
        ValueError: the payload does not match `load_format`.
    """
    found = decoded(payload)
    try:
        if load_format == "flattened_bucket":
            return _unflattened(found["flattened_tensor"], found["metadata"])
        named = [(name, tensor) for name, tensor in found]
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"the payload does not fit load_format = {load_format}: {error!r}") from error
    if load_format is not None:
        raise ValueError(f"Unknown load_format={load_format}")
    if not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in named):
        raise ValueError("the payload is not a list of names and tensors")
    return named


def dict_of(payload: str, load_format: str | None) -> dict[str, Tensor]:
    """Decode the tensors of a LoRA adapter: a dict, unlike those of weights.

    Raises:
        ValueError: the payload does not match `load_format`.
    """
    if load_format is not None:
        return dict(named_of(payload, load_format))
    found = decoded(payload)
    if not isinstance(found, dict):
        raise ValueError(f"{type(found).__name__!r} object has no attribute 'items'")
    tensors: dict[Any, Any] = found
    if not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()):
        raise ValueError("the payload is not a dict of names and tensors")
    return tensors


def _unflattened(flat: Tensor, metadata: Sequence[Any]) -> Named:
    return [
        (each.name, view(flat, each.start_idx, each.end_idx - each.start_idx, each.dtype, each.shape))
        for each in metadata
    ]
