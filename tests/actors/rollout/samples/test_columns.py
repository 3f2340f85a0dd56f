"""A teacher's log-probs as a column: computed while other samples generate, carried over a halt, computed again."""

from typing import Any

import anyio
import msgspec
import pytest

from messages import ColumnPublished, GroupAborted, GroupCompleted, GroupFailed, RoundHalted, SampleSummary
from runtime.bus.addresses import Address, address_key
from runtime.bus.bus import Bus
from runtime.settings.topology import Topology
from tests.build.topology import SCRIPTED_MODEL, topology_with
from tests.support.rollout import announcement, completed, grade, next_event, rollout_actor, task
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio


def with_teachers(*names: str, data: dict[str, str] | None = None) -> Topology:
    """A run with a scripted engine per teacher, and the teacher of each data source."""
    one: dict[str, Any] = {"name": "d", "path": "none", "rm_type": "exact_match"}
    pools = {name: {"kind": "tiny", "hf_checkpoint": str(SCRIPTED_MODEL)} for name in names}
    return topology_with(
        engines={"policy": {"kind": "tiny", "concurrency": 8}, **pools},
        algorithm={"opd": {"type": "sglang"}},
        data=[one | {"name": name, "teacher": teacher} for name, teacher in (data or {"d": "teacher"}).items()],
    )


async def serve_as(bus: Bus, engine: ScriptedEngine, pool: str = "teacher") -> None:
    await bus.kv.put(address_key("engine", pool, 0), Address(url=engine.url))


async def column_of(bus: Bus, sample: SampleSummary) -> ColumnPublished:
    assert list(sample.columns) == ["teacher_log_probs"]
    return await bus.fetch(ColumnPublished, sample.columns["teacher_log_probs"])


async def test_each_sample_of_a_completed_group_has_its_column(bus: Bus, router_url: str) -> None:
    teacher = ScriptedEngine(prompt_log_prob=-0.25)
    async with serving(ScriptedEngine()) as engine, serving(teacher), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        await serve_as(bus, teacher)
        async with rollout_actor(bus, router_url, [engine], with_teachers("teacher")):
            await bus.publish(announcement(1))
            await bus.publish(task(3))
            event = await completed(bus)
        group.cancel_scope.cancel()
    assert [sample.reward for sample in event.samples] == [1.0, 1.0]
    for sample in event.samples:
        column = await column_of(bus, sample)
        assert (column.sample.group_id, column.sample.index, column.column) == (3, sample.index, "teacher_log_probs")
        assert column.values.tolist() == [-0.25] * 4
        assert sample.columns["teacher_log_probs"] > sample.segments[0].seq
    assert sorted(body["input_ids"] for body in teacher.probes) == [[7, 8, 1, 2, 3, 4]] * 2
    assert {body["logprob_start_len"] for body in teacher.probes} == {1}
    assert not any("top_logprobs_num" in body for body in teacher.probes)
    assert not teacher.updates
    assert not teacher.calls


async def test_the_likeliest_tokens_of_the_teacher_come_with_the_column(bus: Bus, router_url: str) -> None:
    teacher = ScriptedEngine(prompt_log_prob=-0.25)
    distillation = {"type": "forward", "coef": 1.0, "topk": 3}
    algorithm = {"opd": {"type": "sglang", "kl_coef": 0.0, "distillation": distillation}}
    topology = topology_with(
        engines={
            "policy": {"kind": "tiny", "concurrency": 8},
            "teacher": {"kind": "tiny", "hf_checkpoint": str(SCRIPTED_MODEL)},
        },
        algorithm=algorithm,
        data=[{"name": "d", "path": "none", "rm_type": "exact_match"}],
    )
    async with serving(ScriptedEngine()) as engine, serving(teacher), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        await serve_as(bus, teacher)
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            await bus.publish(task(3))
            event = await completed(bus)
        group.cancel_scope.cancel()
    assert {body["top_logprobs_num"] for body in teacher.probes} == {3}
    for sample in event.samples:
        column = await column_of(bus, sample)
        assert column.topk_ids is not None
        assert column.topk_log_probs is not None
        assert column.topk_ids.tolist() == [0, 1, 2] * 4
        assert column.topk_log_probs.tolist() == [-0.25, -1.25, -2.25] * 4


async def test_a_data_source_chooses_its_teacher(bus: Bus, router_url: str) -> None:
    teacher, other = ScriptedEngine(prompt_log_prob=-0.25), ScriptedEngine(prompt_log_prob=-0.75)
    async with (
        serving(ScriptedEngine()) as engine,
        serving(teacher),
        serving(other),
        anyio.create_task_group() as group,
    ):
        group.start_soon(grade, bus)
        await serve_as(bus, teacher, "math")
        await serve_as(bus, other, "code")
        topology = with_teachers("math", "code", data={"d": "math", "e": "code"})
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            await bus.publish(task(0))
            request = task(1)
            prompt = msgspec.structs.replace(request.prompt, data="e")
            await bus.publish(msgspec.structs.replace(request, prompt=prompt))
            async with bus.read(GroupCompleted) as events:
                found = [await events.next(15) for _ in range(2)]
        group.cancel_scope.cancel()
    values = {
        received.message.data: (await column_of(bus, received.message.samples[0])).values.tolist()
        for received in found
        if received is not None
    }
    assert values == {"d": [-0.25] * 4, "e": [-0.75] * 4}


async def test_a_halted_group_keeps_scores_and_columns_and_gets_the_missing_ones_later(
    bus: Bus, router_url: str
) -> None:
    teacher = ScriptedEngine(probe_at=None, prompt_log_prob=-0.25)
    async with serving(ScriptedEngine()) as engine, serving(teacher), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], with_teachers("teacher")):
            await bus.publish(announcement(1))
            await bus.publish(task(0))  # without an engine of the teacher it waits
            await engine.wait_for_requests(2)
            await bus.publish(RoundHalted(incarnation=1, round=0))
            aborted, _ = await next_event(bus, GroupAborted)
            assert isinstance(aborted, GroupAborted)
            assert [sample.columns for sample in aborted.samples] == [{}, {}]
            await serve_as(bus, teacher)
            await bus.publish(task(0, attempt=1, round=1, carried=aborted.samples))
            event = await completed(bus)
            first = [await column_of(bus, sample) for sample in event.samples]
            num_probes = len(teacher.probes)
            await bus.publish(task(0, attempt=2, round=1, carried=event.samples))
            async with bus.read(GroupCompleted) as events:
                again = [await events.next(15) for _ in range(2)][1]
        group.cancel_scope.cancel()
    assert [column.values.tolist() for column in first] == [[-0.25] * 4] * 2
    assert len(engine.requests) == 2
    assert again is not None
    assert [sample.columns for sample in again.message.samples] == [sample.columns for sample in event.samples]
    assert len(teacher.probes) == num_probes


async def test_a_teacher_without_usable_answers_fails_the_group_by_name(
    bus: Bus, router_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.rollout.pools.frozen.MAX_FAILURES", 1)
    teacher = ScriptedEngine(prompt_log_prob=0.5)
    async with serving(ScriptedEngine()) as engine, serving(teacher), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        await serve_as(bus, teacher)
        async with rollout_actor(bus, router_url, [engine], with_teachers("teacher")):
            await bus.publish(announcement(1))
            await bus.publish(task(3))
            event, _ = await next_event(bus, GroupFailed)
        group.cancel_scope.cancel()
    assert isinstance(event, GroupFailed)
    assert f"engine.teacher.0 ({teacher.url}): 1 failures" in event.reason
    assert "token 0 has log-prob 0.5" in event.reason
