"""The filter actor: judges completed prompt groups."""

import inspect
import time
from collections import Counter
from functools import partial

import anyio
import msgspec
import structlog
from anyio.abc import TaskStatus

from actors.filter.filters import BUILT_IN_FILTERS, Filter, Verdict, find_filter, keep_all, summary_of, verdict_of
from messages.data import PromptStored
from messages.events import GroupCompleted, Outcome, VerdictGiven
from messages.plain import clipped
from runtime.bus.bus import Bus
from runtime.bus.consumer import Deliveries, Delivery
from runtime.data.stored_prompts import fetch_prompt
from runtime.process.actor import Actor
from runtime.settings.topology import Topology
from runtime.util.formatting import duration
from runtime.util.threads import BoundedThreads

DURABLE = "filter"
ACK_WAIT_S = 5.0  # redelivery delay for the groups that a killed filter held
GIVE_BACK_TIMEOUT_S = 1.0
MAX_ACK_PENDING = 1024  # summed over all filter actors
MAX_CONCURRENT_VERDICTS = 64  # concurrency of built-in filters, so that publishes and acks of several groups overlap
FILTER_TIMEOUT_S = 10.0
MAX_REASON_CHARS = 500

log = structlog.get_logger()


class FilterActor(Actor):
    """Keeps or drops completed prompt groups. Stateless.

    A crash before ack only repeats work: of two verdicts on a group, the first in log order wins.
    """

    reads = (GroupCompleted, PromptStored)
    writes = (VerdictGiven,)

    def __init__(self, topology: Topology, bus: Bus, *, timeout_s: float = FILTER_TIMEOUT_S) -> None:
        """Find the filter.

        Args:
            topology: the topology, with its recipe.
            bus: the bus.
            timeout_s: maximum seconds of a user's filter for one group.

        Raises:
            ValueError: the filter is unknown.
            PluginError: a user's filter cannot be used.
        """
        self._bus = bus
        self._timeout_s = timeout_s
        self._name = topology.rollout.dynamic_filter or "none"
        self._keeps_spares = topology.rollout.keep_when_insufficient
        self._filter = find_filter(self._name)
        self._num_tasks = MAX_CONCURRENT_VERDICTS if self._name in BUILT_IN_FILTERS else 1
        self._threads = BoundedThreads(2)  # a filter that hangs occupies a thread
        self._counts: Counter[Outcome] = Counter()
        self._judging: dict[int, float] = {}  # start time, by group

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Judge groups until cancelled."""
        async with (
            self._bus.consume(
                GroupCompleted,
                durable=DURABLE,
                ack_wait_s=ACK_WAIT_S,
                max_ack_pending=MAX_ACK_PENDING,
                prefetch_by_rate=True,
            ) as deliveries,
            anyio.create_task_group() as tasks,
        ):
            for _ in range(self._num_tasks):
                tasks.start_soon(self._judge_all, deliveries)
            task_status.started()

    def stats(self) -> dict[str, float]:
        """Count verdicts since the start, by outcome."""
        return {f"num_{outcome}": float(self._counts[outcome]) for outcome in Outcome}

    def waits_for(self) -> str:
        if not self._judging:
            return "completed groups"
        group_id, began = min(self._judging.items(), key=lambda item: item[1])
        return f"the filter {self._name}, judging group {group_id} for {duration(time.monotonic() - began)}"

    async def _judge_all(self, deliveries: Deliveries[GroupCompleted]) -> None:
        async for delivery in deliveries:
            with structlog.contextvars.bound_contextvars(group_id=delivery.message.group_id):
                await self._judge(delivery)

    async def _judge(self, delivery: Delivery[GroupCompleted]) -> None:
        group = delivery.message
        self._judging[group.group_id] = time.monotonic()
        try:
            async with delivery.heartbeat():
                verdict = await self._verdict_on(group)
                await self._bus.publish(_verdict_given(delivery, verdict))
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(GIVE_BACK_TIMEOUT_S, shield=True):
                await delivery.redeliver()  # hands it to another actor at once instead of after the ack wait
            raise
        finally:
            self._judging.pop(group.group_id, None)
        await delivery.ack()
        self._counts[verdict.outcome] += 1
        log.debug("group_judged", attempt=group.attempt, outcome=verdict.outcome, reason=verdict.reason)

    async def _verdict_on(self, group: GroupCompleted) -> Verdict:
        try:
            with anyio.fail_after(self._timeout_s):
                if group.prompt_parts and self._name not in BUILT_IN_FILTERS:  # built-in filters do not read metadata
                    metadata = (await fetch_prompt(self._bus, group.prompt_parts)).metadata
                    group = msgspec.structs.replace(group, metadata=metadata)
                verdict = await _call_filter(self._filter, self._name, group, self._threads)
        except Exception as error:  # noqa: BLE001 - a user's filter may raise anything; the group fails, the run continues
            reason = f"no verdict within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else repr(error)
            return Verdict(outcome=Outcome.FAILED, reason=reason[:MAX_REASON_CHARS])
        if self._keeps_spares and verdict.outcome is Outcome.DROP:
            return Verdict(outcome=Outcome.SPARE, reason=verdict.reason)
        return verdict


def _verdict_given(delivery: Delivery[GroupCompleted], verdict: Verdict) -> VerdictGiven:
    return VerdictGiven(
        group_id=delivery.message.group_id,
        attempt=delivery.message.attempt,
        event_seq=delivery.seq,  # the verdict applies to this completion only
        outcome=verdict.outcome,
        reason=verdict.reason and clipped(verdict.reason, MAX_REASON_CHARS),
    )


async def _call_filter(filter_: Filter, name: str, group: GroupCompleted, threads: BoundedThreads) -> Verdict:
    if filter_ is keep_all:
        return verdict_of(True, name)
    summary = summary_of(group)
    if name in BUILT_IN_FILTERS:
        return verdict_of(filter_(summary), name)
    answer = await threads.run(partial(filter_, summary))
    return verdict_of(await answer if inspect.isawaitable(answer) else answer, name)
