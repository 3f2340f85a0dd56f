"""The offline rollout actor: answers tasks with existing samples, from a source of demonstrations or of a dump."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import anyio
import msgspec
import structlog
from anyio import to_thread
from anyio.abc import TaskStatus

from actors.rollout.samples.endings import Endings
from actors.rollout.samples.partial import label_of, store, text_of
from messages import (
    ColumnPublished,
    GroupCompleted,
    GroupFailed,
    PackedArray,
    Prompt,
    PromptStored,
    RolloutRequested,
    SampleKey,
    SampleSummary,
    Segment,
    SegmentRef,
    SegmentsPublished,
)
from runtime.bus.bus import Bus
from runtime.bus.consumer import Deliveries, Delivery
from runtime.bus.errors import MessageRefused, PayloadLost
from runtime.data.dumps import columns_of_dump
from runtime.data.stored_prompts import with_prompt
from runtime.process.actor import Actor

log = structlog.get_logger()

ACK_WAIT_S = 5.0  # tasks of a crashed actor are redelivered after this time
DURABLE = "rollout-policy"  # the same durable consumer as the rollout actor with engines
ANSWERED_AT_ONCE = 16


@dataclass(frozen=True)
class OfflineSample:
    """An existing sample: its segments in order, and its summary for the event."""

    segments: tuple[Segment, ...]  # carry the task's sample key (group_id, attempt, index, part)
    summary: SampleSummary  # its `segments` and `columns` are filled in when they are stored
    columns: Mapping[str, PackedArray] = field(default_factory=dict[str, PackedArray])  # by name, as in a dump


class AnswerSource(Protocol):
    """A source of samples for tasks."""

    def answer(self, task: RolloutRequested) -> Sequence[OfflineSample]:
        """Return the scored samples of a task's group.

        Runs on a thread, one call at a time. The same task always gets the same samples.

        Raises:
            ValueError: there are none; the message is the reason. The group fails with that reason.
            OSError: they are temporarily unreadable; the actor exits and is restarted.
        """
        ...

    def prompt(self, task: RolloutRequested) -> Prompt:
        """Return the prompt that the samples answer: the task's or another one.

        Called after `answer`; raises the same errors.
        """
        ...


class OfflineRolloutActor(Actor):
    """Answers prompt groups from a source instead of engines. Stateless.

    A crash loses nothing: unacked tasks are redelivered after the ack wait and get the same answer. Tasks of a halted
    round are answered too, since that costs no engine time. Their groups then wait for the next batch.
    """

    reads = (RolloutRequested, PromptStored)
    writes = (SegmentsPublished, ColumnPublished, GroupCompleted, GroupFailed)

    def __init__(self, bus: Bus, source: AnswerSource) -> None:
        self._bus = bus
        self._source = source
        self._one_call = anyio.CapacityLimiter(1)
        self._num_groups = 0

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Answer tasks until cancelled."""
        async with (
            self._bus.consume(
                RolloutRequested, durable=DURABLE, ack_wait_s=ACK_WAIT_S, prefetch=ANSWERED_AT_ONCE
            ) as deliveries,
            anyio.create_task_group() as group,
        ):
            for _ in range(ANSWERED_AT_ONCE):
                group.start_soon(self._answer_all, deliveries)
            task_status.started()

    def stats(self) -> dict[str, float]:
        """Counters since the start."""
        return {"groups": float(self._num_groups)}

    async def _answer_all(self, deliveries: Deliveries[RolloutRequested]) -> None:
        async for delivery in deliveries:
            task = delivery.message
            with structlog.contextvars.bound_contextvars(group_id=task.group_id, attempt=task.attempt):
                async with delivery.heartbeat():
                    await self._answer(delivery)
                await delivery.ack()
            self._num_groups += 1

    async def _answer(self, delivery: Delivery[RolloutRequested]) -> None:
        started = time.monotonic()
        endings = Endings(delivery.message, uuid.uuid4().hex, self._bus.name)
        try:
            task = await with_prompt(self._bus, delivery.message)
            samples, prompt = await to_thread.run_sync(self._ask, task, limiter=self._one_call)
            summaries = await self._store(task, endings.lease, samples, prompt)
            ending = endings.completed(summaries, prompt, rollout_time_s=time.monotonic() - started)
        except (ValueError, MessageRefused, PayloadLost) as error:  # permanent: a redelivery would fail in the same way
            log.warning("group_failed", reason=str(error))
            ending = endings.failed(str(error))
        await endings.publish(self._bus, ending)

    def _ask(self, task: RolloutRequested) -> tuple[Sequence[OfflineSample], Prompt]:
        return self._source.answer(task), self._source.prompt(task)

    async def _store(
        self, task: RolloutRequested, lease: str, samples: Sequence[OfflineSample], prompt: Prompt
    ) -> tuple[SampleSummary, ...]:
        """Publish all segments of a group; return the summaries that refer to them."""
        segments = [segment for sample in samples for segment in sample.segments]
        refs: Sequence[SegmentRef] = ()
        if segments:
            message = SegmentsPublished(
                group_id=task.group_id,
                attempt=task.attempt,
                lease=lease,
                segments=tuple(segments),
                prompt=text_of(prompt),
                label=label_of(prompt),
            )
            refs = await store(self._bus, message)
        left = iter(refs)
        return tuple(
            [
                msgspec.structs.replace(
                    sample.summary,
                    segments=tuple(islice(left, len(sample.segments))),
                    columns=await self._store_columns(task, sample),
                )
                for sample in samples
            ]
        )

    async def _store_columns(self, task: RolloutRequested, sample: OfflineSample) -> dict[str, int]:
        """Publish the columns of a sample; return the sequences of their messages by name."""
        one = sample.summary
        key = SampleKey(group_id=task.group_id, attempt=task.attempt, index=one.index, part=one.part)
        return {
            name: await self._bus.publish(ColumnPublished(sample=key, column=name, **values))
            for name, values in columns_of_dump(sample.columns).items()
        }
