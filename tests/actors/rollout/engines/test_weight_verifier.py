"""Weights are proven before their tokens count: an engine that only says so is refused, and what it made is dropped."""

from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from structlog.testing import capture_logs

from messages import (
    GroupCompleted,
    RolloutRequested,
    SampleSummary,
    SamplingParams,
    SegmentsPublished,
    WeightsAnnounced,
    WeightsApplied,
)
from runtime.bus.bus import Bus
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import PROBE, announcement, completed, grade, next_event, rollout_actor, task, until_applied
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio

WRONG = -0.6  # log-prob of each token of a prompt, under other weights than announced
WHOLE = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
LONG = 512  # tokens that a request may get, so that it is streamed


@pytest.fixture(autouse=True)
def soon_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.rollout.engines.weights.updater.CLEAR_S", 0.1)


def told(version: int) -> WeightsAnnounced:
    return announcement(version, checksum=f"files {version}", probe=PROBE)


def loading(**knobs: Any) -> ScriptedEngine:
    """An engine whose checksum is that of what it loads."""
    return ScriptedEngine(loads=lambda path: f"tensors of {Path(path).name}", **knobs)


def pool_with(verify: str | None) -> dict[str, Any]:
    return {"policy": {"kind": "tiny", "concurrency": 8, "verify": verify}}


@pytest.mark.parametrize("mode", ["drain", "abort", "retract", "in_place"])
async def test_the_checksum_is_asked_while_nothing_is_generated_and_the_probe_after_it(
    bus: Bus, router_url: str, mode: str
) -> None:
    topology = topology_with(rollout={"on_weight_update": mode, "max_staleness": 1})
    async with serving(loading()) as engine, rollout_actor(bus, router_url, [engine], topology):
        for version in (1, 2):
            await bus.publish(told(version))
            await until_applied(bus, version)
    assert engine.checks == ["paused"] * 2
    assert [probe["input_ids"] for probe in engine.probes] == [[3, 4, 5]] * 2
    assert engine.calls[-1] == "continue"


@pytest.mark.parametrize(("verify", "asked"), [(None, 3), ("always", 3), ("first", 1), ("never", 0)])
async def test_how_often_engines_are_asked_is_a_setting(
    bus: Bus, router_url: str, verify: str | None, asked: int
) -> None:
    topology = topology_with(engines=pool_with(verify))
    async with serving(loading()) as engine, rollout_actor(bus, router_url, [engine], topology):
        for version in (1, 2, 3):
            await bus.publish(told(version))
            await until_applied(bus, version)
    assert (len(engine.checks), len(engine.probes)) == (asked, asked)


async def test_an_engine_that_says_yes_and_loads_nothing_is_refused(bus: Bus, router_url: str) -> None:
    """Although its log-probs are within the tolerance, as after a small train step."""
    async with serving(loading()) as lazy, serving(loading()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        with capture_logs() as logged:
            async with rollout_actor(bus, router_url, [lazy, engine], topology_with()):
                await bus.publish(told(1))
                await eventually(lambda: [entry["event"] for entry in logged].count("engine_admitted") == 2)
                lazy.swallows_weights = True
                await bus.publish(told(2))
                await until_applied(bus, 2)
                await eventually(lambda: "weights_refused" in [entry["event"] for entry in logged])
                num_asked = len(lazy.requests)
                for group_id in range(4):
                    await bus.publish(msgspec.structs.replace(task(group_id), min_version=2))
                async with bus.read(GroupCompleted) as events:
                    assert all([await events.next(15) for _ in range(4)])
        group.cancel_scope.cancel()
    assert lazy.held == 2  # it says so
    assert len(lazy.requests) == num_asked
    reasons = {entry["reason"] for entry in logged if entry["event"] == "weights_refused"}
    assert any("did not load these" in reason or "for the same files" in reason for reason in reasons)


async def test_alone_such_an_engine_is_refused_again_and_again(bus: Bus, router_url: str) -> None:
    async with serving(loading()) as lazy:
        with capture_logs() as logged:
            async with rollout_actor(bus, router_url, [lazy], topology_with()):
                await bus.publish(told(1))
                await until_applied(bus, 1)
                lazy.swallows_weights = True
                await bus.publish(told(2))
                await eventually(lambda: lazy.calls.count("update") >= 4)
    refused = [entry["reason"] for entry in logged if entry["event"] == "weights_refused"]
    assert len(refused) >= 2
    assert all(reason.endswith("for other files: it did not load these") for reason in refused)


async def test_of_two_engines_of_one_layout_the_one_that_differs_from_the_proven_is_refused(
    bus: Bus, router_url: str
) -> None:
    gate = anyio.Event()
    other = ScriptedEngine(loads=lambda _: "others", update_at=gate)
    async with serving(loading()) as engine, serving(other):
        with capture_logs() as logged:
            async with rollout_actor(bus, router_url, [engine, other], topology_with()):
                await bus.publish(told(1))
                await until_applied(bus, 1)
                gate.set()
                await eventually(lambda: "weights_refused" in [entry["event"] for entry in logged])
    (reason, *_) = [entry["reason"] for entry in logged if entry["event"] == "weights_refused"]
    assert "for the same files" in reason


async def tokens_of(bus: Bus, sample: SampleSummary) -> list[tuple[int, list[int]]]:
    """By segment, with the version of its weights."""
    found: list[tuple[int, list[int]]] = []
    for ref in sample.segments:
        segment = (await bus.fetch(SegmentsPublished, ref.seq)).segments[ref.position]
        found += [(span.version, segment.response_ids[span.start : span.end].tolist()) for span in segment.weight_spans]
    return found


def goes_on(prompt: list[int], params: dict[str, Any]) -> list[int]:
    return WHOLE[len(prompt) - 2 :][: params["max_new_tokens"]]


def one_sample(limit: int) -> RolloutRequested:
    """A task of one sample of so many tokens at most."""
    return msgspec.structs.replace(task(0), num_samples=1, sampling=SamplingParams(max_new_tokens=limit))


def refusing(**knobs: Any) -> ScriptedEngine:
    return loading(script=goes_on, hold=True, stream_every=4, **knobs)


async def run_into_refusal(bus: Bus, engine: ScriptedEngine, limit: int) -> None:
    """A request spans an update; its answer is there while the probe is not, and then the probe fails."""
    await bus.publish(told(1))
    await until_applied(bus, 1)
    await bus.publish(one_sample(limit))
    await (engine.wait_for_streams(1) if limit == LONG else engine.wait_for_requests(1))
    engine.prompt_log_prob, engine.probe_at = WRONG, anyio.Event()
    await bus.publish(told(2))
    await eventually(lambda: len(engine.probes) == 2)
    engine.release()
    await eventually(lambda: engine.num_answered == 1)
    engine.probe_at.set()


@pytest.mark.parametrize("incremental", [False, True])
async def test_what_is_made_after_an_update_that_is_then_refused_is_dropped(
    bus: Bus, router_url: str, incremental: bool
) -> None:
    """The sample goes on from the tokens before."""
    topology = topology_with(rollout={"on_weight_update": "in_place", "max_staleness": 1, "max_response_len": LONG})
    async with serving(refusing(incremental=incremental)) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        with capture_logs() as logged:
            async with rollout_actor(bus, router_url, [engine], topology):
                await run_into_refusal(bus, engine, LONG)
                await eventually(lambda: "weights_refused" in [entry["event"] for entry in logged])
                engine.prompt_log_prob = PROBE.log_probs[1]
                event = await completed(bus)
        group.cancel_scope.cancel()
    assert engine.requests[1]["input_ids"] == [7, 8, 1, 2, 3, 4]
    assert await tokens_of(bus, event.samples[0]) == [(1, [1, 2, 3, 4]), (2, [5, 6, 7, 8, 9, 10])]
    lost = [entry["error"] for entry in logged if entry["event"] == "request_lost"]
    assert ["unverified" in error for error in lost] == [True]


async def test_an_answer_that_came_whole_is_asked_for_again(bus: Bus, router_url: str) -> None:
    topology = topology_with(rollout={"on_weight_update": "in_place", "max_staleness": 1})
    async with serving(refusing()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        with capture_logs() as logged:
            async with rollout_actor(bus, router_url, [engine], topology):
                await run_into_refusal(bus, engine, 8)
                await eventually(lambda: "weights_refused" in [entry["event"] for entry in logged])
                engine.prompt_log_prob = PROBE.log_probs[1]
                event = await completed(bus)
        group.cancel_scope.cancel()
    assert [body["input_ids"] for body in engine.requests] == [[7, 8]] * 2
    assert await tokens_of(bus, event.samples[0]) == [(2, WHOLE[:8])]


async def test_an_answer_waits_for_the_proof_of_its_weights(bus: Bus, router_url: str) -> None:
    topology = topology_with(rollout={"on_weight_update": "in_place", "max_staleness": 1, "max_response_len": LONG})
    async with serving(refusing()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(told(1))
            await until_applied(bus, 1)
            await bus.publish(one_sample(LONG))
            await engine.wait_for_streams(1)
            engine.probe_at = anyio.Event()
            await bus.publish(told(2))
            await eventually(lambda: len(engine.probes) == 2)
            engine.release()
            await eventually(lambda: engine.num_answered == 1)
            async with bus.read(GroupCompleted, WeightsApplied) as events:
                await events.next(5)  # of version 1
                assert await events.next(0.3) is None
                engine.probe_at.set()
                first = await events.next(5)
                assert first is not None
                event = await completed(bus)
        group.cancel_scope.cancel()
    assert len(engine.requests) == 1
    assert await tokens_of(bus, event.samples[0]) == [(1, [1, 2, 3, 4]), (2, [5, 6, 7, 8, 9, 10])]


async def test_a_probe_that_a_halt_aborts_is_sent_again(bus: Bus, router_url: str) -> None:
    aborted = ScriptedEngine()
    answers = iter([{"type": "abort", "message": "Aborted"}, {"type": "length", "length": 0}])
    aborted.probe_reason = lambda: next(answers)
    async with serving(aborted) as engine, rollout_actor(bus, router_url, [engine], topology_with()):
        await bus.publish(told(1))
        applied, _ = await next_event(bus, WeightsApplied)
    assert isinstance(applied, WeightsApplied)
    assert len(engine.probes) == 2
