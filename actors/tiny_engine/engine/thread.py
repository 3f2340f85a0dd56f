"""The torch thread: runs the core's steps, executes operations between steps, reports once per step."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import torch

from actors.tiny_engine.engine.core import Core
from actors.tiny_engine.engine.requests import Request
from actors.tiny_engine.engine.scheduler import TokenReport

T = TypeVar("T")
Deliver = Callable[[list[TokenReport]], None]

STOP_TIMEOUT_S: Final = 1.0


class EngineStopped(Exception):
    """The torch thread has ended."""


class EngineThread:
    """A thread that owns a core. Call its methods from the event loop's thread only.

    The queue holds one operation per call in progress; the frontend bounds their number.
    """

    def __init__(
        self,
        build: Callable[[], Core],
        deliver: Deliver,
        crashed: Callable[[BaseException], None],
        *,
        num_threads: int = 1,
    ) -> None:
        """Prepare the thread; it runs from `start` on.

        Args:
            build: builds the core, on the torch thread.
            deliver: receives each step's reports, on the event loop.
            crashed: called on the event loop if an exception ends the thread.
            num_threads: number of threads that compute one operation.
        """
        self._build = build
        self._deliver = deliver
        self._crashed = crashed
        self._num_threads = num_threads
        self._orders: queue.SimpleQueue[Callable[[Core], None]] = queue.SimpleQueue()
        self._stopping = False
        self._sleep_s = 0.0
        self._thread = threading.Thread(target=self._run, name="torch", daemon=True)

    async def start(self) -> None:
        """Start the thread and wait until its core is built.

        Raises:
            ModelError: from the core.
        """
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._started

    def stop(self) -> None:
        """Stop the thread after its current step, and wait for its end."""
        self._stopping = True
        self._orders.put(lambda _: None)  # wakes the thread
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)

    def post(self, order: Callable[[Core], object]) -> None:
        """Run an operation between two steps, in the order of posting."""
        self._orders.put(lambda core: _discard(order(core)))

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self._orders.put(lambda core: core.scheduler.submit(requests))

    async def call(self, order: Callable[[Core], T]) -> T:
        """Run an operation between two steps and wait for its result.

        Raises:
            EngineStopped: the thread has ended.
            Exception: any exception of the operation.
        """
        if self._stopping or not self._thread.is_alive():
            raise EngineStopped("the engine has stopped")
        future: asyncio.Future[T] = self._loop.create_future()

        def do(core: Core) -> None:
            try:
                result = order(core)
            except Exception as error:  # noqa: BLE001 - raised again in the waiting call
                self._soon(_fail, future, error)
            else:
                self._soon(_resolve, future, result)

        self._orders.put(do)
        return await future

    def slow_down(self, seconds: float) -> None:
        """Add this delay to every step from now on."""
        self._sleep_s = seconds

    def _soon(self, callback: Callable[..., None], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # a setting per thread
        try:
            with torch.inference_mode():
                core = self._build()
                self._soon(_resolve, self._started, None)
                while not self._stopping:
                    self._turn(core)
        except BaseException as error:  # noqa: BLE001 - a thread's exception has nowhere else to go
            self._soon(self._report_crash, error)

    def _turn(self, core: Core) -> None:
        """Run queued operations, then one step; if idle, wait for an operation."""
        order = self._next_order(wait=core.idle)
        while order is not None:
            order(core)
            order = self._next_order(wait=False)
        if not core.idle:
            if self._sleep_s:
                time.sleep(self._sleep_s)
            core.scheduler.step()
        reports = core.scheduler.take_reports()
        if reports:
            self._soon(self._deliver, reports)

    def _next_order(self, *, wait: bool) -> Callable[[Core], None] | None:
        try:
            return self._orders.get(block=wait)
        except queue.Empty:
            return None

    def _report_crash(self, error: BaseException) -> None:
        if not self._started.done():
            self._started.set_exception(error)
        else:
            self._crashed(error)


def _discard(_: object) -> None:
    return None


def _resolve(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
