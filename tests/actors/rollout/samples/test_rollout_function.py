"""A user's rollout function through a rollout actor: order, ended samples, halts, and mistakes."""

import contextlib
import tomllib
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from actors.rollout.samples.conversation import Conversation, GenerateFunction
from actors.rollout.samples.rollout_function import PromptGroup, RolloutCalls
from actors.rollout.samples.sample import OpenSample, fresh_samples
from actors.rollout.samples.slots import Slots
from actors.rollout.samples.tasks import training_task
from messages import (
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    Int32Array,
    RoundHalted,
    SampleStatus,
    SamplingParams,
    StatsGiven,
    StatsRequested,
)
from runtime.bus.bus import Bus
from runtime.bus.errors import BusUnavailable
from runtime.settings.load import load_topology
from runtime.settings.reading.config import TopologyError
from runtime.settings.topology import Topology
from tests.build.topology import topology_with
from tests.docs.snippets import snippet
from tests.fixtures.nats import eventually
from tests.support.checks import function_problems
from tests.support.rollout import announcement, completed, grade, next_event, rollout_actor, task
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs/train/own-functions.md"
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


async def returns_its_samples(group: PromptGroup) -> list[Any]:
    return [await group.sample(0), await group.sample(1)]


async def generates_with_a_plain_function(group: PromptGroup) -> None:
    def plain(conversation: Conversation) -> str:
        return "x" * 999

    await group.sample(0, plain)  # pyright: ignore[reportArgumentType] - a user's mistake


async def generates_with_a_name(group: PromptGroup) -> None:
    await group.sample(0, "mine.py:critic")  # pyright: ignore[reportArgumentType] - a user's mistake


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


async def raises_without_text(group: PromptGroup) -> None:
    raise KeyError(Unprintable())


async def cannot_clean_up(group: PromptGroup) -> None:
    try:
        for index in range(group.num_samples):
            await group.sample(index)
    except BaseException as error:
        raise RuntimeError("the session is gone") from error


async def cannot_clean_up_a_sample(conversation: Conversation) -> None:
    try:
        await conversation.generate()
    except BaseException as error:
        raise RuntimeError("the session is gone") from error


async def catches_everything(group: PromptGroup) -> None:
    for index in range(group.num_samples):
        with contextlib.suppress(Exception):
            await group.sample(index)


async def best_first(groups: list[PromptGroup]) -> None:
    """One sample of each; the second one only where the first one is short. Nothing of a prompt without a label."""
    SEEN.append([group.label for group in groups])
    for group in groups:
        first = None
        if group.label is None:
            group.leave_out(0)
        else:
            first = await group.sample(0)
        if first is not None and len(first.ids) < 4:
            await group.sample(1)
        else:
            group.leave_out(1)


async def all_of_them(groups: list[PromptGroup]) -> None:
    SEEN.append(len(groups))
    async with anyio.create_task_group() as tasks:
        for group in groups:
            for index in range(group.num_samples):
                tasks.start_soon(group.sample, index)


async def raises_for_one(groups: list[PromptGroup]) -> None:
    await groups[0].sample(0)
    raise KeyError(len(groups))


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
        ("repeats", "rollout.custom_rollout: ValueError('sample 0: expected an integer from 0 to 1, each once')"),
        ("raises_in_a_sample", "rollout.custom_rollout: KeyError('no such page')"),
        ("hangs", "rollout.custom_rollout: took more than 0.2 s without generating a sample"),
        ("raises_without_text", "rollout.custom_rollout: KeyError"),
        ("returns_its_samples", "rollout.custom_rollout: returns_its_samples returned [GeneratedSample(index=0, "),
        ("returns_its_samples", "expected nothing: the samples that it generates count"),
        ("generates_with_a_name", "rollout.custom_rollout: 'mine.py:critic' is not a function: pass an async function"),
        (
            "generates_with_a_plain_function",
            "rollout.custom_rollout: generates_with_a_plain_function.<locals>.plain is not async and returned "
            f"'{'x' * 199}...: write `async def`, without yield",
        ),
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
    assert failed.reason.count("rollout.custom_rollout: ") == 1


async def test_a_function_that_generates_nothing_is_named_in_a_stall(bus: Bus, router_url: str) -> None:
    async def waits_for() -> str:
        return (await bus.call("rollout", StatsRequested(), StatsGiven, timeout_s=5)).waits_for

    async def is_named() -> bool:
        return "rollout.custom_rollout, outside of sample in 1 call" in await waits_for()

    async with serving(ScriptedEngine()) as engine, rollout_actor(bus, router_url, [engine], with_function("hangs")):
        await bus.publish(announcement(1))
        assert not await is_named()
        await bus.publish(two_samples())
        await eventually(is_named)


@pytest.mark.parametrize("key", ["custom_rollout", "custom_generate"])
async def test_a_function_that_raises_when_a_halt_ends_it_costs_no_group(bus: Bus, router_url: str, key: str) -> None:
    name = {"custom_rollout": "cannot_clean_up", "custom_generate": "cannot_clean_up_a_sample"}[key]
    engine = ScriptedEngine()

    def script(prompt: list[int], params: dict[str, Any]) -> list[int]:
        engine.hold = True
        return [1, 2, 3, 4]

    engine.script = script
    topology = topology_with(rollout={key: f"tests.actors.rollout.samples.test_rollout_function:{name}"})
    async with serving(engine), rollout_actor(bus, router_url, [engine], topology):
        await bus.publish(announcement(1))
        await bus.publish(two_samples())
        await engine.wait_for_streams(1)
        await bus.publish(RoundHalted(incarnation=1, round=0))
        async with bus.read(GroupAborted, GroupFailed) as events:
            received = await events.next(15)
    assert received is not None
    assert isinstance(received.message, GroupAborted), received.message.reason


async def test_an_error_of_the_bus_is_not_lost_if_the_function_catches_it() -> None:
    async def run_sample(sample: OpenSample, function: GenerateFunction) -> None:
        raise BusUnavailable("away")

    of = two_samples()
    async with Slots(2).reserve(2) as slots:
        group = PromptGroup(
            fresh_samples(2, of.prompt.prompt_ids),
            run_sample,
            slots=slots,
            task=training_task(of, "lease", group_rm=False),
        )
        with pytest.raises(BusUnavailable):
            await RolloutCalls().run(catches_everything, group, 0)


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
    source = snippet(PAGE, "python", "# my_rollout.py")
    file = tmp_path / source.splitlines()[0].removeprefix("# ")
    file.write_text(source.replace("<user>check it<assistant>", "8 9"))
    table = snippet(PAGE, "toml", "my_rollout.py")
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


def of_label(group_id: int, label: str | None, **fields: Any) -> Any:
    given = two_samples()
    prompt = msgspec.structs.replace(given.prompt, label=label)
    return msgspec.structs.replace(given, group_id=group_id, prompt=prompt, **fields)


async def test_a_function_divides_the_samples_between_prompts_and_each_group_has_its_own_end(
    bus: Bus, router_url: str
) -> None:
    """The longer answer has one sample, the shorter one two, a prompt without label none. The last comes alone."""
    SEEN.clear()
    engine = ScriptedEngine()
    engine.script = lambda prompt, params: [1, 2, 3, 4][: 2 if len(engine.requests) in (2, 3) else 4]
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], with_function("best_first", custom_rollout_prompts=3)):
            await bus.publish(announcement(1))
            for number, label in enumerate(("long", "short", None, "left over")):
                await bus.publish(of_label(number, label))
            ended: dict[int, Any] = {}
            async with bus.read(GroupCompleted, GroupFailed) as events:
                while len(ended) < 4:
                    received = await events.next(15)
                    assert received is not None
                    ended[received.message.group_id] = received.message
        group.cancel_scope.cancel()
    assert SEEN == [["long", "short", None], ["left over"]]
    assert [(s.status, s.reward) for s in ended[0].samples] == [
        (SampleStatus.COMPLETED, 1.0),
        (SampleStatus.FAILED, None),
    ]
    assert ended[0].samples[1].reason == "rollout.custom_rollout left it out"
    assert [(s.reward, s.response_len) for s in ended[1].samples] == [(1.0, 2), (1.0, 2)]
    assert (type(ended[2]), ended[2].reason) == (GroupFailed, "rollout.custom_rollout left it out")
    assert type(ended[3]) is GroupCompleted
    assert len(engine.requests) == 4


async def test_halted_groups_of_one_call_keep_their_samples(bus: Bus, router_url: str) -> None:
    """The first two samples have ended, two are halted in their first tokens."""
    SEEN.clear()
    engine = ScriptedEngine()

    def script(prompt: list[int], params: dict[str, Any]) -> list[int]:
        engine.hold = 2 < len(engine.requests) <= 4
        return [1, 2, 3, 4]

    engine.script = script
    topology = with_function("all_of_them", custom_rollout_prompts=2)
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            for number in range(2):
                await bus.publish(of_label(number, "l"))
            await engine.wait_for_streams(2)
            await bus.publish(RoundHalted(incarnation=1, round=0))
            async with bus.read(GroupAborted) as events:
                received = [await events.next(15) for _ in range(2)]
            aborted = {one.message.group_id: one.message for one in received if one is not None}
            for number, event in aborted.items():
                again = of_label(number, "l", attempt=1, round=1, carried=event.samples)
                await bus.publish(again)
            async with bus.read(GroupCompleted) as events:
                done = [await events.next(15) for _ in range(2)]
        group.cancel_scope.cancel()
    assert SEEN == [2, 2]
    assert {one.message.group_id for one in done if one is not None} == {0, 1}
    assert len(engine.requests) == 6  # those of the two samples that were halted, and nothing else again
    assert all(sample.reward == 1.0 for one in done if one is not None for sample in one.message.samples)


async def test_what_a_function_does_wrong_costs_all_groups_of_its_call(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], with_function("raises_for_one", custom_rollout_prompts=2)):
            await bus.publish(announcement(1))
            for number in range(2):
                await bus.publish(of_label(number, "l"))
            async with bus.read(GroupFailed) as events:
                failed = [await events.next(15) for _ in range(2)]
        group.cancel_scope.cancel()
    assert [one.message.reason for one in failed if one is not None] == ["rollout.custom_rollout: KeyError(2)"] * 2


async def test_the_function_of_the_page_gives_longer_answers_more_samples(
    bus: Bus, router_url: str, tmp_path: Path
) -> None:
    source = snippet(PAGE, "python", "# my_budget.py")
    (tmp_path / source.splitlines()[0].removeprefix("# ")).write_text(source)
    table = snippet(PAGE, "toml", "my_budget.py")
    name = f"{tmp_path}/{tomllib.loads(table)['rollout']['custom_rollout']}"
    engine = ScriptedEngine()
    engine.script = lambda prompt, params: [1, 2, 3, 4][: 2 if prompt[1] == 0 else 4]
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        topology = topology_with(rollout={"custom_rollout": name, "custom_rollout_prompts": 2})
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            for number in range(2):
                given = of_label(number, "l")
                prompt = msgspec.structs.replace(given.prompt, prompt_ids=Int32Array([7, number]))
                await bus.publish(msgspec.structs.replace(given, prompt=prompt))
            async with bus.read(GroupCompleted) as events:
                received = [await events.next(15) for _ in range(2)]
        group.cancel_scope.cancel()
    done = {one.message.group_id: one.message.samples for one in received if one is not None}
    assert [[sample.reward for sample in done[number]] for number in range(2)] == [[1.0, None], [1.0, 1.0]]


def test_numbers_of_prompts_without_effect_or_without_slots_are_refused() -> None:
    laptop, key = ROOT / "topologies/laptop.toml", "rollout.custom_rollout_prompts"
    for settings, said in (
        ((f"{key}=2",), "has no effect without rollout.custom_rollout"),
        (("rollout.custom_rollout=m:f", f"{key}=1000"), "prompt groups of a round"),
        (("rollout.custom_rollout=m:f", f"{key}=8", "engines.policy.concurrency=8"), "needs a slot for each"),
    ):
        with pytest.raises(TopologyError, match=said):
            load_topology(laptop, settings)


def test_a_function_that_cannot_be_used_is_refused_before_the_start() -> None:
    (found,) = [each for each in function_problems(with_function("plain")) if each.key == "rollout.custom_rollout"]
    assert "write `async def`" in found.message
    with pytest.raises(TopologyError, match="greedy sample"):
        load_topology(
            ROOT / "topologies/laptop.toml",
            ("rollout.custom_rollout=m:f", "algorithm.estimator.type=remax"),
        )
