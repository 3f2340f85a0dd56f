"""A user's rollout function through a rollout actor: order, ended samples, halts, and mistakes."""

import tomllib
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from actors.hooks import check_hooks
from actors.rollout.samples.conversation import Conversation
from actors.rollout.samples.rollout_function import PromptGroup
from messages import GroupAborted, GroupFailed, RoundHalted, SampleStatus, SamplingParams
from runtime.bus.bus import Bus
from runtime.settings.load import load_topology
from runtime.settings.reading.config import TopologyError
from runtime.settings.topology import Topology
from tests.build.topology import topology_with
from tests.docs.snippets import snippets
from tests.support.rollout import announcement, completed, grade, next_event, rollout_actor, task
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs/train/rollout-functions.md"
SEEN: list[Any] = []


async def last_first(group: PromptGroup) -> None:
    """The second sample, and then the first one, whose second turn follows what the second sample said."""
    last = await group.sample(1)
    SEEN.append((group.prompt, group.label, group.num_samples, last.index, last.status, last.text, last.ids))

    async def after(conversation: Conversation) -> None:
        await conversation.generate()
        conversation.append_ids(last.ids[:2])
        conversation.sample_metadata["after"] = last.index
        await conversation.generate()

    await group.sample(0, after)


async def together(group: PromptGroup) -> None:
    async with anyio.create_task_group() as tasks:
        for index in range(group.num_samples):
            tasks.start_soon(group.sample, index)


async def leaves_one_out(group: PromptGroup) -> None:
    await group.sample(0)


async def repeats(group: PromptGroup) -> None:
    await group.sample(0)
    await group.sample(0)


async def raises_in_a_sample(group: PromptGroup) -> None:
    async def raises(conversation: Conversation) -> None:
        raise KeyError("no such page")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(group.sample, 0)
        tasks.start_soon(group.sample, 1, raises)


async def hangs(group: PromptGroup) -> None:
    await anyio.sleep_forever()


def plain(group: PromptGroup) -> None:
    """Cannot wait."""


def with_function(name: str, **rollout: Any) -> Topology:
    return topology_with(
        rollout={"custom_rollout": f"tests.actors.rollout.samples.test_rollout_function:{name}", **rollout}
    )


def two_samples(**of_task: Any) -> Any:
    return msgspec.structs.replace(task(0, **of_task), sampling=SamplingParams(max_new_tokens=900))


async def test_a_function_generates_the_samples_in_its_order(bus: Bus, router_url: str) -> None:
    SEEN.clear()
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], with_function("last_first")):
            await bus.publish(announcement(1))
            await bus.publish(two_samples())
            event = await completed(bus)
        group.cancel_scope.cancel()
    assert [request["input_ids"] for request in engine.requests] == [[7, 8], [7, 8], [7, 8, 1, 2, 3, 4, 1, 2]]
    assert SEEN == [("p", "1", 2, 1, "completed", "1 2 3 4", [1, 2, 3, 4])]
    first, last = event.samples
    assert (first.index, first.reward, first.metadata["after"]) == (0, 1.0, 1)
    assert (last.index, last.reward, last.status) == (1, 1.0, SampleStatus.COMPLETED)


async def test_a_halted_group_runs_its_function_again_and_no_ended_sample(bus: Bus, router_url: str) -> None:
    engine = ScriptedEngine()

    def script(prompt: list[int], params: dict[str, Any]) -> list[int]:
        engine.hold = len(engine.requests) == 3
        return [1, 2, 3, 4]

    engine.script = script
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], with_function("last_first")):
            await bus.publish(announcement(1))
            await bus.publish(two_samples())
            await engine.wait_for_streams(3)
            await bus.publish(RoundHalted(incarnation=1, round=0))
            aborted, _ = await next_event(bus, GroupAborted)
            assert isinstance(aborted, GroupAborted)
            await bus.publish(two_samples(attempt=1, round=1, carried=aborted.samples))
            event = await completed(bus)
        group.cancel_scope.cancel()
    assert {sample.index: sample.status for sample in aborted.samples}[1] is SampleStatus.COMPLETED
    assert len(engine.requests) == 4  # the turn that was halted, and nothing of before
    assert [(sample.index, sample.reward) for sample in event.samples] == [(0, 1.0), (1, 1.0)]
    assert engine.requests[3]["input_ids"][:8] == [7, 8, 1, 2, 3, 4, 1, 2]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("leaves_one_out", "rollout.custom_rollout: ended without sample 1"),
        ("repeats", "rollout.custom_rollout: ValueError('sample 0: each of 0 to 1 is generated once')"),
        ("raises_in_a_sample", "KeyError('no such page')"),
        ("hangs", "rollout.custom_rollout: took more than 0.2 s without generating a sample"),
    ],
)
async def test_what_a_function_does_wrong_costs_its_group(bus: Bus, router_url: str, name: str, said: str) -> None:
    topology = with_function(name)
    if name == "hangs":
        rollout = msgspec.structs.replace(topology.rollout, custom_generate_timeout_s=0.2)
        topology = msgspec.structs.replace(topology, rollout=rollout)
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            await bus.publish(two_samples())
            failed, _ = await next_event(bus, GroupFailed)
        group.cancel_scope.cancel()
    assert isinstance(failed, GroupFailed)
    assert said in failed.reason


async def test_samples_are_generated_together_with_the_function_of_the_recipe(bus: Bus, router_url: str) -> None:
    generate = "tests.actors.rollout.samples.generate_functions:calculator"
    topology = with_function("together", custom_generate=generate)
    sampling = SamplingParams(max_new_tokens=900)
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            await bus.publish(msgspec.structs.replace(task(0), sampling=sampling))
            event = await completed(bus)
        group.cancel_scope.cancel()
    assert [sample.metadata["num_turns"] for sample in event.samples] == [3, 3]


@pytest.mark.parametrize(("length", "requests"), [(4, 2), (30, 3)])
async def test_the_function_of_the_page_generates_a_group(
    bus: Bus, router_url: str, tmp_path: Path, length: int, requests: int
) -> None:
    """With a long first answer the second sample has two turns. The page's text is written in this model's tokens."""
    (source,) = snippets(PAGE, "python")
    file = tmp_path / source.splitlines()[0].removeprefix("# ")
    file.write_text(source.replace("<user>check it<assistant>", "8 9"))
    (table,) = snippets(PAGE, "toml")
    name = tomllib.loads(table)["rollout"]["custom_rollout"]
    engine = ScriptedEngine()
    engine.script = lambda prompt, params: list(range(1, 1 + length))
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        topology = topology_with(rollout={"custom_rollout": f"{tmp_path}/{name}"})
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            await bus.publish(two_samples())
            await completed(bus)
        group.cancel_scope.cancel()
    assert len(engine.requests) == requests


def test_a_function_that_cannot_be_used_is_refused_before_the_start() -> None:
    (found,) = [each for each in check_hooks(with_function("plain")) if each.key == "rollout.custom_rollout"]
    assert "write `async def`" in found.message
    with pytest.raises(TopologyError, match="greedy sample"):
        load_topology(
            ROOT / "topologies/laptop.toml",
            ("rollout.custom_rollout=m:f", "algorithm.advantage_estimator=remax"),
        )
