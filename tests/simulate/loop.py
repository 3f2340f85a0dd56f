"""An event loop with virtual time, and simulated processes on it: each may stop for a while, or end at any moment.

The loop has no selector. When nothing is ready, its clock jumps to the next timer, so waits cost no real time. Every
callback belongs to the process in whose context it was scheduled. Those of a frozen process wait until it goes on, and
those of a killed process never run: not even its `finally` blocks.
"""

import asyncio
import heapq
import itertools
import math
from asyncio import base_events, events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final

MAX_CALLBACKS: Final = 400_000  # of one run: it goes on without end
MANY: Final = 64  # callbacks, too many to be only cancellations
ROUNDS: Final = 8  # of cancellations alone, before time goes on


def _cancels(handle: events.Handle) -> bool:
    return getattr(handle._callback, "__name__", "") == "_deliver_cancellation"


class Stuck(AssertionError):
    """Nothing is ready, and no timer is left; or the run goes on without end."""


class Process:
    """A simulated operating system process: a set of callbacks and tasks."""

    def __init__(self, loop: "VirtualLoop", name: str) -> None:
        self.name = name
        self.loop = loop
        self.identity = f"{name} {loop.num_processes}"
        loop.num_processes += 1
        self.is_dead = False
        self.is_frozen = False
        self.clock_ahead_s = 0.0  # of its wall clock
        self.tasks: set[asyncio.Task[Any]] = set()
        self.is_replaced = False
        self.on_replaced: list[Callable[[], None]] = []
        self.on_death: list[Callable[[], None]] = []  # closes its sockets
        self._held: list[events.Handle] = []
        self.context: Context = copy_context()
        self.context.run(CURRENT.set, self)

    def __repr__(self) -> str:
        return self.name

    def start(self, main: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run a coroutine as a task of this process."""
        return self.context.run(self.loop.create_task, main)

    def kill(self) -> None:
        """End the process as SIGKILL does."""
        self.is_dead = True
        self._held.clear()
        for closes in self.on_death:
            closes()
        self.on_death.clear()

    def freeze(self, seconds: float) -> None:
        """Stop the process as SIGSTOP does, for a time."""
        if self.is_frozen or self.is_dead:
            return
        self.is_frozen = True
        if seconds < math.inf:
            self.loop.call_outside(seconds, self.thaw)

    def replace(self, seconds: float) -> None:
        """Stop for a time in which another machine starts a successor."""
        if self.is_frozen or self.is_dead or self.is_replaced:
            return
        self.is_replaced = True
        self.freeze(seconds)
        for tell in self.on_replaced:
            tell()

    def thaw(self) -> None:
        """Go on."""
        self.is_frozen = False
        held, self._held = self._held, []
        for kind in (True, False):  # a loop looks at its sockets before its timers
            self.loop.make_ready(handle for handle in held if isinstance(handle, Arrival) == kind)

    def hold(self, handle: events.Handle) -> None:
        """Keep a callback until the process goes on."""
        self._held.append(handle)


CURRENT: ContextVar[Process | None] = ContextVar("simulated process", default=None)


def current() -> Process:
    """The process whose code runs now."""
    process = CURRENT.get()
    assert process is not None
    return process


class Arrival(events.TimerHandle):
    """Something that arrives at a socket of a process."""


class NumberedTask(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address."""

    def __hash__(self) -> int:
        return number_of(self)


def number_of(thing: Any) -> int:
    """Number objects in the order in which they are first asked for."""
    try:
        return thing._simulated_number
    except AttributeError:
        thing._simulated_number = next(_NUMBERS)
        return thing._simulated_number


_NUMBERS: Final = itertools.count(1)


class VirtualLoop(base_events.BaseEventLoop):
    """The loop of one simulation."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0
        self._num_cancels = 0
        self.num_callbacks = 0
        self.num_processes = 0
        self._outside = Context()
        self.max_callbacks = MAX_CALLBACKS

    def time(self) -> float:
        return self._now

    def call_outside(self, delay_s: float, callback: Callable[..., object], *args: Any) -> events.TimerHandle:
        """Schedule a callback that belongs to no process."""
        return self.call_at(self._now + delay_s, callback, *args, context=self._outside)

    def arrive(self, at: float, process: Process, callback: Callable[..., object], *args: Any) -> None:
        """Schedule what arrives at a socket of a process."""
        handle = Arrival(at, callback, args, self, process.context)
        heapq.heappush(self._scheduled, handle)
        handle._scheduled = True

    def make_ready(self, handles: "Any") -> None:
        """Run callbacks next."""
        self._ready.extend(handles)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> Any:
        task = NumberedTask(coro, loop=self, name=name, context=context)
        process = CURRENT.get() if context is None else context.get(CURRENT)
        if process is not None:
            process.tasks.add(task)
            task.add_done_callback(process.tasks.discard)
        return task

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Context | None = None) -> events.Handle:
        return self.call_soon(callback, *args, context=context)

    def _process_events(self, event_list: Any) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """There is no other thread to wake the loop from."""

    def _only_cancels(self, ready: "deque[events.Handle]") -> bool:
        """Whether nothing is ready but anyio's repeated cancellation of tasks that are shielded: time goes on then."""
        if len(ready) > MANY or not all(_cancels(handle) for handle in ready):
            self._num_cancels = 0
            return False
        self._num_cancels += 1
        return self._num_cancels > ROUNDS

    def _run_once(self) -> None:
        scheduled, ready = self._scheduled, self._ready
        if (not ready or self._only_cancels(ready)) and not self._stopping:
            while scheduled and scheduled[0]._cancelled:
                heapq.heappop(scheduled)._scheduled = False
            if scheduled:
                self._now = max(self._now, scheduled[0]._when)
            elif not ready:
                raise Stuck("nothing is ready, and no timer is left")
        while scheduled and scheduled[0]._when <= self._now:  # never early: who waits again would wait no time
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            if not handle._cancelled:
                ready.append(handle)
        self._timer_cancelled_count = 0
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(CURRENT)
            if process is not None:
                if process.is_dead:
                    continue
                if process.is_frozen:
                    process.hold(handle)
                    continue
            self.num_callbacks += 1
            handle._run()
        if self.num_callbacks > self.max_callbacks:
            self.num_callbacks = 0
            raise Stuck(f"goes on without end at {self._now:.1f} s")
