"""Calls to rollout actors about their engines, from the event loop and from threads."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, Self

import anyio

from messages import Message, WeightSyncAnswered
from runtime.bus.background import in_background
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError, CallTimeout
from runtime.bus.roster import Roster
from runtime.util.retrying import retried

ROLE: Final = "rollout"
POOL: Final = "policy"  # the engines that receive weights
TRIES: Final = 3
LOOK_EVERY_S: Final = 1.0  # seconds between checks whether a rollout actor was restarted
BEYOND_S: Final = 5.0  # beyond the engines' timeout, for the answer that names the failed engines
Ask = Callable[[Message, float], "Future[dict[str, str]]"]  # a step, and seconds for it; reasons of failures by engine
AskOf = Callable[[Sequence[str]], Ask]  # by the rollout actors of a weight sync


async def ask_all(
    bus: Bus,
    instances: Sequence[str],
    request: Message,
    timeout_s: float,
    *,
    times: int = 1,
    at_work: Callable[[dict[str, str]], object] = dict,
) -> dict[str, str]:
    """Call several rollout actors about their engines. Returns the reasons of failures by engine.

    An actor that does not answer appears under its own name. An actor that restarts during the call fails at once: the
    new process does not know the request.

    Args:
        bus: bus to call on.
        instances: the rollout actors.
        request: a step of a weight sync.
        timeout_s: seconds for an answer. An answer may say that engines are still at work; then all are called again.
            Rollout actors limit the time of each engine.
        times: attempts if answers are lost; above 1 only for idempotent steps.
        at_work: called with what each engine does that is still at work.
    """
    failed: dict[str, str] = {}
    pending: dict[str, str] = {}

    async def ask(instance: str) -> None:
        try:
            answer = await retried(
                lambda: bus.call(instance, request, WeightSyncAnswered, timeout_s=timeout_s + BEYOND_S),
                on=CallTimeout,
                times=times,
            )
        except BusError as error:
            failed[instance] = str(error)
        else:
            failed.update(answer.failed)
            pending.update(answer.pending)

    async def ask_while_it_lives(instance: str) -> None:
        with anyio.CancelScope() as scope:
            async with in_background(partial(_cut_when_another, bus, instance, scope)):
                await ask(instance)
        if scope.cancelled_caught:
            failed[instance] = f"{instance} was restarted"

    while True:
        pending.clear()
        async with anyio.create_task_group() as group:
            for instance in instances:
                if instance not in failed:
                    group.start_soon(ask_while_it_lives, instance)
        at_work(pending)
        if not pending:
            return failed


async def _cut_when_another(bus: Bus, instance: str, scope: anyio.CancelScope) -> None:
    """Cancel a call to a rollout actor once a new process has replaced it."""
    first = None
    while True:
        found = await _incarnation(bus, instance)
        first = found if first is None else first
        if found is not None and found != first:
            scope.cancel()
        await anyio.sleep(LOOK_EVERY_S)


async def _incarnation(bus: Bus, instance: str) -> int | None:
    try:
        members = (await Roster(bus).members(ROLE)).members
    except BusError:
        return None
    return next((member.incarnation for member in members if member.instance == instance), None)


class ThreadCalls:
    """`ask_all` for threads other than the event loop's.

    When the task of the context is cancelled or the context ends, calls in progress and all later ones are cancelled:
    the rollout actors may have stopped, and the thread that waits for an answer holds a bucket in shared memory.
    """

    def __init__(self, bus: Bus) -> None:
        """Start without a call, on the running event loop."""
        self._bus = bus
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._is_open = True
        self._running = set[Future[dict[str, str]]]()

    @classmethod
    @asynccontextmanager
    async def opened(cls, bus: Bus) -> AsyncGenerator[Self]:
        """Allow calls until the block ends or is cancelled, even if something in it is shielded."""
        calls = cls(bus)
        async with in_background(calls._close_at_the_end):
            yield calls

    async def _close_at_the_end(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            self._close()

    def _close(self) -> None:
        with self._lock:
            self._is_open = False
            running = tuple(self._running)
        for call in running:
            call.cancel()

    def ask_of(self, instances: Sequence[str]) -> Ask:
        """Return the calls to several rollout actors."""
        return lambda request, timeout_s: self._call(instances, request, timeout_s)

    def _call(self, instances: Sequence[str], request: Message, timeout_s: float) -> Future[dict[str, str]]:
        with self._lock:
            if not self._is_open:
                call = Future[dict[str, str]]()
                call.cancel()
                return call
            call = asyncio.run_coroutine_threadsafe(ask_all(self._bus, instances, request, timeout_s), self._loop)
            self._running.add(call)
        call.add_done_callback(self._forget)
        return call

    def _forget(self, call: Future[dict[str, str]]) -> None:
        with self._lock:
            self._running.discard(call)
