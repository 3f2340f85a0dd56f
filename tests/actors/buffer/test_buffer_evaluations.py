"""Evaluations of the buffer on a real bus: their tasks are put and put again, and their ends are metrics."""

import json
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from messages import (
    EvalCompleted,
    EvalEnded,
    EvalIssued,
    EvalRequested,
    EvalSetRequested,
    Plane,
    SampleStatus,
    SampleSummary,
)
from messages.subjects import filter_of
from runtime.bus.bus import Bus
from runtime.data.stored_prompts import prompts_of_set
from runtime.process.actor import InputError
from runtime.settings.tables.prompts import EvalConfig
from runtime.settings.topology import Topology
from runtime.util.errors import flatten
from tests.fixtures.nats import eventually
from tests.support.buffer import buffer, put_raw, small_topology
from tests.support.rollout import announcement, next_event

pytestmark = pytest.mark.anyio


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    return small_topology(tmp_path)


async def test_an_evaluation_item_of_which_nobody_can_read_how_it_ended_is_put_again(
    bus: Bus, topology: Topology
) -> None:
    evals = (EvalConfig(name="t", path=topology.data[0].path or "", interval=1, rm_type="exact_match"),)
    async with buffer(bus, msgspec.structs.replace(topology, eval=evals)):
        await bus.publish(announcement(1))
        issued, _ = await next_event(bus, EvalIssued)
        assert isinstance(issued, EvalIssued)
        async with bus.consume(EvalRequested, durable="eval") as deliveries:
            with anyio.fail_after(200):
                item = await anext(deliveries)
                await item.ack()
                await put_raw(bus, filter_of(bus.run, EvalCompleted).replace(">", item.message.key()))
                keys = [(await anext(deliveries)).message.key() for _ in range(10)]
    assert item.message.key() in keys


async def test_tasks_of_a_large_evaluation_are_put_as_items_end(
    bus: Bus, topology: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.buffer.actor.EVAL_TASKS_QUEUED", 3)
    sets = [{"name": "test", "path": str(tmp_path / "prompts.jsonl"), "interval": 1}]
    with_eval = msgspec.structs.replace(topology, eval=msgspec.convert(sets, tuple[EvalConfig, ...]))
    async with bus.consume(EvalRequested, durable="eval-policy") as tasks, anyio.create_task_group() as group:

        async def answer_all() -> None:
            async for task in tasks:
                asked.append(task.message.item)
                who: dict[str, Any] = {"step": 0, "set": "test", "version": 1, "instance": "rollout", "samples": ()}
                await bus.publish(EvalCompleted(item=task.message.item, **who))
                await task.ack()

        asked: list[int] = []
        async with buffer(bus, with_eval):
            await bus.publish(announcement(1))
            await eventually(lambda: _has_work(bus, 3 + 2))  # and two groups
        async with buffer(bus, with_eval):
            group.start_soon(answer_all)
            await next_event(bus, EvalEnded)
        group.cancel_scope.cancel()
    assert sorted(asked) == list(range(10))


async def test_metrics_of_an_evaluation_are_of_all_its_samples_and_stored_once(
    bus: Bus, topology: Topology, tmp_path: Path
) -> None:
    """A second buffer goes on with the samples of the first one."""
    (tmp_path / "mine.py").write_text("def rows(samples): return {'sum': sum(each.metadata['n'] for each in samples)}")
    lines = [json.dumps({"input": str(n), "label": "1", "metadata": {"n": n}}) for n in range(10)]
    (tmp_path / "eval.jsonl").write_text("\n".join(lines))
    item: dict[str, Any] = {"name": "test", "path": str(tmp_path / "eval.jsonl"), "interval": 1}
    item |= {"metadata_key": "metadata", "custom_metrics": f"{tmp_path}/mine.py:rows"}
    with_eval = msgspec.structs.replace(topology, eval=msgspec.convert([item], tuple[EvalConfig, ...]))

    async def answer(items: range) -> None:
        sample = SampleSummary(index=0, status=SampleStatus.COMPLETED, reward=0.5)
        who: dict[str, Any] = {"step": 0, "set": "test", "version": 1, "instance": "rollout", "samples": (sample,)}
        for number in items:
            await bus.publish(EvalCompleted(item=number, **who))

    async with buffer(bus, with_eval):
        await bus.publish(announcement(1))
        await next_event(bus, EvalIssued)
        await answer(range(4))
    async with buffer(bus, with_eval):
        await answer(range(4, 10))
        ended, _ = await next_event(bus, EvalEnded)
    assert isinstance(ended, EvalEnded)
    assert (ended.metrics["eval/test"], ended.metrics["eval/test/sum"], ended.failed) == (0.5, 45.0, {})
    async with bus.read(EvalEnded) as events:
        assert len([received async for received in events.so_far()]) == 1


async def test_a_set_with_an_evaluation_function_is_one_task(bus: Bus, topology: Topology, tmp_path: Path) -> None:
    """A second buffer does not ask twice, and refuses to go on without the function. Why that failed is in the end."""
    (tmp_path / "mine.py").write_text("def rows(samples): return {'num': len(samples)}")
    lines = [json.dumps({"input": f"{n}" * (14_000 if n == 4 else 500), "label": f"l{n}"}) for n in range(40)]
    (tmp_path / "eval.jsonl").write_text("\n".join(lines))
    item: dict[str, Any] = {"name": "test", "path": str(tmp_path / "eval.jsonl"), "interval": 1}
    item |= {"label_key": "label", "custom_evaluation": "m:f", "custom_metrics": f"{tmp_path}/mine.py:rows"}
    with_eval = msgspec.structs.replace(topology, eval=msgspec.convert([item], tuple[EvalConfig, ...]))
    async with buffer(bus, with_eval):
        await bus.publish(announcement(1))
        await next_event(bus, EvalIssued)
    without = msgspec.convert([{**item, "custom_evaluation": None}], tuple[EvalConfig, ...])
    with pytest.raises(BaseExceptionGroup) as refused:
        async with buffer(bus, msgspec.structs.replace(topology, eval=without)):
            await anyio.sleep_forever()
    (error,) = flatten(refused.value)
    removed = "eval.0.custom_evaluation was removed in the middle of the evaluation of step 0 (set test)"
    assert (type(error), removed in str(error)) == (InputError, True)
    async with (
        buffer(bus, with_eval),
        bus.consume(EvalSetRequested, durable="eval-set") as sets,
    ):
        delivery = await anext(sets)
        task = delivery.message
        assert delivery.num_pending == 0
        assert (task.step, task.set, task.version, task.num_items, task.prompts) == (0, "test", 1, 40, ())
        prompts = await prompts_of_set(bus, task)
        assert [(each.text[:1], each.label) for each in prompts] == [(str(n)[0], f"l{n}") for n in range(40)]
        assert [n for n, each in enumerate(prompts) if each.keys] == [4]  # graders fetch it themselves
        sample = SampleSummary(index=0, status=SampleStatus.COMPLETED, reward=0.5)
        who: dict[str, Any] = {"step": 0, "set": "test", "version": 1, "instance": "rollout"}
        for number in range(40):
            asked = (sample,) if number == 3 else ()
            failed = "" if number else "no"
            await bus.publish(EvalCompleted(item=number, **who, samples=asked, not_asked=not asked, failed=failed))
        ended, _ = await next_event(bus, EvalEnded)
        await delivery.ack()
    assert isinstance(ended, EvalEnded)
    assert (ended.metrics, ended.failed) == ({"eval/test-not_asked": 39.0}, {"test": "no"})


async def _has_work(bus: Bus, number: int) -> bool:
    return (await bus.state(Plane.WORK)).messages == number
