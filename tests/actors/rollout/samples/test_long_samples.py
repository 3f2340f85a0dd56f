"""Samples that take long: streamed, so that what came is kept when an engine, a weight update or an actor ends them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest

from actors.rollout.samples.task_runner import ACK_WAIT_S
from actors.rollout.sglang.reading import AnswerReader
from messages import (
    EvalRequested,
    GroupCompleted,
    RolloutRequested,
    SampleStatus,
    SampleSummary,
    SamplingParams,
    SegmentsPublished,
    SegmentsSpilled,
    SpillsGiven,
    SpillsRequested,
)
from runtime.bus.addresses import Address, address_key
from runtime.bus.bus import Bus
from runtime.bus.roster import Member, Roster
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import announcement, completed, grade, next_event, rollout_actor, task
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio

LONG = 300  # tokens that a sample may get: enough to be streamed
WHOLE = list(range(1, 11))


def goes_on(prompt: list[int], params: dict[str, Any]) -> list[int]:
    """Ten tokens in all, counted from the prompt [7, 8] on."""
    return WHOLE[len(prompt) - 2 :]


def long_task(group_id: int, num_samples: int = 1) -> RolloutRequested:
    sampling = SamplingParams(max_new_tokens=LONG)
    return msgspec.structs.replace(task(group_id), sampling=sampling, num_samples=num_samples)


def long_engine(**knobs: Any) -> ScriptedEngine:
    return ScriptedEngine(script=goes_on, hold=True, **knobs)


async def tokens_of(bus: Bus, sample: SampleSummary) -> list[list[int]]:
    """Of each segment."""
    messages = [(await bus.fetch(SegmentsPublished, ref.seq), ref.position) for ref in sample.segments]
    return [message.segments[position].response_ids.tolist() for message, position in messages]


def chunks_seen(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The chunks that have come, as they come."""
    came, add = list[bytes](), AnswerReader.add_chunk

    def add_and_tell(reader: AnswerReader, data: bytes) -> None:
        add(reader, data)
        came.append(data)

    monkeypatch.setattr(AnswerReader, "add_chunk", add_and_tell)
    return came


@pytest.mark.parametrize("incremental", [False, True])
async def test_a_request_that_died_with_its_engine_goes_on_from_the_streamed_tokens(
    bus: Bus, router_url: str, monkeypatch: pytest.MonkeyPatch, incremental: bool
) -> None:
    came = chunks_seen(monkeypatch)
    first = long_engine(incremental=incremental)
    async with anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with serving(ScriptedEngine(script=goes_on)) as second:
            async with serving(first), rollout_actor(bus, router_url, [first], topology_with()):
                await bus.publish(announcement(1))
                await bus.publish(long_task(0))
                await eventually(lambda: len(came) == 2)
                first.break_connections()
                await bus.kv.put(address_key("engine", "policy", 0), Address(url=second.url))
                event = await completed(bus)
        group.cancel_scope.cancel()
    assert [request["input_ids"] for request in second.requests] == [[7, 8, 1, 2, 3, 4]]
    assert await tokens_of(bus, event.samples[0]) == [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]
    assert (event.samples[0].response_len, event.attempt) == (10, 0)


async def test_only_long_training_requests_of_one_sample_are_streamed(bus: Bus, router_url: str) -> None:
    request = EvalRequested(
        step=0,
        set="s",
        item=0,
        version=1,
        prompt=task(0).prompt,
        num_samples=1,
        sampling=SamplingParams(max_new_tokens=LONG),
    )
    pool = {"policy": {"kind": "tiny", "concurrency": 8, "batch_requests": True}}
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology_with(engines=pool)):
            await bus.publish(announcement(1))
            for message in (task(0), request, long_task(1, num_samples=2)):
                await bus.publish(message)
            await engine.wait_for_requests(3)
            assert [body.get("stream", False) for body in engine.requests] == [False, False, False]
            await bus.publish(long_task(2))
            await engine.wait_for_requests(4)
            assert engine.requests[3]["stream"]
        group.cancel_scope.cancel()


async def test_interrupted_for_new_weights_the_same_attempt_goes_on_from_its_tokens(bus: Bus, router_url: str) -> None:
    topology = topology_with(rollout={"on_weight_update": "abort", "max_staleness": 1})
    async with serving(long_engine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            await bus.publish(long_task(0, num_samples=2))
            await engine.wait_for_streams(2)
            engine.update_at = anyio.Event()
            await bus.publish(announcement(2))
            await engine.wait_for_requests(4)
            engine.update_at.set()
            await eventually(lambda: engine.held == 2)
            engine.release()
            event = await completed(bus)
        group.cancel_scope.cancel()
    assert (event.attempt, len(event.samples)) == (0, 2)
    for sample in event.samples:
        assert await tokens_of(bus, sample) == [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]
        assert (sample.first_version, sample.last_version, sample.status) == (1, 2, SampleStatus.COMPLETED)
    assert [body["input_ids"] for body in engine.requests[2:]] == [[7, 8, 1, 2, 3, 4]] * 2


async def test_a_batched_group_that_is_interrupted_goes_on_sample_by_sample(bus: Bus, router_url: str) -> None:
    pool = {"policy": {"kind": "tiny", "concurrency": 8, "batch_requests": True}}
    topology = topology_with(engines=pool, rollout={"on_weight_update": "abort", "max_staleness": 1})
    async with serving(ScriptedEngine(script=goes_on, hold=True)) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            await bus.publish(long_task(0, num_samples=2))
            await engine.wait_for_requests(1)
            await bus.publish(announcement(2))
            await engine.wait_for_requests(3)
            engine.release()
            event = await completed(bus)
        group.cancel_scope.cancel()
    for sample in event.samples:
        assert await tokens_of(bus, sample) == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]


async def test_what_a_long_sample_has_is_stored_and_told_of_while_it_goes_on(bus: Bus, router_url: str) -> None:
    topology = topology_with(rollout={"spill_every_s": 0.1})
    async with serving(long_engine(stream_every=4)) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            await bus.publish(long_task(0))
            spilled, seq = await next_event(bus, SegmentsSpilled)
            assert isinstance(spilled, SegmentsSpilled)
            await anyio.sleep(0.3)
            async with bus.read(SegmentsSpilled, from_seq=seq + 1) as events:
                assert not events.pending  # nothing new, nothing said
            engine.release()
            event = await completed(bus)
        group.cancel_scope.cancel()
    (sample,) = spilled.samples
    assert (spilled.group_id, spilled.attempt, spilled.lease) == (0, 0, event.lease)
    assert (sample.status, sample.response_len) == (SampleStatus.ABORTED, 4)
    assert await tokens_of(bus, sample) == [[1, 2, 3, 4]]
    assert event.samples[0].segments[:1] == sample.segments
    assert await tokens_of(bus, event.samples[0]) == [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]
    assert len(engine.requests) == 1  # it went on


async def test_a_finished_member_of_a_long_group_is_told_of_with_its_reward(bus: Bus, router_url: str) -> None:
    engine = long_engine()
    topology = topology_with(rollout={"spill_every_s": 0.1})
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            await bus.publish(long_task(0, num_samples=2))
            await engine.wait_for_streams(2)
            engine.release_one()
            async with bus.read(SegmentsSpilled) as events:
                while True:
                    received = await events.next(10)
                    assert received is not None
                    if 1.0 in [sample.reward for sample in received.message.samples]:
                        break
            engine.release()
            await completed(bus)
        group.cancel_scope.cancel()
    finished = [sample for sample in received.message.samples if sample.status is SampleStatus.COMPLETED]
    assert [sample.response_len for sample in finished] == [10]


@asynccontextmanager
async def buffer_that_was_told(bus: Bus, spilled: list[SegmentsSpilled]) -> AsyncGenerator[list[SpillsRequested]]:
    """What the buffer does: it answers what was spilled of an attempt. Yields what it was asked."""
    asked: list[SpillsRequested] = []

    async def give(request: SpillsRequested) -> SpillsGiven:
        asked.append(request)
        samples = spilled[-1].samples if spilled else ()
        return SpillsGiven(group_id=request.group_id, attempt=request.attempt, samples=samples)

    member = Member(instance="buffer.0", incarnation=1, node="local")
    await Roster(bus).join("buffer", member)
    async with bus.serve({SpillsRequested: give}, instance="buffer.0"):
        yield asked


async def test_an_actor_that_ends_gives_its_tasks_back_at_once_and_the_next_goes_on_from_what_was_spilled(
    bus: Bus, router_url: str
) -> None:
    topology, spilled = topology_with(rollout={"spill_every_s": 0.1}), list[SegmentsSpilled]()
    first, second = long_engine(stream_every=4), ScriptedEngine(script=goes_on)
    async with (
        serving(first),
        serving(second),
        buffer_that_was_told(bus, spilled) as asked,
        anyio.create_task_group() as group,
    ):
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [first], topology):
            await bus.publish(announcement(1))
            await bus.publish(long_task(0))
            event, _ = await next_event(bus, SegmentsSpilled)
            assert isinstance(event, SegmentsSpilled)
            spilled.append(event)
        with anyio.fail_after(ACK_WAIT_S - 1):  # before the ack wait
            async with rollout_actor(bus, router_url, [second], topology):
                done = await completed(bus)
        group.cancel_scope.cancel()
    assert [(request.group_id, request.attempt) for request in asked] == [(0, 0)]
    assert second.requests[0]["input_ids"] == [7, 8, 1, 2, 3, 4]
    assert await tokens_of(bus, done.samples[0]) == [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]


async def test_without_an_answer_of_the_buffer_a_task_that_comes_again_begins_anew(bus: Bus, router_url: str) -> None:
    first, second = long_engine(), ScriptedEngine(script=goes_on)
    async with serving(first), serving(second), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [first], topology_with()):
            await bus.publish(announcement(1))
            await bus.publish(long_task(0))
            await first.wait_for_streams(1)
        async with rollout_actor(bus, router_url, [second], topology_with()):
            event, _ = await next_event(bus, GroupCompleted)
        group.cancel_scope.cancel()
    assert isinstance(event, GroupCompleted)
    assert second.requests[0]["input_ids"] == [7, 8]


async def test_a_streamed_answer_of_older_weights_is_thrown_away_and_asked_for_again(bus: Bus, router_url: str) -> None:
    engine, labels = ScriptedEngine(), list[str]()

    def script(prompt: list[int], params: dict[str, Any]) -> list[int]:
        engine.version = labels[len(engine.requests) - 1]
        return WHOLE

    engine.script = script
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology_with()):
            for version in (1, 2):
                await bus.publish(announcement(version))
                await eventually(lambda version=version: engine.held == version)
                labels.append(engine.version)
            await bus.publish(msgspec.structs.replace(long_task(0), min_version=2))
            event = await completed(bus)
        group.cancel_scope.cancel()
    (sample,) = event.samples
    assert (sample.status, await tokens_of(bus, sample)) == (SampleStatus.COMPLETED, [WHOLE])
    assert (sample.first_version, len(engine.requests)) == (2, 2)


async def test_a_stream_that_breaks_behind_its_last_token_is_whole(
    bus: Bus, router_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    came, break_at = chunks_seen(monkeypatch), asyncio.Event()
    engine = ScriptedEngine(script=lambda prompt, params: WHOLE, break_at=break_at)
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology_with()):
            await bus.publish(announcement(1))
            await bus.publish(long_task(0))
            await eventually(lambda: len(came) == 3)  # so that nothing but the end is missing
            break_at.set()
            event = await completed(bus)
        group.cancel_scope.cancel()
    (sample,) = event.samples
    assert (sample.status, await tokens_of(bus, sample)) == (SampleStatus.COMPLETED, [WHOLE])
    assert (len(engine.requests), len(came)) == (1, 3)
