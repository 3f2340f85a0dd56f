"""The filter actor: judges completed prompt groups."""

import time
from collections import Counter

import anyio
import msgspec
import structlog
from anyio.abc import TaskStatus

from actors.filter.filters import (
    FILTER_KEY,
    MAX_REASON_CHARS,
    GroupSummary,
    Verdict,
    built_in_filter,
    keep_all,
    summary_of,
    trained_samples,
    verdict_of,
    with_contents,
)
from messages.data import PromptStored, SegmentsPublished
from messages.events import GroupCompleted, Outcome, UserFunctionRaised, VerdictGiven
from messages.plain import clipped
from runtime.bus.bus import Bus
from runtime.bus.consumer import Deliveries, Delivery
from runtime.bus.errors import BusError, PayloadLost
from runtime.data.stored_prompts import fetch_prompt
from runtime.functions.child import NotReady, UserFunctionError, UserProcess, UserProcessError
from runtime.functions.load import is_plugin
from runtime.functions.table import FILTER
from runtime.process.actor import Actor, InputError
from runtime.process.first_calls import FirstCalls
from runtime.process.user_tracebacks import UserTracebacks
from runtime.settings.derived import limits_of
from runtime.settings.topology import Topology
from runtime.util.formatting import duration
from runtime.util.stacks import place_of, threads_in

DURABLE = "filter"
ACK_WAIT_S = 5.0  # redelivery delay for the groups that a killed filter held
GIVE_BACK_TIMEOUT_S = 1.0
MAX_ACK_PENDING = 1024  # summed over all filter actors
MAX_CONCURRENT_VERDICTS = 64  # concurrency of built-in filters, so that publishes and acks of several groups overlap
MAX_CALLS = 2  # calls of a user's filter for one group, each of which ends its process, before the group fails
AGAIN_S = 1.0  # redelivery delay of a group that could not be judged
MAX_DELIVERIES = 5  # of a group, whose filter's process does not start

FIRST_VERDICT_KEY = "filter.judged"  # exists once a verdict of this run came in time

log = structlog.get_logger()


class FilterActor(Actor):
    """Keeps or drops completed prompt groups. Stateless.

    A crash before ack only repeats work: of two verdicts on a group, the first in log order wins.
    """

    reads = (GroupCompleted, PromptStored, SegmentsPublished)
    writes = (VerdictGiven, UserFunctionRaised)

    def __init__(self, topology: Topology, bus: Bus, *, timeout_s: float = FILTER.timeout_s) -> None:
        """Find the filter.

        Args:
            topology: the topology, with its recipe.
            bus: the bus.
            timeout_s: maximum seconds of a user's filter for one group.

        Raises:
            ValueError: the filter is unknown.
        """
        self._bus = bus
        self._timeout_s = timeout_s
        self._tracebacks = UserTracebacks(bus)
        self._calls = FirstCalls(bus, FIRST_VERDICT_KEY, "calls of the filter")
        self._name = topology.rollout.dynamic_filter or "none"
        self._keeps_spares = topology.rollout.keep_when_insufficient
        self._fields = topology.rollout.filter_fields
        self._own: UserProcess | None = None  # of a user's filter
        if is_plugin(self._name):
            self._own = UserProcess(FILTER, FILTER_KEY, self._name, limits_of(topology.reward))
        else:
            self._filter = built_in_filter(self._name)
        self._num_tasks = MAX_CONCURRENT_VERDICTS if self._own is None else 1
        self._counts: Counter[Outcome] = Counter()
        self._judging: dict[int, float] = {}  # start time, by group

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Judge groups until cancelled.

        Raises:
            ValueError: a user's filter cannot be used.
        """
        await self._calls.begin()
        try:
            if self._own is not None:
                await self._own.start()
            await self._consume(task_status)
        finally:
            if self._own is not None:
                await self._own.kill()

    async def _consume(self, task_status: TaskStatus[None]) -> None:
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
                verdict = await self._verdict_on(delivery)
                if verdict is not None:
                    await self._bus.publish(_verdict_given(delivery, verdict))
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(GIVE_BACK_TIMEOUT_S, shield=True):
                await delivery.redeliver()  # hands it to another actor at once instead of after the ack wait
            raise
        finally:
            self._judging.pop(group.group_id, None)
        if verdict is None:
            await delivery.redeliver(AGAIN_S)
            return
        await delivery.ack()
        self._counts[verdict.outcome] += 1
        log.debug("group_judged", attempt=group.attempt, outcome=verdict.outcome, reason=verdict.reason)

    async def _verdict_on(self, delivery: Delivery[GroupCompleted]) -> Verdict | None:
        """Judge a group. None: it cannot be judged now, in an outage of the bus or without a process."""
        group = delivery.message
        try:
            verdict = self._built_in(group) if self._own is None else await self._call(self._own, group)
        except TimeoutError:
            return await self._late(group.group_id)
        except UserFunctionError as error:
            await self._tracebacks.publish("rollout.dynamic_filter", error.traceback)
            return _failed(str(error))
        except NotReady as error:
            log.warning("filter_not_ready", error=str(error), num_delivered=delivery.num_delivered)
            return _failed(str(error)) if delivery.num_delivered >= MAX_DELIVERIES else None
        except (PayloadLost, UserProcessError, ValueError) as error:
            return _failed(str(error))
        except BusError as error:
            log.warning("filter_without_data", error=str(error))
            return None
        if self._own is not None:
            await self._calls.succeeded()
        if self._keeps_spares and verdict.outcome is Outcome.DROP:
            return Verdict(outcome=Outcome.SPARE, reason=verdict.reason)
        return verdict

    async def _late(self, group_id: int) -> Verdict:
        """Fail a group whose verdict took too long.

        Raises:
            InputError: so did the first calls of this run; shows where the function stood.
        """
        reason = f"no verdict within {self._timeout_s:g} s"
        stack = "" if self._own is None else self._own.stopped_at
        await self._tracebacks.publish("rollout.dynamic_filter", stack, took_too_long=True)
        if why := await self._calls.failed(group_id):
            frames = threads_in(f"Thread 0x1 {stack}").get(1, [])
            own = next((frame for frame in frames if not (frame.is_ours or frame.is_installed)), None)
            place = "" if own is None else f" ({place_of(own)})"
            raise InputError(f"{why}; {self._name}: {reason}{place}. Correct it; the same command then resumes the run")
        return _failed(reason)

    def _built_in(self, group: GroupCompleted) -> Verdict:
        if self._filter is keep_all:
            return verdict_of(True, self._name)
        return verdict_of(self._filter(summary_of(group)), self._name)

    async def _call(self, own: UserProcess, group: GroupCompleted) -> Verdict:
        """Call a user's filter.

        Raises:
            BusError: data of the group cannot be read.
            ValueError: a sample has no reward.
            TimeoutError: it took too long; its process is killed.
            NotReady: its process does not start.
            UserFunctionError, UserProcessError: it raised, or its process ended, as did the next one.
        """
        payload = msgspec.msgpack.encode(await self._summary(group))
        calls = 0
        while True:
            await own.start()  # again, if an earlier call has cost its process; not a part of the time limit
            try:
                return msgspec.msgpack.decode(await own.call(payload, timeout_s=self._timeout_s), type=Verdict)
            except UserProcessError as error:  # the kernel may have chosen it when memory was short
                calls += 1
                if calls == MAX_CALLS:
                    raise
                log.warning("filter_process_ended", reason=str(error))

    async def _summary(self, group: GroupCompleted) -> GroupSummary:
        stored = await fetch_prompt(self._bus, group.prompt_parts) if group.prompt_parts else None
        summary = summary_of(group if stored is None else msgspec.structs.replace(group, metadata=stored.metadata))
        if not self._fields:
            return summary
        samples = trained_samples(group)
        seqs = {ref.seq for sample in samples for ref in sample.segments}
        payloads = {seq: await self._bus.fetch(SegmentsPublished, seq) for seq in sorted(seqs)}
        segments = [[payloads[ref.seq].segments[ref.position] for ref in sample.segments] for sample in samples]
        first = next(iter(payloads.values()), None)
        prompt, label = ("", None) if first is None else (first.prompt, first.label)
        if stored is not None:
            prompt, label = stored.text, stored.label
        return with_contents(summary, segments, self._fields, prompt=prompt, label=label)


def _failed(reason: str) -> Verdict:
    return Verdict(outcome=Outcome.FAILED, reason=reason[:MAX_REASON_CHARS])


def _verdict_given(delivery: Delivery[GroupCompleted], verdict: Verdict) -> VerdictGiven:
    return VerdictGiven(
        group_id=delivery.message.group_id,
        attempt=delivery.message.attempt,
        event_seq=delivery.seq,  # the verdict applies to this completion only
        outcome=verdict.outcome,
        reason=verdict.reason and clipped(verdict.reason, MAX_REASON_CHARS),
    )
