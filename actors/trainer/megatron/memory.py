"""Offloading of a rank's training memory to the host while it does not train, and measurement of peak memory."""

import ctypes
import tempfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, UntypedStorage

from actors.trainer.megatron.imports import quiet
from runtime.util.memory import own_anonymous_bytes

_PERIOD_S: Final = 0.02  # seconds between samples of the host's memory


def host_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host: to pinned memory if it is on a GPU."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)


class PeakMemory:
    """Peak memory of this rank by phase: allocated GPU memory, or anonymous host memory on the CPU."""

    def __init__(self, device: torch.device) -> None:
        """Start without measurements."""
        self._device = device
        self._peaks: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Measure the peak memory during the block."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            self._add(name, torch.cuda.max_memory_allocated(self._device))
            return
        end = Event()
        watcher = Thread(target=self._watch, args=(name, end), name="memory")
        watcher.start()
        try:
            yield
        finally:
            end.set()
            watcher.join()

    def _watch(self, name: str, end: Event) -> None:
        while not end.wait(_PERIOD_S):
            self._add(name, own_anonymous_bytes())
        self._add(name, own_anonymous_bytes())

    def _add(self, name: str, size: int) -> None:
        self._peaks[name] = max(size, self._peaks.get(name, 0))

    def take(self) -> dict[str, int]:
        """Return the bytes by phase since the last call, and reset them."""
        taken, self._peaks = self._peaks, {}
        return taken


def held_bytes(device: torch.device) -> int:
    """Return the memory that this rank reserves, in bytes: of its GPU, or anonymous memory of the host."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else own_anonymous_bytes()


class Offloaded:
    """Main parameters, optimizer state, gradient buffers and, on request, weights moved off the device.

    The tensors stay the same objects. Their storages are emptied, and `onload` fills them again. Gradients are not
    kept, since each optimizer step starts without them.
    """

    def __init__(
        self,
        ddp: Sequence[Any],
        optimizer: Any,
        folder: Path,
        *,
        gradients: bool = True,
        weights: bool = False,
        before: "Offloaded | None" = None,
    ) -> None:
        """Move the storages off the device.

        Args:
            ddp: Megatron's DistributedDataParallel wrappers of this rank's model.
            optimizer: Megatron's optimizer.
            folder: Directory of the file that takes the host's place when training on the CPU.
            gradients: Whether to offload the gradient buffers, too.
            weights: Whether to offload the weights, too.
            before: Earlier `Offloaded` after its `onload`. Its host memory is reused if the sizes match.
        """
        with quiet():
            optimizer.zero_grad()  # gradients of the main parameters
        of_weights = _storages(parameter for wrapped in ddp for parameter in wrapped.parameters())
        known = {storage.data_ptr() for storage in of_weights}
        buffers = [buffer for wrapped in ddp for buffer in _buffers(wrapped)] if gradients else []
        self._gradients = _storages(buffer.grad_data for buffer in buffers)
        kept = _storages(_optimizer_tensors(optimizer))
        self._kept = [storage for storage in kept if storage.data_ptr() not in known]
        if weights:
            self._kept += of_weights
        self.size_bytes = sum(storage.nbytes() for storage in (*self._gradients, *self._kept))
        self._sizes = [storage.nbytes() for storage in (*self._gradients, *self._kept)]
        room = [] if before is None else before._host  # allocating it, above all if pinned, takes longer than the copy
        fits = [host.nbytes for host in room] == [storage.nbytes() for storage in self._kept]
        self._host = room if fits else _host_of(self._kept, folder)
        for storage, host in zip(self._kept, self._host, strict=True):
            host.copy_(_bytes_of(storage))
        for storage in (*self._gradients, *self._kept):
            storage.resize_(0)
        give_back()

    @property
    def storages(self) -> list[UntypedStorage]:
        """All emptied storages."""
        return [*self._gradients, *self._kept]

    def onload(self) -> None:
        """Restore the storages. Gradient buffers are zeroed."""
        for storage, size in zip(self.storages, self._sizes, strict=True):
            storage.resize_(size)
        for storage in self._gradients:
            _bytes_of(storage).zero_()
        for storage, host in zip(self._kept, self._host, strict=True):
            _bytes_of(storage).copy_(host)


def _buffers(wrapped: Any) -> list[Any]:
    return [*wrapped.buffers, *wrapped.expert_parallel_buffers]


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Yield main parameters (in float32 the model's own) and the optimizer's state tensors."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return the storages of the tensors without duplicates. Several tensors may be views of one storage."""
    return list({storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}.values())


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_of(storages: Sequence[UntypedStorage], folder: Path) -> list[Tensor]:
    """Allocate host memory for the storages: pinned for those of a GPU, else a memory-mapped unnamed file."""
    sizes = [storage.nbytes() for storage in storages]
    if storages and storages[0].device.type == "cuda":
        return [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(max(sum(sizes), 1))
        mapped = torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="r+"))
    return list(mapped[: sum(sizes)].split(sizes))


def give_back() -> None:
    """Release free memory to the system, and to other users of the GPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps what was freed in small pieces
    if trim is not None:
        trim(0)
