"""The run's log on a node: follows its events, and publishes the state changes of the node's processes."""

import uuid
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from typing import Any, Final

import anyio
import msgspec
import structlog

from messages import (
    ActorExited,
    ActorStarted,
    BatchTrained,
    EventLoopBlocked,
    Message,
    RunFailed,
    RunFinished,
    RunStopped,
    TrainerStarted,
)
from messages.plain import clipped
from runtime.bus.addresses import LIFETIME_S, RENEW_EVERY_S, Address, host_port
from runtime.bus.background import in_background
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError, LogTrimmedAway
from runtime.node.claims.node_claim import claims
from runtime.node.missing import NO_BUDGET_HELPS
from runtime.node.node_plan import NodePlan, RunEnd
from runtime.node.reporting import Reporting
from runtime.node.stalls import StallWatch
from runtime.node.supervisor.state_changes import STOPPED, Blocked, Change, Exited, Ready, Started
from runtime.settings.processes import ProcessSpec
from runtime.util.retrying import FOR_EVER, retried

log = structlog.get_logger()

BEGIN_KEY: Final = "begin_of_home"
MAX_PLACE_CHARS: Final = 500


class Follower:
    """Reads the log for the node daemon.

    Args:
        reporting: receives each event.
        progress: called for each trained step.
        end: called when the run has ended, by the log.
        started: called for each process that was started, on any node.
        lost: called for each process that is not restarted, on any node, with the reason.
    """

    def __init__(
        self,
        plan: NodePlan,
        reporting: Reporting,
        *,
        progress: Callable[[], None],
        end: Callable[[RunEnd], None],
        started: Callable[[str], None] = lambda process: None,
        lost: Callable[[str, str], None] = lambda process, reason: None,
    ) -> None:
        self._started = started
        self._lost = lost
        self._plan = plan
        self._reporting = reporting
        self._progress = progress
        self._end = end
        self._steps = 0
        self._last_seq = 0
        self._first_seq = 1

    def begin_at(self, first_seq: int) -> None:
        """Set the log sequence at which this start begins: earlier events, such as a failure, do not end it."""
        self._first_seq = first_seq

    @property
    def has_trained(self) -> bool:
        """Whether a train step of the run was seen, in this start or an earlier one."""
        return self._steps > 0

    async def follow(self, bus: Bus, watch: StallWatch | None) -> None:
        """Follow until cancelled. Events that are trimmed before they are read are skipped."""
        while True:
            try:
                await self._read_on(bus, watch)
            except LogTrimmedAway as error:
                log.warning("events_not_shown", reason=str(error))

    async def watch_end(self, bus: Bus) -> None:
        """End with the run at once, even if `follow` still reads what happened before this start.

        Home waits only some seconds for the other nodes, and folding the events of a long run takes longer.
        """
        ends = (RunFinished, RunFailed, RunStopped)
        async with bus.read(*ends, from_seq=self._first_seq, buries=False, skips=True) as events:
            async for received in events:
                self._decide(received.message, live=True)

    async def _read_on(self, bus: Bus, watch: StallWatch | None) -> None:
        async with bus.read(from_seq=self._last_seq + 1, buries=True) as events:
            async for received in events:
                self._last_seq = received.seq
                if watch is not None:
                    watch.happened(received.message)
                self._decide(received.message, live=received.seq >= self._first_seq)
                await self._reporting.take(received)

    def _decide(self, event: Message, *, live: bool) -> None:
        match event:
            case BatchTrained(step=step):
                self._advance(step + 1)
            case TrainerStarted(step=step):
                self._advance(step)
            case RunFinished(steps=steps) if live or steps >= self._plan.num_steps:
                self._end(RunEnd(finished=True))  # an earlier start may have finished with a lower num_steps
            case RunFailed(reason=reason) if live:
                self._end(RunEnd(finished=False, error=reason, is_announced=True))
            case ActorStarted(actor=process) if live:
                self._started(process)
            case ActorExited(actor=process, restart_in_s=None) if live and _used_up_its_budget(event):
                self._lost(process, event.reason)
            case RunStopped() if live:
                self._end(RunEnd(finished=False, stopped=event, is_announced=True))
            case _:
                pass

    def _advance(self, steps: int) -> None:
        if steps > self._steps:
            self._steps = steps
            self._progress()


def _used_up_its_budget(exited: ActorExited) -> bool:
    return exited.reason != STOPPED and exited.exit_code not in NO_BUDGET_HELPS


class BeginOfHome(msgspec.Struct, frozen=True, kw_only=True):
    """Where the present start of the home node begins in the log."""

    incarnation: int  # of its daemon
    first_seq: int


async def note_begin_of_home(bus: Bus, incarnation: int, first_seq: int) -> None:
    """Note where this start of the home node begins, for nodes that join later."""
    await bus.kv.put(BEGIN_KEY, BeginOfHome(incarnation=incarnation, first_seq=first_seq))


async def begin_of_home(bus: Bus, home: str) -> int | None:
    """Return the sequence from which events belong to the present start of the home node; None if it is unknown.

    A node that joins after the run was stopped must end with it, but not by the stop of an earlier start.
    """
    entry = await bus.kv.get(BEGIN_KEY, BeginOfHome)
    holder = (await claims(bus)).get(home)
    if entry is None or entry.value is None or holder is None:
        return None
    return entry.value.first_seq if entry.value.incarnation == holder[0].incarnation else None


class Publisher:
    """Publishes process changes as events, and keeps the addresses of ready servers in the KV store."""

    def __init__(
        self, bus: Bus, node: str, *, lifetime_s: int = LIFETIME_S, renew_every_s: float = RENEW_EVERY_S
    ) -> None:
        self._bus = bus
        self._node = node
        self._lifetime_s = lifetime_s
        self._renew_every_s = renew_every_s
        self._addresses: dict[str, Address] = {}  # of ready servers, by key
        self._writing = anyio.Lock()  # a late renewal must not follow the address of a newer server

    async def run(self, changes: AsyncIterable[Change]) -> None:
        """Publish changes until there are no more, and renew the addresses meanwhile."""
        async with in_background(self._renew):
            async for change in changes:
                await self._publish(change)

    async def _publish(self, change: Change) -> None:
        name, key = change.spec.name, change.spec.address_key
        match change:
            case Started():
                event = ActorStarted(actor=name, node=self._node, pid=change.pid, restarts=change.restarts)
                await _insist(self._bus.publish, event)
            case Exited():
                self._addresses.pop(key or "", None)
                exited = ActorExited(
                    actor=name,
                    node=self._node,
                    pid=change.pid,
                    exit_code=change.exit_code,
                    reason=change.reason,
                    restart_in_s=change.restart_in_s,
                )
                await _insist(self._bus.publish, exited)
            case Blocked():
                blocked = EventLoopBlocked(
                    actor=name,
                    node=self._node,
                    pid=change.pid,
                    blocked_s=round(change.blocked_s, 3),
                    ended=change.ended,
                    function=change.culprit.function,
                    place=clipped(change.culprit.place, MAX_PLACE_CHARS),
                    is_ours=change.culprit.is_ours,
                )
                await _insist(self._bus.publish, blocked)
            case Ready(host=str(host), port=int(port)) if key is not None:
                url = f"http://{host_port(host, port)}"
                self._addresses[key] = Address(url=url, agent=self._bus.name, pid=change.pid, start=uuid.uuid4().hex)
                await _insist(self._put, key)
            case _:
                pass

    async def _renew(self) -> None:
        while True:
            await anyio.sleep(self._renew_every_s)
            for key in tuple(self._addresses):
                try:
                    await self._put(key)
                except BusError as error:
                    log.warning("address_not_renewed", key=key, error=str(error))

    async def _put(self, key: str) -> None:
        async with self._writing:
            address = self._addresses.get(key)
            if address is not None:
                await self._bus.kv.put(key, address, ttl_s=self._lifetime_s)


async def forget_addresses(bus: Bus, specs: Iterable[ProcessSpec]) -> None:
    """Delete the addresses of an earlier daemon's servers, which no longer run."""
    for spec in specs:
        if spec.address_key is not None:
            await bus.kv.delete(spec.address_key)


async def _insist(action: Callable[..., Awaitable[object]], *arguments: Any) -> None:
    """Retry an action through any bus outage, until the daemon ends."""
    await retried(lambda: action(*arguments), on=BusError, times=FOR_EVER, failed=_log_failure)


def _log_failure(error: Exception, failures: int) -> None:
    log.warning("publish_failed", error=str(error), in_a_row=failures)
