"""Hosts one or several actors in a process: one task group, standard calls, roster, shutdown."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup, TaskStatus

from messages import ActorDescribed, DescribeRequested, Message, StatsGiven, StatsRequested, tag_of
from runtime.bus.background import task_group
from runtime.bus.bus import Bus
from runtime.bus.roster import Roster
from runtime.process.actor import INPUT_ERRORS, Actor, InputError
from runtime.util.errors import causes_in

log = structlog.get_logger()


class Hosted(msgspec.Struct, frozen=True, kw_only=True):
    """An actor to run: instance name such as "reward.0", role, class, and factory."""

    name: str
    role: str
    actor_type: type[Actor]
    build: Callable[[Bus], Actor]


async def host(bus: Bus, actors: Sequence[Hosted], *, node: str = "local") -> None:
    """Run actors until all have ended. If one fails, cancel the others.

    Each actor gets a view of the bus that allows only its declared messages. It answers describe and stats calls, and
    is on the roster of its role from its start to its end.

    Raises:
        ExceptionGroup: the actors' exceptions; InputError for wrong input at the start.
    """
    async with anyio.create_task_group() as group:
        for hosted in actors:
            group.start_soon(_run_one, bus, hosted, node, name=hosted.name)


class _Started(TaskStatus[None]):
    """Calls a function when an actor reports that it started."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.is_set = False
        self._then = then

    def started(self, value: None = None) -> None:
        self.is_set = True
        self._then()


async def _run_one(bus: Bus, hosted: Hosted, node: str) -> None:
    view = bus.for_actor(hosted.name, reads=hosted.actor_type.reads, writes=hosted.actor_type.writes)
    with structlog.contextvars.bound_contextvars(actor=hosted.name):
        async with task_group() as group:
            status = _Started(lambda: _join(group, Roster(bus), hosted, node))
            try:
                actor = hosted.build(view)
                async with view.serve(_standard_calls(view, actor, hosted, node)):
                    await actor.run(task_status=status)
            except Exception as error:
                causes = causes_in(error)
                if not status.is_set and all(isinstance(leaf, INPUT_ERRORS) for leaf in causes):
                    raise InputError(f"{hosted.name}: {'; '.join(str(leaf) for leaf in causes)}") from error
                raise
        log.info("actor_ended", role=hosted.role)


def _join(group: TaskGroup, roster: Roster, hosted: Hosted, node: str) -> None:
    log.info("actor_started", role=hosted.role)
    group.start_soon(roster.stay, hosted.role, hosted.name, node)


def _standard_calls(bus: Bus, actor: Actor, hosted: Hosted, node: str) -> dict[type[Message], Callable[[Any], Any]]:
    begun = time.monotonic()

    async def describe(_request: DescribeRequested) -> ActorDescribed:
        return ActorDescribed(
            instance=hosted.name,
            role=hosted.role,
            reads=_tags(actor.reads),
            writes=_tags(actor.writes),
            pid=os.getpid(),
            node=node,
        )

    async def stats(_request: StatsRequested) -> StatsGiven:
        uptime_s = time.monotonic() - begun
        stats = bus.stats() | actor.stats()
        return StatsGiven(instance=hosted.name, uptime_s=uptime_s, stats=stats, waits_for=actor.waits_for())

    return {DescribeRequested: describe, StatsRequested: stats}


def _tags(message_types: Iterable[type[Message]]) -> tuple[str, ...]:
    return tuple(tag_of(message_type) for message_type in message_types)
