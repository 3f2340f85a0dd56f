"""CPU time of what runs on an event loop without a break, such as asyncio's debug mode reports as a slow callback."""

import asyncio
import gc
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final


def _step_s(clock: Callable[[], float]) -> float:
    """The step of a clock. On some kernels it is a tick, all of which is charged to what runs at its end."""
    begin, until = clock(), time.monotonic() + 1.0
    while (now := clock()) == begin and time.monotonic() < until:
        pass
    return now - begin


def _speed() -> float:
    """How many times as long as on an idle core of 2026 a piece of Python takes now, at least 1."""
    took_s = list[float]()
    for _ in range(3):
        begin = time.thread_time()
        dict(zip(map(str, range(20_000)), range(20_000), strict=True))
        took_s.append(time.thread_time() - begin)
    return max(1.0, min(took_s) / 0.004)


BOUND_S: Final = 0.01 * _speed() + _step_s(time.thread_time)
KEPT: Final = 5
OWN: Final = "TestRunner"  # the task of the test itself


@dataclass
class LoopWatch:
    """The longest runs of one callback, or of one task from one wait to the next: seconds of CPU, and their name."""

    longest: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    num_runs: int = 0

    def over(self, bound_s: float = BOUND_S) -> list[tuple[float, str]]:
        """The runs above a bound."""
        return [run for run in self.longest if run[0] > bound_s]

    def take(self, took_s: float, name: str) -> None:
        self.num_runs += 1
        if len(self.longest) < KEPT or took_s > self.longest[-1][0]:
            self.longest = sorted([*self.longest, (took_s, name)], reverse=True)[:KEPT]


def name_of(handle: asyncio.Handle) -> str:
    """What ran, and for a task where it waits now."""
    task = getattr(getattr(handle, "_callback", None), "__self__", None)
    if not isinstance(task, asyncio.Task):
        return repr(handle)
    places, coroutine = list[str](), task.get_coro()
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        places.append(f"{getattr(coroutine, '__qualname__', coroutine)}:{frame.f_lineno if frame else 'ended'}")
        coroutine = getattr(coroutine, "cr_await", None)
    return " > ".join(places)


@contextmanager
def watching_loop() -> Generator[LoopWatch]:
    """Measure all callbacks of asyncio's own loop in this block, in CPU time of its thread: a busy machine adds none.

    Garbage collection is off meanwhile, since it depends on everything that a test run holds.
    """
    watch, run, clock = LoopWatch(), asyncio.Handle._run, time.thread_time

    def watched(handle: asyncio.Handle) -> None:
        begin = clock()
        try:
            run(handle)
        finally:
            took_s = clock() - begin
            name = name_of(handle) if took_s > BOUND_S else ""
            if not name.startswith(OWN):
                watch.take(took_s, name)

    collects = gc.isenabled()
    gc.disable()
    asyncio.Handle._run = watched  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
        if collects:
            gc.enable()
