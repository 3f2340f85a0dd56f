"""One prompt group through a rollout actor: when scores are asked for, what a halt reaches, what an error costs."""

import time
from itertools import count
from typing import Any

import anyio
import msgspec
import pytest
from aiohttp import ClientSession, web
from structlog.testing import capture_logs

from actors.rollout.actor import RolloutActor
from actors.rollout.samples import partial
from actors.rollout.samples.generating import sampling_seed
from messages import (
    ColumnPublished,
    EvalCompleted,
    EvalRequested,
    Float32Array,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    Int32Array,
    Message,
    Plane,
    RolloutRequested,
    RoundHalted,
    SampleKey,
    SampleStatus,
    SampleSummary,
    SamplingParams,
    Score,
    ScoreRequested,
    ScoresGiven,
    Segment,
    SegmentRef,
    SegmentsPublished,
    UInt8Array,
    WeightSpan,
)
from runtime.bus.bus import Bus
from runtime.bus.consumer import Delivery
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import announcement, completed, grade, next_event, rollout_actor, task
from tests.support.scripted_engine import ScriptedEngine, four_tokens, serving

pytestmark = pytest.mark.anyio


def one_ends_and_one_is_held() -> ScriptedEngine:
    """An engine that answers its first request and keeps every later one."""
    calls = count()
    engine = ScriptedEngine()

    def script(prompt: list[int], params: dict[str, Any]) -> list[int]:
        engine.hold = next(calls) > 0
        return four_tokens(prompt, params)

    engine.script = script
    return engine


async def give(bus: Bus, delivery: Delivery[ScoreRequested], *rewards: float) -> None:
    request = delivery.message
    scores = tuple(Score(index=item.index, reward=reward) for item, reward in zip(request.items, rewards, strict=True))
    await bus.notify(ScoresGiven(request_id=request.request_id, scores=scores), to=request.reply_to)
    await delivery.ack()


async def test_a_score_is_asked_for_while_another_member_still_generates(bus: Bus, router_url: str) -> None:
    async with (
        serving(one_ends_and_one_is_held()) as engine,
        rollout_actor(bus, router_url, [engine], topology_with()),
        bus.consume(ScoreRequested, durable="reward") as requests,
    ):
        await bus.publish(announcement(1))
        await bus.publish(task(0))
        first = await requests.next(10)
        assert first is not None
        assert len(first.message.items) == 1
        await eventually(lambda: len(engine.requests) == 2)  # the other one may come later, and is held
        await give(bus, first, 0.5)
        engine.release()
        second = await requests.next(10)
        assert second is not None
        await give(bus, second, 0.25)
        event = await completed(bus)
    assert sorted(sample.reward or 0.0 for sample in event.samples) == [0.25, 0.5]
    assert first.message.items[0].index != second.message.items[0].index


async def test_rewards_per_token_are_stored_and_their_sum_is_the_reward(bus: Bus, router_url: str) -> None:
    """Rewards that do not fit the tokens fail their sample, be they of a grader here or of an external one."""
    asked = topology_with(reward={"per": "token"}, algorithm={"estimator": {"type": "reinforce_plus_plus"}})
    async with (
        serving(ScriptedEngine()) as engine,
        rollout_actor(bus, router_url, [engine], asked),
        bus.consume(ScoreRequested, durable="reward") as requests,
    ):
        await bus.publish(announcement(1))
        for group_id, size in enumerate((4, 3)):
            await bus.publish(task(group_id))
            num_left = 2
            while num_left:  # samples that end together share a request
                delivery = await requests.next(10)
                assert delivery is not None
                request = delivery.message
                assert request.per == "token"
                rewards = Float32Array([0.5] + [0.0] * (size - 2) + [0.25])
                scores = tuple(Score(index=item.index, reward=9.0, token_rewards=rewards) for item in request.items)
                await bus.notify(ScoresGiven(request_id=request.request_id, scores=scores), to=request.reply_to)
                await delivery.ack()
                num_left -= len(request.items)
        event = await completed(bus)
        failed, _ = await next_event(bus, GroupFailed)
        columns = [await bus.fetch(ColumnPublished, sample.columns["token_rewards"]) for sample in event.samples]
    assert [sample.reward for sample in event.samples] == [0.75, 0.75]
    assert [column.values.tolist() for column in columns] == [[0.5, 0, 0, 0.25]] * 2
    assert isinstance(failed, GroupFailed)
    assert "3 rewards for 4 tokens" in failed.reason


@pytest.mark.parametrize(("reward", "problem"), [(1e308, "beyond the 1e+15"), (float("nan"), "not a finite number")])
async def test_an_external_worker_s_number_that_can_be_no_reward_is_named_with_grader_and_sample(
    bus: Bus, router_url: str, reward: float, problem: str
) -> None:
    async with (
        serving(ScriptedEngine()) as engine,
        rollout_actor(bus, router_url, [engine], topology_with()),
        bus.consume(ScoreRequested, durable="reward") as requests,
    ):
        await bus.publish(announcement(1))
        await bus.publish(task(0))
        num_left, grader = 2, ""
        while num_left:  # samples that end together share a request
            delivery = await requests.next(10)
            assert delivery is not None
            await give(bus, delivery, *[reward] * len(delivery.message.items))
            num_left, grader = num_left - len(delivery.message.items), delivery.message.rm_type
        failed, _ = await next_event(bus, GroupFailed)
    assert isinstance(failed, GroupFailed)
    assert failed.reason.startswith(f"reward: {grader} on sample 0: returned {reward}, {problem}")


async def test_a_slot_that_one_sample_leaves_goes_to_a_sample_of_the_next_group(bus: Bus, router_url: str) -> None:
    pool = {"policy": {"kind": "tiny", "concurrency": 3}}
    async with (
        serving(ScriptedEngine(hold=True)) as engine,
        rollout_actor(bus, router_url, [engine], topology_with(engines=pool)),
        bus.read(GroupAborted) as events,
    ):
        await bus.publish(announcement(1))
        for group_id in range(2):
            await bus.publish(task(group_id))
        await engine.wait_for_requests(3)  # both of the first group, and one of the second
        await bus.publish(RoundHalted(incarnation=1, round=0))
        ended = [await events.next(10) for _ in range(2)]
    aborted = {event.message.group_id: event.message for event in ended if event is not None}
    assert [sample.response_len for sample in aborted[0].samples] == [2, 2]
    assert sorted(sample.response_len for sample in aborted[1].samples) == [0, 2]  # one never had a slot
    assert len(engine.requests) == 3


async def test_a_batch_waits_for_the_slots_of_all_its_samples(bus: Bus, router_url: str) -> None:
    pool = {"policy": {"kind": "tiny", "concurrency": 3, "batch_requests": True}}
    async with (
        serving(one_ends_and_one_is_held()) as engine,
        rollout_actor(bus, router_url, [engine], topology_with(engines=pool)),
    ):
        engine.hold = True
        await bus.publish(announcement(1))
        for group_id in range(2):
            await bus.publish(task(group_id))
        await engine.wait_for_requests(1)
        await anyio.sleep(0.2)
        assert len(engine.requests) == 1
        engine.hold = False
        engine.release()
        await engine.wait_for_requests(2)


async def test_a_group_is_scored_as_a_whole_once_all_its_members_ended(bus: Bus, router_url: str) -> None:
    async with (
        serving(one_ends_and_one_is_held()) as engine,
        rollout_actor(bus, router_url, [engine], topology_with(reward={"group_rm": True})),
        bus.consume(ScoreRequested, durable="reward") as requests,
    ):
        await bus.publish(announcement(1))
        await bus.publish(task(0))
        await engine.wait_for_requests(2)
        await eventually(lambda: one_is_stored(bus))
        engine.release()
        request = await requests.next(10)
        assert request is not None
        assert request.message.group_rm
        assert [item.index for item in request.message.items] == [0, 1]
        await give(bus, request, 0.25, 0.5)
        event = await completed(bus)
    assert [(sample.index, sample.reward) for sample in event.samples] == [(0, 0.25), (1, 0.5)]


async def one_is_stored(bus: Bus) -> bool:
    return (await bus.state(Plane.DATA)).messages > 0


@pytest.mark.parametrize("group_rm", [False, True])
async def test_a_halt_reaches_groups_that_run_and_groups_that_wait_and_scores_neither(
    bus: Bus, router_url: str, group_rm: bool
) -> None:
    pool = {"policy": {"kind": "tiny", "concurrency": 2}}  # room for one group
    async with (
        serving(ScriptedEngine(hold=True)) as engine,
        rollout_actor(bus, router_url, [engine], topology_with(engines=pool, reward={"group_rm": group_rm})),
        bus.read(GroupAborted) as events,
    ):
        await bus.publish(announcement(1))
        await bus.publish(task(0))
        await engine.wait_for_requests(2)
        await bus.publish(task(1))
        await bus.publish(RoundHalted(incarnation=1, round=0))
        ended = [await events.next(10) for _ in range(2)]
        await eventually(lambda: no_work_is_left(bus))  # a score that was asked for would be left
    aborted = {event.message.group_id: event.message for event in ended if event is not None}
    assert [sample.response_len for sample in aborted[0].samples] == [2, 2]
    assert [sample.reward for sample in aborted[0].samples] == [None, None]
    assert sum(sample.response_len for sample in aborted[1].samples) == 0
    assert len(engine.requests) == 2


async def no_work_is_left(bus: Bus) -> bool:
    return (await bus.state(Plane.WORK)).messages == 0


async def test_the_next_group_generates_while_the_samples_of_one_are_stored(
    bus: Bus, router_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, put = anyio.Event(), partial.store

    async def slow(bus: Bus, message: SegmentsPublished) -> Any:
        await stored.wait()
        return await put(bus, message)

    monkeypatch.setattr(partial, "store", slow)
    pool = {"policy": {"kind": "tiny", "concurrency": 2}}  # room for one group
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology_with(engines=pool)):
            await bus.publish(announcement(1))
            for group_id in range(2):
                await bus.publish(task(group_id))
            await engine.wait_for_requests(4)
            assert (await bus.state(Plane.DATA)).messages == 0
            stored.set()
            async with bus.read(GroupCompleted) as events:
                ended = [await events.next(10) for _ in range(2)]
        group.cancel_scope.cancel()
    assert {event.message.group_id for event in ended if event is not None} == {0, 1}
    assert all(sample.segments for event in ended if event is not None for sample in event.message.samples)


async def test_a_member_that_fails_costs_its_group_and_no_other(bus: Bus, router_url: str) -> None:
    calls = count()

    def script(prompt: list[int], params: dict[str, Any]) -> list[int]:
        if next(calls) == 0:
            raise web.HTTPBadRequest(text='{"error": {"message": "not this one"}}')
        return four_tokens(prompt, params)

    async with serving(ScriptedEngine(script=script)) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology_with()):
            await bus.publish(announcement(1))
            await bus.publish(task(0))
            failed, _ = await next_event(bus, GroupFailed)
            await bus.publish(task(1))
            event, _ = await next_event(bus, GroupCompleted)
        group.cancel_scope.cancel()
    assert isinstance(failed, GroupFailed)
    assert (failed.group_id, "not this one" in failed.reason) == (0, True)
    assert isinstance(event, GroupCompleted)
    assert event.group_id == 1


async def test_a_carried_sample_without_room_for_tokens_is_scored_in_this_attempt(bus: Bus, router_url: str) -> None:
    """As when an abort meets the last token that there is room for."""
    ref = await store(bus, [1, 2, 3, 4])
    carried = SampleSummary(index=0, status=SampleStatus.ABORTED, segments=(ref,), response_len=4)
    request = msgspec.structs.replace(task(0, carried=(carried,)), sampling=SamplingParams(max_new_tokens=4))
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology_with()):
            await bus.publish(announcement(1))
            await bus.publish(request)
            event, _ = await next_event(bus, GroupCompleted, GroupAborted)
        group.cancel_scope.cancel()
    assert isinstance(event, GroupCompleted)
    assert [sample.status for sample in event.samples] == [SampleStatus.TRUNCATED] * 2


async def store(bus: Bus, ids: list[int]) -> SegmentRef:
    """What an earlier attempt of group 0 left of its first sample."""
    segment = Segment(
        sample=SampleKey(group_id=0, attempt=0, index=0),
        prompt_ids=Int32Array([7, 8]),
        response_ids=Int32Array(ids),
        loss_mask=UInt8Array([1] * len(ids)),
        rollout_log_probs=Float32Array([-1.0] * len(ids)),
        weight_spans=(WeightSpan(version=1, start=0, end=len(ids)),),
    )
    seq = await bus.publish(SegmentsPublished(group_id=0, attempt=0, lease="l", segments=(segment,)))
    return SegmentRef(seq=seq, position=0)


async def test_what_no_message_can_carry_fails_its_group_and_not_the_actor(bus: Bus, router_url: str) -> None:
    """First the sample is over the size of a message, then what the grader answered: as JSON twice as long."""

    async def grade_at_length() -> None:
        async with bus.consume(ScoreRequested, durable="reward") as deliveries:
            async for delivery in deliveries:
                request = delivery.message
                scores = (Score(index=0, reward=1.0, details={"why": "\n" * 5_000_000}),)
                await bus.notify(ScoresGiven(request_id=request.request_id, scores=scores), to=request.reply_to)
                await delivery.ack()

    engine = ScriptedEngine(text=lambda ids: "x" * 9_000_000)
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade_at_length)
        async with rollout_actor(bus, router_url, [engine], topology_with()):
            await bus.publish(announcement(1))
            await bus.publish(msgspec.structs.replace(task(0), num_samples=1))
            _, seq = await next_event(bus, GroupFailed)
            engine.text = str
            await bus.publish(msgspec.structs.replace(task(1), num_samples=1))
            failed, _ = await next_event(bus, GroupFailed, from_seq=seq + 1)
        group.cancel_scope.cancel()
    assert isinstance(failed, GroupFailed)
    assert "allowed: at most 8388608" in failed.reason


async def test_a_task_that_comes_again_while_it_is_at_work_here_is_not_done_twice(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine(hold=True)) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        with capture_logs() as logged:
            async with rollout_actor(bus, router_url, [engine], topology_with(), ack_wait_s=0.5):
                await bus.publish(announcement(1))
                await bus.publish(task(0))
                await engine.wait_for_requests(2)
                time.sleep(1.5)  # noqa: ASYNC251 - frozen past its ack wait, as by SIGSTOP
                await eventually(lambda: "task_came_again" in [entry["event"] for entry in logged])
                engine.release()
                await completed(bus)
                await eventually(lambda: nothing_is_queued(bus))
        group.cancel_scope.cancel()
    assert len(engine.requests) == 2


async def test_a_task_that_comes_again_after_its_end_here_is_not_done_twice(
    bus: Bus, router_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its acknowledgement was lost in an outage, or it was fetched ahead and the outage outlasted its ack wait."""
    acknowledge, lost = Delivery.ack, list[Message]()

    async def lose_first(delivery: Delivery[Message]) -> None:
        if isinstance(delivery.message, RolloutRequested) and not lost:
            lost.append(delivery.message)
        else:
            await acknowledge(delivery)

    monkeypatch.setattr(Delivery, "ack", lose_first)
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology_with(), ack_wait_s=0.5):
            await bus.publish(announcement(1))
            await bus.publish(task(0))
            await completed(bus)
            assert not await nothing_is_queued(bus)
            await eventually(lambda: nothing_is_queued(bus))
        group.cancel_scope.cancel()
    assert len(lost) == 1
    assert len(engine.requests) == 2


async def nothing_is_queued(bus: Bus) -> bool:
    return (await bus.state(Plane.WORK)).messages == 0


async def test_samples_that_fit_no_message_together_are_stored_and_scored_in_several(bus: Bus, router_url: str) -> None:
    pool = {"policy": {"kind": "tiny", "concurrency": 8, "batch_requests": True}}
    engine = ScriptedEngine(text=lambda ids: "x" * 5_000_000)
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology_with(engines=pool)):
            await bus.publish(announcement(1))
            await bus.publish(task(0))
            event = await completed(bus)
        group.cancel_scope.cancel()
    assert [sample.reward for sample in event.samples] == [1.0, 1.0]
    first, second = [sample.segments[0] for sample in event.samples]
    assert first.seq != second.seq
    for sample, ref in zip(event.samples, (first, second), strict=True):
        segment = (await bus.fetch(SegmentsPublished, ref.seq)).segments[ref.position]
        assert segment.sample.index == sample.index


async def test_an_evaluation_item_that_somebody_else_aborts_is_done_again(bus: Bus, router_url: str) -> None:
    prompt = task(0).prompt
    request = EvalRequested(
        step=0, set="test", item=5, version=1, prompt=prompt, num_samples=1, sampling=SamplingParams(max_new_tokens=8)
    )
    async with (
        serving(ScriptedEngine(hold=True)) as engine,
        ClientSession() as session,
        anyio.create_task_group() as group,
    ):
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology_with()):
            await bus.publish(announcement(1))
            await bus.publish(request)
            await engine.wait_for_requests(1)
            engine.hold = False
            async with session.post(f"{engine.url}/abort_request", json={"abort_all": True}):
                pass
            event, _ = await next_event(bus, EvalCompleted)
        group.cancel_scope.cancel()
    assert isinstance(event, EvalCompleted)
    assert [(sample.status, sample.reward) for sample in event.samples] == [(SampleStatus.COMPLETED, 1.0)]


@pytest.mark.parametrize(
    ("router", "passed"), [("direct", {"spaces_between_special_tokens": False}), ("sglang-router", {})]
)
async def test_a_request_carries_token_ids_and_every_sampling_setting(
    bus: Bus, router_url: str, router: str, passed: dict[str, bool]
) -> None:
    """As the engine sees it. The router drops spaces_between_special_tokens."""
    pool = {"kind": "tiny", "concurrency": 8, "router": router}
    sampling = SamplingParams(
        max_new_tokens=9, temperature=0.7, top_p=0.9, top_k=40, stop=("a", "b"), stop_token_ids=(5,)
    )
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology_with(engines={"policy": pool})):
            await bus.publish(announcement(1))
            await bus.publish(msgspec.structs.replace(task(0), sampling=sampling))
            await completed(bus)
        group.cancel_scope.cancel()
    assert len(engine.requests) == 2
    for request in engine.requests:
        assert request["input_ids"] == [7, 8]
        assert request["return_logprob"]
        assert request["sampling_params"] == passed | {
            "max_new_tokens": 9,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 40,
            "stop": ["a", "b"],
            "stop_token_ids": [5],
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "sampling_seed": request["sampling_params"]["sampling_seed"],
        }
    seeds = {request["sampling_params"]["sampling_seed"] for request in engine.requests}
    assert seeds == {sampling_seed(1234, ("group", 0), index) for index in range(2)}


async def test_rollout_actors_of_one_process_share_no_state(bus: Bus) -> None:
    """The slots of each are for one of its own engines at the start, whatever was built before it."""
    pools = [{"kind": "tiny", "concurrency": 8}, {"kind": "tiny", "concurrency": 3, "num_engines": 4}]
    actors = [RolloutActor(topology_with(engines={"policy": pool}), bus) for pool in pools]
    assert [actor.stats()["slots"] for actor in actors] == [8, 3]
