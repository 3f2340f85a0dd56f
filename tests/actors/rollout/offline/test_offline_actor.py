"""Tasks answered without engines: demonstrations on a real bus, and what a source may do wrong."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from actors.registry import hosted
from actors.rollout.offline.actor import AnswerSource, OfflineRolloutActor, OfflineSample
from actors.rollout.offline.demonstrations import Demonstrations
from messages import (
    GroupCompleted,
    GroupFailed,
    Int32Array,
    Prompt,
    RolloutRequested,
    SampleStatus,
    SamplingParams,
    SegmentsPublished,
    UInt8Array,
)
from runtime.bus.bus import Bus
from runtime.process.hosting import Hosted, host
from tests.build.topology import topology_with
from tests.support.rollout import next_event

pytestmark = pytest.mark.anyio

DEMONSTRATION: dict[str, Any] = {
    "response_ids": Int32Array([5, 6, 9, 5]),
    "loss_mask": UInt8Array([1, 1, 0, 1]),
    "response": "56 5",
}


def task(group_id: int, *, round: int = 0, **demonstration: Any) -> RolloutRequested:
    prompt = Prompt(data="d", row=3, text="p", prompt_ids=Int32Array([7, 8]), metadata={"k": 1}, **demonstration)
    return RolloutRequested(
        group_id=group_id,
        attempt=2,
        round=round,
        min_version=4,
        prompt=prompt,
        num_samples=1,
        sampling=SamplingParams(max_new_tokens=8),
    )


@asynccontextmanager
async def answering(bus: Bus, source: AnswerSource | None = None) -> AsyncGenerator[None]:
    """The actor as a topology of demonstrations has it, or on another source."""

    def build(view: Bus) -> OfflineRolloutActor:
        return OfflineRolloutActor(view, source or Demonstrations())

    topology = topology_with(algorithm={"loss": {"type": "sft"}})
    chosen = hosted("rollout", topology, Path())
    if source is not None:
        chosen = Hosted(name="rollout", role="rollout", actor_type=OfflineRolloutActor, build=build)
    async with anyio.create_task_group() as group:
        group.start_soon(host, bus, [chosen])
        yield
        group.cancel_scope.cancel()


async def test_a_demonstration_completes_its_group_and_is_stored_as_it_is(bus: Bus) -> None:
    async with answering(bus):
        await bus.publish(task(1, **DEMONSTRATION))
        event, _ = await next_event(bus, GroupCompleted)
    assert isinstance(event, GroupCompleted)
    assert (event.group_id, event.attempt, event.round, event.data, event.metadata) == (1, 2, 0, "d", {"k": 1})
    (sample,) = event.samples
    assert (sample.status, sample.reward) == (SampleStatus.COMPLETED, 0.0)
    assert (sample.prompt_len, sample.response_len, sample.first_version, sample.last_version) == (2, 4, 4, 4)
    (ref,) = sample.segments
    stored = await bus.fetch(SegmentsPublished, ref.seq)
    segment = stored.segments[ref.position]
    assert (segment.sample.group_id, segment.sample.attempt, segment.sample.index) == (1, 2, 0)
    assert segment.prompt_ids.tolist() == [7, 8]
    assert segment.response_ids.tolist() == [5, 6, 9, 5]
    assert segment.loss_mask.tolist() == [1, 1, 0, 1]
    assert segment.rollout_log_probs.tolist() == [0.0] * 4
    assert (stored.prompt, segment.text) == ("p", "56 5")


async def test_a_prompt_without_a_demonstration_fails_its_group_and_the_next_is_answered(bus: Bus) -> None:
    async with answering(bus):
        await bus.publish(task(1))
        failed, seq = await next_event(bus, GroupFailed)
        await bus.publish(task(2, **DEMONSTRATION))
        event, _ = await next_event(bus, GroupCompleted, from_seq=seq)
    assert isinstance(failed, GroupFailed)
    assert (failed.group_id, failed.reason) == (1, "row 3 of d has no demonstration")
    assert isinstance(event, GroupCompleted)
    assert event.group_id == 2


class Large:
    """Two samples, each of which fills most of a message."""

    def answer(self, task: RolloutRequested) -> Sequence[OfflineSample]:
        (sample,) = Demonstrations().answer(task)
        (segment,) = sample.segments
        large = msgspec.structs.replace(segment, text="x" * 5_000_000)
        summaries = [msgspec.structs.replace(sample.summary, index=index) for index in (0, 1)]
        return [OfflineSample((segment, large), summary) for summary in summaries]

    def prompt(self, task: RolloutRequested) -> Prompt:
        return task.prompt


async def test_what_was_stored_in_several_messages_can_be_answered_again(bus: Bus) -> None:
    async with answering(bus, Large()):
        await bus.publish(task(1, **DEMONSTRATION))
        event, _ = await next_event(bus, GroupCompleted)
    assert isinstance(event, GroupCompleted)
    assert [sample.index for sample in event.samples] == [0, 1]
    for sample in event.samples:
        stored = [(await bus.fetch(SegmentsPublished, ref.seq)).segments[ref.position] for ref in sample.segments]
        assert [len(segment.text) for segment in stored] == [4, 5_000_000]


class Interrupted:
    """Cannot be read at the first call."""

    def __init__(self) -> None:
        self.calls = 0

    def answer(self, task: RolloutRequested) -> Sequence[OfflineSample]:
        self.calls += 1
        if self.calls == 1:
            raise OSError("the disk is away")
        return Demonstrations().answer(task)

    def prompt(self, task: RolloutRequested) -> Prompt:
        return task.prompt


@pytest.mark.slow
async def test_a_task_whose_actor_ended_is_answered_by_the_next_one(bus: Bus) -> None:
    source = Interrupted()
    await bus.publish(task(1, **DEMONSTRATION))
    with pytest.raises(ExceptionGroup):
        async with answering(bus, source):
            await anyio.sleep(20)
    async with answering(bus, source):
        event, _ = await next_event(bus, GroupCompleted)
    assert isinstance(event, GroupCompleted)
    assert source.calls == 2


async def test_many_tasks_are_answered_once_each(bus: Bus) -> None:
    async with answering(bus):
        for group_id in range(100):
            await bus.publish(task(group_id, **DEMONSTRATION))
        found: list[int] = []
        async with bus.read(GroupCompleted) as events:
            while len(found) < 100:
                received = await events.next(15)
                assert received is not None
                found.append(received.message.group_id)
    assert sorted(found) == list(range(100))
