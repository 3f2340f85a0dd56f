"""What a simulation replaces of the interpreter: clocks, chance, threads and the client of NATS."""

import random
import secrets
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from random import Random
from typing import Any, Final
from unittest import mock

import anyio
import anyio.to_thread
from anyio._backends import _asyncio

from runtime.bus.nats import connection, room
from tests.simulate.client import Network, SimulatedClient, use
from tests.simulate.loop import CURRENT, VirtualLoop, number_of
from tests.simulate.server import EPOCH_S

THREAD_S: Final = 0.002  # longest work of a thread


class NumberedScope(_asyncio.CancelScope):
    """A cancel scope whose place in a set does not depend on its address."""

    __hash__ = number_of


@contextmanager
def simulated(loop: VirtualLoop, chance: Random, network: Network) -> Generator[None]:
    """Replace clocks, chance, threads and the client for a block. Everything then follows from `chance`."""

    def now() -> float:
        process = CURRENT.get()
        return EPOCH_S + loop.time() + (0.0 if process is None else process.clock_ahead_s)

    async def run_sync(
        function: Callable[..., Any], *args: Any, abandon_on_cancel: bool = False, limiter: Any = None, **_: Any
    ) -> Any:
        await anyio.lowlevel.checkpoint()
        with anyio.CancelScope(shield=not abandon_on_cancel):
            await anyio.sleep(chance.random() * THREAD_S)
        return function(*args)

    def new_uuid() -> uuid.UUID:
        return uuid.UUID(int=chance.getrandbits(128), version=4)

    before = random.getstate()
    random.seed(chance.getrandbits(64))
    patches: list[tuple[Any, str, Any]] = [
        (time, "time", now),
        (time, "monotonic", loop.time),
        (time, "clock_gettime", lambda _: loop.time()),
        (time, "perf_counter", loop.time),
        (room, "monotonic", loop.time),
        (uuid, "uuid4", new_uuid),
        (anyio.to_thread, "run_sync", run_sync),
        (secrets, "token_hex", lambda size=32: f"{chance.getrandbits(8 * size):0{2 * size}x}"),
        (secrets, "token_urlsafe", lambda size=32: f"{chance.getrandbits(8 * size):0{2 * size}x}"),
        (connection, "CorrectedClient", SimulatedClient),
        (_asyncio, "CancelScope", NumberedScope),
    ]
    with replaced(patches), use(network):
        try:
            yield
        finally:
            random.setstate(before)


@contextmanager
def replaced(patches: list[tuple[Any, str, Any]]) -> Generator[None]:
    """Replace attributes for a block: each by its owner, its name and its new value."""
    started = [mock.patch.object(*patch) for patch in patches]
    for patch in started:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(started):
            patch.stop()
