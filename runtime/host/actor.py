"""Actors and their host: one or several in a process, under one task group, with their calls and their end."""

import atexit
import gc
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, ClassVar, Final, cast

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup, TaskStatus

from messages import ActorDescribed, DescribeRequested, Message, StatsGiven, StatsRequested, tag_of
from runtime.bus.background import task_group
from runtime.bus.bus import DEFAULT_LIMITS, Bus
from runtime.bus.errors import BusError, Fenced
from runtime.bus.limits import BusLimits
from runtime.bus.roster import Member, Roster
from runtime.settings.toml import TopologyError

log = structlog.get_logger()

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_INPUT_ERROR: Final = 2
EXIT_FENCED: Final = 3
STOP_TIMEOUT_S: Final = 8.0  # from the signal to the end of the process, whatever hangs
LEAVE_TIMEOUT_S: Final = 2.0
COLLECT_AFTER: Final = 20_000  # objects more than before: a few megabytes


class InputError(Exception):
    """What the user gave cannot be used; starting again would not help (exit code 2)."""


# raised by an actor before it says that it has started, these mean wrong input
INPUT_ERRORS: Final = (
    InputError,
    TopologyError,
    ValueError,
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
)


class Actor(ABC):
    """Reads messages, writes messages: what it declares is its whole surface. Its docstring says what a crash loses."""

    reads: ClassVar[tuple[type[Message], ...]] = ()
    writes: ClassVar[tuple[type[Message], ...]] = ()

    @abstractmethod
    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Work until done or cancelled; report task_status.started() once subscribed."""

    def stats(self) -> dict[str, float]:
        """Numbers since the start."""
        return {}

    def waits_for(self) -> str:
        """What it waits for now, for people who wonder why nothing happens; empty when it is at work."""
        return ""


class Hosted(msgspec.Struct, frozen=True, kw_only=True):
    """An actor to be run: its instance name such as "reward.0", its role, its class, and how it is made on a bus."""

    name: str
    role: str
    actor_type: type[Actor]
    build: Callable[[Bus], Actor]


async def host(bus: Bus, actors: Sequence[Hosted], *, node: str = "local") -> None:
    """Run actors until all have ended or one fails; the others are then cancelled.

    Each is built on a view of the bus that lets it read and write what it declares, answers describe and stats calls,
    and is on the roster of its role from its start to its end.

    Raises:
        ExceptionGroup: what actors raised; InputError for wrong input at the start.
    """
    async with anyio.create_task_group() as group:
        for hosted in actors:
            group.start_soon(_run_one, bus, hosted, node, name=hosted.name)


class _Started(TaskStatus[None]):
    """Runs something when an actor says that it has started."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.is_set = False
        self._then = then

    def started(self, value: None = None) -> None:
        self.is_set = True
        self._then()


async def _run_one(bus: Bus, hosted: Hosted, node: str) -> None:
    view = bus.for_actor(hosted.name, reads=hosted.actor_type.reads, writes=hosted.actor_type.writes)
    member = Member(instance=hosted.name, incarnation=time.time_ns(), node=node)
    roster = Roster(bus)
    with structlog.contextvars.bound_contextvars(actor=hosted.name):
        async with task_group() as group:
            status = _Started(lambda: _join(group, roster, hosted.role, member))
            try:
                actor = hosted.build(view)
                async with view.serve(_standard_calls(view, actor, hosted, node)):
                    await actor.run(task_status=status)
            except Exception as error:
                if not status.is_set and all(isinstance(leaf, INPUT_ERRORS) for leaf in leaves(error)):
                    raise InputError(f"{hosted.name}: {'; '.join(str(leaf) for leaf in leaves(error))}") from error
                raise
            finally:
                if status.is_set:
                    await _leave(roster, hosted.role, member)
        log.info("actor_ended", role=hosted.role)


def _join(group: TaskGroup, roster: Roster, role: str, member: Member) -> None:
    log.info("actor_started", role=role)
    group.start_soon(roster.keep_joined, role, member)


async def _leave(roster: Roster, role: str, member: Member) -> None:
    with anyio.move_on_after(LEAVE_TIMEOUT_S, shield=True):
        try:
            await roster.leave(role, member)
        except BusError as error:  # then the next call to the role finds it silent and evicts it
            log.warning("roster_not_left", role=role, error=str(error))


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


def leaves(error: BaseException) -> list[BaseException]:
    """The errors in a group of groups, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return [leaf for inner in group.exceptions for leaf in leaves(inner)]
    return [error]


def exit_code_of(error: BaseException) -> int:
    """What a process says at its end: fenced and wrong input are lasting, anything else may be tried again."""
    found = leaves(error)
    if any(isinstance(leaf, Fenced) for leaf in found):
        return EXIT_FENCED
    if any(isinstance(leaf, (InputError, TopologyError)) for leaf in found):
        return EXIT_INPUT_ERROR
    return EXIT_FAILED


def run_process(
    url: str,
    run: str,
    actors: Sequence[Hosted],
    *,
    node: str = "local",
    limits: BusLimits = DEFAULT_LIMITS,
    stop_timeout_s: float = STOP_TIMEOUT_S,
) -> int:
    """Host actors as this process's main work; return its exit code.

    SIGTERM and SIGINT end it in order: the actors are cancelled, the bus is drained, the code is 0. After
    stop_timeout_s it ends without order.
    """
    name = "+".join(hosted.name for hosted in actors)
    stopping = False

    def on_stop() -> None:
        nonlocal stopping
        stopping = True
        signal.signal(signal.SIGALRM, _end_now)
        signal.setitimer(signal.ITIMER_REAL, stop_timeout_s)
        # covers threads that are joined at exit; later the interpreter takes the handler away and the alarm would kill
        atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)

    async def main() -> None:
        async with anyio.create_task_group() as group:
            await group.start(_stop_on_signal, group.cancel_scope, on_stop)
            async with Bus.connect(url, run, name=name, limits=limits) as bus:
                await host(bus, actors, node=node)
            group.cancel_scope.cancel()

    structlog.contextvars.bind_contextvars(run=run, actor=name)
    spare_the_collector()
    try:
        anyio.run(main, backend="asyncio", backend_options={"use_uvloop": True})
    except Exception as error:  # the end of the process: every error becomes an exit code
        code = EXIT_OK if stopping else exit_code_of(error)
        for leaf in leaves(error):
            log.error("actor_failed", error=repr(leaf), exit_code=code, exc_info=leaf)
        return code
    return EXIT_OK


def spare_the_collector() -> None:
    """Have the garbage collector leave out what is loaded by now, and look at the rest less often.

    Messages come and go by reference counting; at the defaults the collector takes a sixth of a busy actor's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 20)


async def _stop_on_signal(
    scope: anyio.CancelScope, on_stop: Callable[[], None], *, task_status: TaskStatus[None]
) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for received in signals:
            log.info("stopping", signal=received.name)
            on_stop()
            scope.cancel()
            return


def _end_now(_signal: int, _frame: FrameType | None) -> None:
    log.error("stop_took_too_long")
    os._exit(EXIT_OK)
