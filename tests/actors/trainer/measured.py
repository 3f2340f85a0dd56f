"""How much memory of its own a process has: not the files that it maps, nor what the system caches for it."""

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from threading import Event, Thread
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actors.trainer.megatron.memory import give_back
from runtime.util.memory import own_anonymous_bytes


class Peak:
    """The most anonymous memory beyond that of the begin."""

    def __enter__(self) -> "Peak":
        gc.collect()
        give_back()  # else what was freed before is used again unseen
        self._end, self._before, self.bytes = Event(), own_anonymous_bytes(), 0
        self._thread = Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(0.0005):
            self.bytes = max(self.bytes, own_anonymous_bytes() - self._before)

    def __exit__(self, *_error: object) -> None:
        self._end.set()
        self._thread.join()


def peak_of_tensors(work: Callable[[], object]) -> int:
    """The most bytes of new tensors at a time, as torch counts them.

    What a process of many tests has resident says little: its heap keeps what earlier ones freed.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    results = profiled.profiler
    assert results is not None
    assert results.kineto_results is not None
    changes = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    size = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        size += change.nbytes()
        peak = max(peak, size)
    return peak


class TensorPeak(TorchDispatchMode):
    """The most bytes at a time of the tensors that operations made. Views and mapped files count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self._bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Torch calls this for each operation."""
        found = func(*args, **(kwargs or {}))
        if not any(result.alias_info for result in func._schema.returns):
            for tensor in tree_leaves(found):
                if isinstance(tensor, Tensor):
                    self._add(tensor.untyped_storage())
        return found

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self._bytes += size
            self.bytes = max(self.bytes, self._bytes)
            weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._bytes -= size
