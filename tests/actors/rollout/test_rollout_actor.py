"""A rollout actor between the real bus, the real router and a scripted engine."""

from typing import Any

import anyio
import msgspec
import pytest
from aiohttp import web

from actors.filter.filters import summary_of
from actors.rollout.samples.task_runner import ACK_WAIT_S
from actors.trainer.data.assembly import trainable
from messages import (
    BatchTrained,
    EvalCompleted,
    EvalEnded,
    EvalRequested,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    Int32Array,
    Prompt,
    RolloutRequested,
    RoundHalted,
    SampleStatus,
    SamplingParams,
    Score,
    ScoreRequested,
    ScoresGiven,
    SegmentsPublished,
    StatsGiven,
    StatsRequested,
    WeightsAnnounced,
    WeightsApplied,
)
from messages.subjects import filter_of
from runtime.bus.addresses import Address, address_key
from runtime.bus.bus import Bus
from runtime.settings.topology import Topology
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import PROBE, announcement, completed, grade, next_event, rollout_actor, task
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio


async def test_a_group_is_generated_stored_scored_and_completed(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus, 0.5)
        async with rollout_actor(bus, router_url, [engine], topology_with()):
            await bus.publish(announcement(1))
            await bus.publish(task(3))
            event = await completed(bus)
        group.cancel_scope.cancel()
    assert (event.group_id, event.attempt, len(event.samples)) == (3, 0, 2)
    for sample in event.samples:
        assert (sample.status, sample.reward, sample.response_len) == (SampleStatus.COMPLETED, 0.5, 4)
        assert (sample.first_version, sample.last_version) == (1, 1)
        (ref,) = sample.segments
        segment = (await bus.fetch(SegmentsPublished, ref.seq)).segments[ref.position]
        assert segment.sample.index == sample.index
        assert segment.prompt_ids.tolist() == [7, 8]
        assert segment.response_ids.tolist() == [1, 2, 3, 4]


async def test_a_greedy_sample_is_scored_and_kept_apart(bus: Bus, router_url: str) -> None:
    topology = topology_with(algorithm={"estimator": {"type": "remax"}})
    sampling = SamplingParams(max_new_tokens=8, temperature=0.7, top_p=0.9)
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus, 0.5)
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            await bus.publish(msgspec.structs.replace(task(3), baseline=True, sampling=sampling))
            event = await completed(bus)
        group.cancel_scope.cancel()
    assert [sample.index for sample in event.samples] == [0, 1]
    assert event.baseline is not None
    assert (event.baseline.index, event.baseline.reward, event.baseline.response_len) == (2, 0.5, 4)
    asked = sorted((params["temperature"], params["top_p"]) for params in map(_sampling, engine.requests))
    assert asked == [(0.0, 1.0), (0.7, 0.9), (0.7, 0.9)]


def _sampling(request: dict[str, Any]) -> dict[str, Any]:
    return request["sampling_params"]


async def test_nothing_is_asked_of_an_engine_before_it_confirmed_the_weights(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology_with()):
            await bus.publish(task(0))
            await bus.publish(announcement(1))
            await completed(bus)
            applied, _ = await next_event(bus, WeightsApplied)
        group.cancel_scope.cancel()
    assert isinstance(applied, WeightsApplied)
    assert (applied.version, applied.num_engines) == (1, 1)
    assert engine.updates == ["/weights/v1"]
    assert engine.held == 1


async def test_weights_are_applied_though_the_last_announcement_is_unreadable(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine()) as engine:
        await bus.publish(announcement(1))
        await bus._store.put(filter_of(bus.run, WeightsAnnounced), b"{", {})
        async with rollout_actor(bus, router_url, [engine], topology_with()):
            await next_event(bus, WeightsApplied)
    assert engine.updates == ["/weights/v1"]


async def test_an_engine_with_other_weights_than_announced_gets_no_work(bus: Bus, router_url: str) -> None:
    wrong = ScriptedEngine(prompt_log_prob=-0.6)
    async with serving(wrong), serving(ScriptedEngine()) as right, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [wrong, right], topology_with()):
            await bus.publish(announcement(1, probe=PROBE))
            applied, _ = await next_event(bus, WeightsApplied)
            assert isinstance(applied, WeightsApplied)
            for group_id in range(4):
                await bus.publish(task(group_id))
            async with bus.read(GroupCompleted) as events:
                versions = [(await events.next(15)) for _ in range(4)]
        group.cancel_scope.cancel()
    assert all(event is not None and event.message.samples[0].first_version == 1 for event in versions)
    assert right.requests
    assert wrong.probes
    assert not wrong.requests


@pytest.mark.parametrize("batch_requests", [False, True])
async def test_a_halt_gives_the_group_back_with_its_tokens_and_resume_continues_from_them(
    bus: Bus, router_url: str, batch_requests: bool
) -> None:
    engine = ScriptedEngine(hold=True)
    pool = {"policy": {"kind": "tiny", "concurrency": 8, "batch_requests": batch_requests}}
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology_with(engines=pool)):
            await bus.publish(announcement(1))
            await bus.publish(task(0))
            await engine.wait_for_requests(1 if batch_requests else 2)
            await bus.publish(RoundHalted(incarnation=1, round=0))
            aborted, _ = await next_event(bus, GroupAborted)
            assert isinstance(aborted, GroupAborted)
            assert [(s.status, s.response_len) for s in aborted.samples] == [(SampleStatus.ABORTED, 2)] * 2
            engine.hold = False
            await bus.publish(task(0, attempt=1, round=1, carried=aborted.samples))
            event = await completed(bus)
        group.cancel_scope.cancel()
    resumed = engine.requests[-1]
    assert resumed["input_ids"] == [7, 8, 1, 2]
    assert resumed["sampling_params"]["max_new_tokens"] == 6
    assert event.attempt == 1
    for sample in event.samples:
        assert (len(sample.segments), sample.response_len, sample.reward) == (2, 6, 1.0)
    second = await bus.fetch(SegmentsPublished, event.samples[0].segments[1].seq)
    assert second.segments[0].prompt_ids.tolist() == []  # nothing new: it goes on


async def test_a_task_without_a_free_slot_is_left_to_others(bus: Bus, router_url: str) -> None:
    engine = ScriptedEngine(hold=True)
    pool = {"policy": {"kind": "tiny", "concurrency": 4}}  # two groups of two samples
    async with serving(engine), rollout_actor(bus, router_url, [engine], topology_with(engines=pool)):
        await bus.publish(announcement(1))
        for group_id in range(3):
            await bus.publish(task(group_id))
        await engine.wait_for_requests(4)
        async with bus.consume(
            RolloutRequested, durable="rollout-policy", ack_wait_s=ACK_WAIT_S, max_ack_pending=4
        ) as another:
            delivery = await another.next(ACK_WAIT_S / 2)
        assert delivery is not None
        assert (delivery.message.group_id, delivery.num_delivered) == (2, 1)


async def test_a_task_of_a_halted_round_is_given_back_untouched(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine()) as engine, rollout_actor(bus, router_url, [engine], topology_with()):
        await bus.publish(announcement(1))
        await bus.publish(RoundHalted(incarnation=1, round=4))
        await next_event(bus, WeightsApplied)
        await bus.publish(task(0, round=4))
        aborted, _ = await next_event(bus, GroupAborted)
    assert isinstance(aborted, GroupAborted)
    assert not engine.requests


async def test_a_finished_member_is_not_generated_again_only_scored(bus: Bus, router_url: str) -> None:
    engine = ScriptedEngine()
    async with serving(engine), anyio.create_task_group() as group:
        async with rollout_actor(bus, router_url, [engine], topology_with()):
            await bus.publish(announcement(1))
            await bus.publish(task(0))
            await engine.wait_for_requests(2)
            await _until_asked(bus)  # generated; nobody grades
            await bus.publish(RoundHalted(incarnation=1, round=0))
            aborted, _ = await next_event(bus, GroupAborted)
            assert isinstance(aborted, GroupAborted)
            assert [sample.status for sample in aborted.samples] == [SampleStatus.COMPLETED] * 2
            group.start_soon(grade, bus, 0.25)
            await bus.publish(task(0, attempt=1, round=1, carried=aborted.samples))
            event = await completed(bus)
        group.cancel_scope.cancel()
    assert len(engine.requests) == 2
    assert [sample.reward for sample in event.samples] == [0.25, 0.25]


async def _until_asked(bus: Bus) -> None:
    async with bus.consume(ScoreRequested, durable="reward") as deliveries:
        items = 0
        while items < 2:
            delivery = await deliveries.next(10)
            assert delivery is not None
            items += len(delivery.message.items)
            await delivery.ack()


async def test_a_request_that_the_engine_refuses_fails_its_group(bus: Bus, router_url: str) -> None:
    def refuse(prompt: list[int], params: dict[str, object]) -> list[int]:
        raise web.HTTPBadRequest(text='{"error": {"message": "token 8 is not in the vocabulary"}}')

    async with (
        serving(ScriptedEngine(script=refuse)) as engine,
        rollout_actor(bus, router_url, [engine], topology_with()),
    ):
        await bus.publish(announcement(1))
        await bus.publish(task(0))
        failed, _ = await next_event(bus, GroupFailed)
    assert isinstance(failed, GroupFailed)
    assert "not in the vocabulary" in failed.reason


@pytest.mark.parametrize(
    ("on_failure", "kind"), [("drop", GroupFailed), ("drop_sample", GroupFailed), ("zero", GroupCompleted)]
)
async def test_a_sample_without_a_reward_follows_the_policy(
    bus: Bus, router_url: str, on_failure: str, kind: type[GroupFailed | GroupCompleted]
) -> None:
    async def fail() -> None:
        async with bus.consume(ScoreRequested, durable="reward") as deliveries:
            async for delivery in deliveries:
                request = delivery.message
                scores = tuple(Score(index=item.index, error="timeout") for item in request.items)
                await bus.notify(ScoresGiven(request_id=request.request_id, scores=scores), to=request.reply_to)
                await delivery.ack()

    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(fail)
        async with rollout_actor(bus, router_url, [engine], topology_with(reward={"on_failure": on_failure})):
            await bus.publish(announcement(1))
            await bus.publish(task(0))
            event, _ = await next_event(bus, GroupFailed, GroupCompleted)
        group.cancel_scope.cancel()
    assert isinstance(event, kind)
    if isinstance(event, GroupCompleted):
        assert [sample.reward for sample in event.samples] == [0.0, 0.0]
    else:
        assert event.reason == "reward: timeout"


async def test_a_sample_may_be_dropped_alone_by_the_cause_and_the_others_train(bus: Bus, router_url: str) -> None:
    async def fail_first() -> None:
        async with bus.consume(ScoreRequested, durable="reward") as deliveries:
            async for delivery in deliveries:
                request = delivery.message
                scores = tuple(
                    Score(index=0, error="raised", cause="raised")
                    if item.index == 0
                    else Score(index=item.index, reward=0.5)
                    for item in request.items
                )
                await bus.notify(ScoresGiven(request_id=request.request_id, scores=scores), to=request.reply_to)
                await delivery.ack()

    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(fail_first)
        reward = {"on_failure": "drop", "failures": {"raised": "drop_sample"}}
        async with rollout_actor(bus, router_url, [engine], topology_with(reward=reward)):
            await bus.publish(announcement(1))
            await bus.publish(msgspec.structs.replace(task(0), num_samples=3))
            event, _ = await next_event(bus, GroupFailed, GroupCompleted)
        group.cancel_scope.cancel()
    assert isinstance(event, GroupCompleted)
    ends = [(sample.status, sample.reward) for sample in event.samples]
    assert ends == [("failed", None), ("completed", 0.5), ("completed", 0.5)]
    assert summary_of(event).rewards == [0.5, 0.5]
    assert [trainable(sample) for sample in event.samples] == [False, True, True]


async def test_a_lost_request_is_sent_again_once_the_engine_is_back(bus: Bus, router_url: str) -> None:
    first = ScriptedEngine(hold=True)
    async with anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with serving(ScriptedEngine()) as second:
            async with serving(first), rollout_actor(bus, router_url, [first], topology_with()):
                await bus.publish(announcement(1))
                await bus.publish(task(0))
                await first.wait_for_requests(2)
                first.break_connections()
                await bus.kv.put(address_key("engine", "policy", 0), Address(url=second.url))
                event = await completed(bus)
        group.cancel_scope.cancel()
    assert second.updates == ["/weights/v1"]  # brought to the current weights before it got work
    assert [sample.response_len for sample in event.samples] == [4, 4]


async def test_an_evaluation_item_is_scored_and_untouched_by_halts(bus: Bus, router_url: str) -> None:
    engine = ScriptedEngine(hold=True)
    prompt = Prompt(data="e", row=0, text="p", prompt_ids=Int32Array([7]), label="1", rm_type="exact_match")
    request = EvalRequested(
        step=0, set="test", item=5, version=1, prompt=prompt, num_samples=1, sampling=SamplingParams(max_new_tokens=8)
    )
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology_with()):
            await bus.publish(announcement(1))
            await bus.publish(request)
            await bus.publish(task(0))
            await engine.wait_for_requests(3)
            await bus.publish(RoundHalted(incarnation=1, round=0))
            await next_event(bus, GroupAborted)
            engine.release()
            event, _ = await next_event(bus, EvalCompleted)
        group.cancel_scope.cancel()
    assert isinstance(event, EvalCompleted)
    assert (event.item, event.samples[0].reward, event.samples[0].response_len) == (5, 1.0, 4)
    assert BatchTrained.topic  # the event never enters the training ledger: it has no group


async def test_an_item_of_an_evaluation_that_has_ended_is_not_generated_again(bus: Bus, router_url: str) -> None:
    """A new buffer asks again for what it has not read the end of."""
    prompt = Prompt(data="e", row=0, text="p", prompt_ids=Int32Array([7]), label="1", rm_type="exact_match")
    sampling = SamplingParams(max_new_tokens=8)
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology_with()):
            await bus.publish(EvalEnded(incarnation=1, step=3, version=1, metrics={}))
            await bus.publish(announcement(2, step=4))
            await next_event(bus, WeightsApplied)
            for step in (3, 4):
                what = {"step": step, "set": "test", "item": step, "version": step - 2}
                await bus.publish(EvalRequested(**what, prompt=prompt, num_samples=1, sampling=sampling))
            event, _ = await next_event(bus, EvalCompleted)
        group.cancel_scope.cancel()
    assert isinstance(event, EvalCompleted)
    assert (event.step, event.item, len(engine.requests)) == (4, 4, 1)


async def test_an_evaluation_that_everything_waits_for_has_all_slots(bus: Bus, router_url: str) -> None:
    engine = ScriptedEngine(hold=True)
    prompt = Prompt(data="e", row=0, text="p", prompt_ids=Int32Array([7]), label="1", rm_type="exact_match")
    topology = topology_with(rollout={"eval_overlap": False})
    num_slots = topology.engines["policy"].concurrency
    async with serving(engine), rollout_actor(bus, router_url, [engine], topology):
        await bus.publish(announcement(1))
        for item in range(num_slots):
            sampling = SamplingParams(max_new_tokens=8)
            what = {"step": 0, "set": "test", "item": item, "version": 1}
            await bus.publish(EvalRequested(**what, prompt=prompt, num_samples=1, sampling=sampling))
        await engine.wait_for_requests(num_slots)


async def waits_for(bus: Bus) -> str:
    return (await bus.call("rollout", StatsRequested(), StatsGiven, timeout_s=5)).waits_for


async def test_it_says_what_it_waits_for(bus: Bus, router_url: str) -> None:
    engine = ScriptedEngine(hold=True)

    async def says(words: str) -> bool:
        return words in await waits_for(bus)

    topology = topology_with(engines={"policy": {"kind": "tiny", "concurrency": 8, "router": "sglang-router"}})
    async with serving(engine), rollout_actor(bus, "http://127.0.0.1:9", [engine], topology):
        await next_entry(bus, "roster.rollout.>")
        await eventually(lambda: says("the router; a task"))
        await bus.kv.put(address_key("router", "policy", 0), Address(url=router_url))
        await eventually(lambda: says("the first weights; a task"))
        await bus.publish(announcement(1))
        await next_event(bus, WeightsApplied)
        assert await waits_for(bus) == "a task"
        await bus.publish(task(0))
        await engine.wait_for_requests(2)
        assert await waits_for(bus) == "2 requests, the oldest sent 0 s ago"
        engine.release()
        await eventually(lambda: says("answers to "))
        engine.update_at = anyio.Event()
        await bus.publish(announcement(2))
        await eventually(lambda: says("weights 2 at engine.policy.0, "))
        assert "; answers to " in await waits_for(bus)
        engine.update_at.set()


def with_function(name: str) -> Topology:
    return topology_with(rollout={"custom_generate": f"tests.actors.rollout.samples.generate_functions:{name}"})


async def test_a_generate_function_that_does_not_go_on_is_named(bus: Bus, router_url: str) -> None:
    async def is_named() -> bool:
        return await waits_for(bus) == "rollout.custom_generate, outside of generate and grade in 2 samples"

    async with (
        serving(ScriptedEngine()) as engine,
        rollout_actor(bus, router_url, [engine], with_function("hangs")),
    ):
        await bus.publish(announcement(1))
        await bus.publish(task(0))
        await eventually(is_named)


async def test_samples_that_fail_alike_give_one_reason(bus: Bus, router_url: str) -> None:
    async with (
        serving(ScriptedEngine()) as engine,
        rollout_actor(bus, router_url, [engine], with_function("never_asks")),
    ):
        await bus.publish(announcement(1))
        await bus.publish(task(0))
        failed, _ = await next_event(bus, GroupFailed)
    assert isinstance(failed, GroupFailed)
    assert failed.reason == "rollout.custom_generate: ended without a turn of the model: it never awaited generate"


async def next_entry(bus: Bus, key: str) -> None:
    async with bus.kv.watch(key, msgspec.Raw) as entries:
        async for entry in entries:
            if entry.value is not None:
                return
