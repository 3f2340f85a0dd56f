"""The one thread that runs torch, separate from the event loop."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, Self, TypeVar

from runtime.settings.devices import HIDDEN
from runtime.util.imports import collecting_nothing

P = ParamSpec("P")
T = TypeVar("T")


class TorchThread:
    """Runs calls one after another on its own thread, for as long as it is open.

    Torch keeps state per thread: the current device, autograd. A call cannot be interrupted. If the caller is
    cancelled, the call continues, and closing waits for its end.
    """

    def __init__(self, device: str = "cpu", *, num_threads: int = 1) -> None:
        """Create the thread. With `device` "cpu", hide all GPUs from the whole process.

        `num_threads` is the number of threads that compute one operation on the CPU.
        """
        if device == "cpu":
            os.environ.update(HIDDEN)
        enter = partial(_enter_thread, num_threads)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch", initializer=enter)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._executor.shutdown(wait=True)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function on the thread and wait for its result."""
        return await asyncio.wrap_future(self._executor.submit(function, *args, **kwargs))

    def run_last(self, function: Callable[[], Any]) -> None:
        """Schedule a function before the thread ends, without waiting for it."""
        self._executor.submit(function)


def _enter_thread(num_threads: int) -> None:
    with collecting_nothing():
        import torch  # heavy: the event loop serves calls while this thread imports it

        from actors.trainer.megatron import cpu

    if cpu.needed():
        torch.set_num_threads(num_threads)
