"""Asking rollout actors about their engines, from the event loop and from threads."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

import anyio

from messages import EnginesAnswered, Message
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError, CallTimeout
from runtime.retrying import retried

TRIES: Final = 3
BEYOND_S: Final = 5.0  # that an answer is waited for longer than the engines have: it says which of them failed
Ask = Callable[[Message, float], "Future[dict[str, str]]"]  # a step and seconds for it; reasons of failures by engine
AskOf = Callable[[Sequence[str]], Ask]  # by the rollout actors that a session is with


async def ask_all(
    bus: Bus, instances: Sequence[str], request: Message, timeout_s: float, *, times: int = 1
) -> dict[str, str]:
    """Have the engines of several rollout actors do something; why some did not, by engine.

    What becomes of an actor that does not answer stands under its own name.

    Args:
        bus: to ask on.
        instances: the rollout actors.
        request: a step of a session.
        timeout_s: for the engines.
        times: that it is asked where answers are lost; above 1 only what may be done twice.
    """
    failed: dict[str, str] = {}

    async def ask(instance: str) -> None:
        try:
            answer = await retried(
                lambda: bus.call(instance, request, EnginesAnswered, timeout_s=timeout_s + BEYOND_S),
                on=CallTimeout,
                times=times,
            )
        except BusError as error:
            failed[instance] = str(error)
        else:
            failed.update(answer.failed)

    async with anyio.create_task_group() as group:
        for instance in instances:
            group.start_soon(ask, instance)
    return failed


def from_threads(bus: Bus, loop: asyncio.AbstractEventLoop, instances: Sequence[str]) -> Ask:
    """`ask_all` for other threads than the event loop's."""
    return lambda request, timeout_s: asyncio.run_coroutine_threadsafe(
        ask_all(bus, instances, request, timeout_s), loop
    )
