"""Asking rollout actors about their engines, from the event loop and from threads."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

import anyio

from messages import EnginesAnswered, Message
from runtime.bus.background import beside
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError, CallTimeout
from runtime.bus.roster import Roster
from runtime.retrying import retried

ROLE: Final = "rollout"
POOL: Final = "policy"  # the engines that are given weights
TRIES: Final = 3
LOOK_EVERY_S: Final = 1.0  # whether a rollout actor is another
BEYOND_S: Final = 5.0  # that an answer is waited for longer than the engines have: it says which of them failed
Ask = Callable[[Message, float], "Future[dict[str, str]]"]  # a step and seconds for it; reasons of failures by engine
AskOf = Callable[[Sequence[str]], Ask]  # by the rollout actors that a session is with


async def ask_all(
    bus: Bus, instances: Sequence[str], request: Message, timeout_s: float, *, times: int = 1
) -> dict[str, str]:
    """Have the engines of several rollout actors do something; why some did not, by engine.

    What becomes of an actor that does not answer stands under its own name. One that was started again meanwhile will
    not: it does not know of the request.

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

    async def ask_while_it_lives(instance: str) -> None:
        with anyio.CancelScope() as scope:
            async with beside(partial(_cut_when_another, bus, instance, scope)):
                await ask(instance)
        if scope.cancelled_caught:
            failed[instance] = f"{instance} was started again"

    async with anyio.create_task_group() as group:
        for instance in instances:
            group.start_soon(ask_while_it_lives, instance)
    return failed


async def _cut_when_another(bus: Bus, instance: str, scope: anyio.CancelScope) -> None:
    """Cut a wait for a rollout actor's process once another one has taken its place."""
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


def from_threads(bus: Bus, loop: asyncio.AbstractEventLoop, instances: Sequence[str]) -> Ask:
    """`ask_all` for other threads than the event loop's."""
    return lambda request, timeout_s: asyncio.run_coroutine_threadsafe(
        ask_all(bus, instances, request, timeout_s), loop
    )
