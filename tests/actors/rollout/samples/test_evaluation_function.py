"""A user's evaluation function through a rollout actor: what it asks for and sees, its mistakes, and a second start."""

import contextlib
import sys
import tomllib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from actors.rollout.engines.target import TargetWeights
from actors.rollout.samples.conversation import Conversation
from actors.rollout.samples.evaluation_function import GradedSample, SetEvaluation
from actors.rollout.samples.generating import sampling_seed
from actors.rollout.samples.sample import OpenSample
from actors.rollout.samples.task_runner import TaskRunner
from messages import (
    EvalCompleted,
    EvalSetRequested,
    Int32Array,
    Prompt,
    SampleStatus,
    Score,
    ScoreRequested,
    ScoresGiven,
    UserFunctionRaised,
)
from runtime.bus.bus import Bus
from runtime.settings.load import load_topology
from runtime.settings.reading.config import TopologyError
from runtime.settings.topology import Topology
from tests.build.topology import topology_with
from tests.docs.snippets import snippet
from tests.fixtures.nats import eventually
from tests.support.checks import function_problems
from tests.support.rollout import announcement, completed, rollout_actor, task
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs/train/own-functions.md"
MODULE = "tests.actors.rollout.samples.test_evaluation_function"
KEY = "eval.0.custom_evaluation"
SEEN: list[Any] = []
RAISE = ("asks_and_raises", "asks_and_exits", "asks_for_another_set")


async def adaptive(evaluation: SetEvaluation) -> None:
    """Prompt 1, again with two turns, and then the harder prompt 3 if both are right, else the easier prompt 0."""

    async def twice(conversation: Conversation) -> None:
        SEEN.append(conversation.evaluation)
        await conversation.generate()
        conversation.append_ids([9])
        await conversation.generate()

    SEEN.append((evaluation.name, evaluation.step, evaluation.num_samples, evaluation.prompts[3].label))
    both = [await evaluation.sample(1), await evaluation.sample(1, twice)]
    SEEN.extend(both)
    await evaluation.sample(3 if all(each.reward == 1.0 for each in both) else 0)


async def together(evaluation: SetEvaluation) -> None:
    async with anyio.create_task_group() as tasks:
        for item in range(len(evaluation.prompts)):
            tasks.start_soon(evaluation.sample, item)


async def asks_and_raises(evaluation: SetEvaluation) -> None:
    await evaluation.sample(2)
    raise KeyError("no such skill")


async def asks_and_exits(evaluation: SetEvaluation) -> None:
    await evaluation.sample(2)
    sys.exit("no such skill")


async def asks_and_hangs(evaluation: SetEvaluation) -> None:
    await evaluation.sample(2)
    await anyio.sleep_forever()


async def asks_and_ignores_the_end(evaluation: SetEvaluation) -> None:
    await evaluation.sample(2)
    with contextlib.suppress(BaseException):
        await anyio.sleep_forever()


async def returns(evaluation: SetEvaluation) -> list[float]:
    await evaluation.sample(2)
    return [0.5]


async def asks_for_nothing(evaluation: SetEvaluation) -> None:
    del evaluation


async def asks_without_end(evaluation: SetEvaluation) -> None:
    """Asks again whatever the answer is."""
    while True:
        try:
            await evaluation.sample(2)
        except ValueError:
            continue


async def asks_for_another_set(evaluation: SetEvaluation) -> None:
    await evaluation.sample(2)
    await evaluation.sample(4)


async def gives_up_a_sample(evaluation: SetEvaluation) -> None:
    """One sample has too little time, and the generate function of another one raises."""

    async def raises(conversation: Conversation) -> None:
        raise KeyError("no such tool")

    async def waits(conversation: Conversation) -> None:
        await anyio.sleep_forever()

    with anyio.move_on_after(0.05):
        await evaluation.sample(0, waits)
    SEEN.append(await evaluation.sample(1, raises))
    await evaluation.sample(2)


async def waits_in_the_first_start(evaluation: SetEvaluation) -> None:
    SEEN.append(await evaluation.sample(2))
    if len(SEEN) == 1:
        await anyio.sleep_forever()
    await evaluation.sample(0)


def plain(evaluation: SetEvaluation) -> None:
    """Cannot wait."""


def with_function(name: str, **rollout: Any) -> Topology:
    path = name if ":" in name else f"{MODULE}:{name}"
    item = {"name": "test", "path": "none", "interval": 1, "n_samples_per_eval_prompt": 2, "custom_evaluation": path}
    return topology_with(eval=[item], rollout=rollout)


def of_set(num_items: int = 4) -> EvalSetRequested:
    prompts = [
        Prompt(
            data="test",
            row=row,
            text=f"p{row}",
            prompt_ids=Int32Array([7, row]),
            label=f"l{row}",
            metadata={"difficulty": row},
            rm_type="exact_match",
        )
        for row in range(num_items)
    ]
    return EvalSetRequested(step=3, set="test", version=1, num_items=num_items, prompts=tuple(prompts))


def all_right(label: str) -> bool:
    return label != ""


def all_wrong(label: str) -> bool:
    return label == ""


def is_easy(label: str) -> bool:
    return label < "l2"


async def grade_by(bus: Bus, right: Callable[[str], bool]) -> None:
    """Run a reward worker that grades by the label of the row, as `exact_match` would by the response."""
    async with bus.consume(ScoreRequested, durable="reward") as deliveries:
        async for delivery in deliveries:
            request = delivery.message
            scores = tuple(
                Score(index=item.index, part=item.part, reward=float(right(str(item.label)))) for item in request.items
            )
            await bus.notify(ScoresGiven(request_id=request.request_id, scores=scores), to=request.reply_to)
            await delivery.ack()


@asynccontextmanager
async def evaluating(
    bus: Bus, router_url: str, topology: Topology, right: Callable[[str], bool] = all_right
) -> AsyncGenerator[ScriptedEngine]:
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade_by, bus, right)
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            await bus.publish(of_set())
            yield engine
        group.cancel_scope.cancel()


async def answers(bus: Bus, number: int = 4) -> dict[int, EvalCompleted]:
    async with bus.read(EvalCompleted) as events:
        received = [await events.next(15) for _ in range(number)]
    found = [one.message for one in received if one is not None and isinstance(one.message, EvalCompleted)]
    assert {(event.step, event.set, event.version) for event in found} == {(3, "test", 1)}
    return {event.item: event for event in found}


@pytest.mark.parametrize(("right", "then"), [(all_right, 3), (all_wrong, 0)])
async def test_a_function_chooses_the_next_prompt_by_answers_to_others(
    bus: Bus, router_url: str, right: Callable[[str], bool], then: int
) -> None:
    SEEN.clear()
    async with evaluating(bus, router_url, with_function("adaptive"), right) as engine:
        found = await answers(bus)
    assert [request["input_ids"] for request in engine.requests] == [[7, 1], [7, 1], [7, 1, 1, 2, 3, 4, 9], [7, then]]
    about, first, is_evaluation, second = SEEN[0], SEEN[2], SEEN[1], SEEN[3]
    assert (about, is_evaluation) == (("test", 3, 2, "l3"), True)
    reward = float(right("l1"))
    assert isinstance(first, GradedSample)
    assert (first.item, first.index, first.status, first.text, first.reward) == (1, 0, "completed", "1 2 3 4", reward)
    assert (second.index, second.ids, second.reward) == (1, [1, 2, 3, 4, 9, 1, 2, 3], reward)
    assert {item for item, event in found.items() if event.not_asked} == {0, 1, 2, 3} - {1, then}
    assert [(s.index, s.reward, s.response_len) for s in found[1].samples] == [(0, reward, 4), (1, reward, 8)]
    assert [s.reward for s in found[then].samples] == [reward]
    assert {event.failed for event in found.values()} == {""}


async def test_samples_have_the_seeds_of_an_evaluation_without_a_function(bus: Bus, router_url: str) -> None:
    async with evaluating(bus, router_url, with_function("together")) as engine:
        found = await answers(bus)
    seeds = {request["input_ids"][1]: request["sampling_params"]["sampling_seed"] for request in engine.requests}
    assert seeds == {row: sampling_seed(topology_with().run.seed, ("eval", "test", row), 0) for row in range(4)}
    assert [len(event.samples) for event in found.values()] == [1] * 4


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("asks_and_raises", "KeyError('no such skill')"),
        ("asks_and_exits", "SystemExit('no such skill')"),
        ("asks_and_ignores_the_end", "took more than 0.2 s without generating a sample"),
        ("asks_and_hangs", "took more than 0.2 s without generating a sample"),
        ("returns", "returns returned [0.5]; expected nothing: the samples that it asked for count"),
        ("asks_for_nothing", "asked for no sample: it never awaited sample"),
        ("asks_without_end", "asked for another sample of prompt 2: n_samples_per_eval_prompt allows 2"),
        ("asks_for_another_set", "asked for a sample of prompt 4: the set has the prompts 0 to 3"),
    ],
)
async def test_what_a_function_does_wrong_ends_its_evaluation_and_the_run_goes_on(
    bus: Bus, router_url: str, name: str, said: str
) -> None:
    topology = with_function(name)
    if said.startswith("took"):
        rollout = msgspec.structs.replace(topology.rollout, custom_generate_timeout_s=0.2)
        topology = msgspec.structs.replace(topology, rollout=rollout)
    async with evaluating(bus, router_url, topology):
        found = await answers(bus)
        await bus.publish(task(0))
        group = await completed(bus)
        async with bus.read(UserFunctionRaised) as events:
            raised = [received.message async for received in events.so_far()]
    assert [each.function for each in raised] == [KEY] * (name in RAISE)
    if name == "asks_and_raises":
        assert raised[0].traceback.splitlines()[-1] == "KeyError: 'no such skill'"
    assert [event.failed for event in found.values() if event.failed] == [f"{KEY}: {said}"]
    num_asked = {"asks_for_nothing": 0, "asks_without_end": 2}.get(name, 1)
    assert [s.reward for s in found[2].samples] == [1.0] * num_asked
    assert {item for item, event in found.items() if event.not_asked} == ({0, 1, 3} if num_asked else {0, 1, 2, 3})
    assert len(group.samples) == 2


async def test_what_a_sample_does_wrong_costs_it_alone(bus: Bus, router_url: str) -> None:
    SEEN.clear()
    async with evaluating(bus, router_url, with_function("gives_up_a_sample")):
        found = await answers(bus)
        async with bus.read(UserFunctionRaised) as events:
            raised = [received.message async for received in events.so_far()]
    assert [each.function for each in raised] == [KEY]
    assert [(s.status, s.reward) for s in found[0].samples] == [(SampleStatus.ABORTED, None)]
    assert [(s.status, s.reward) for s in found[1].samples] == [(SampleStatus.FAILED, None)]
    assert [s.reward for s in found[2].samples] == [1.0]
    (failed,) = SEEN
    assert (failed.status, failed.reward) == ("failed", None)
    assert "KeyError('no such tool')" in failed.reason
    assert {event.failed for event in found.values()} == {""}


async def test_a_function_whose_actor_ended_begins_again_and_counts_once(bus: Bus, router_url: str) -> None:
    SEEN.clear()
    topology = with_function("waits_in_the_first_start")
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade_by, bus, all_right)
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            await bus.publish(of_set())
            await eventually(lambda: bool(SEEN))
        async with rollout_actor(bus, router_url, [engine], topology):
            found = await answers(bus)
        group.cancel_scope.cancel()
    assert SEEN[0] == SEEN[1]
    assert {item: len(event.samples) for item, event in found.items()} == {0: 1, 1: 0, 2: 1, 3: 0}
    seeds = [request["sampling_params"]["sampling_seed"] for request in engine.requests]
    assert (len(seeds), seeds[0]) == (3, seeds[1])


async def test_a_function_that_ends_its_actor_each_time_ends_its_evaluation(bus: Bus, router_url: str) -> None:
    SEEN.clear()
    await bus.publish(of_set())
    async with bus.consume(EvalSetRequested, durable="eval-set-policy") as deliveries:
        for _ in range(5):
            await (await anext(deliveries)).redeliver()
    async with serving(ScriptedEngine()) as engine:
        async with rollout_actor(bus, router_url, [engine], with_function("adaptive")):
            await bus.publish(announcement(1))
            found = await answers(bus)
    assert found[0].failed == f"{KEY}: begun 5 times without an end: its rollout actor ended, or was without the bus"
    assert all(event.not_asked for event in found.values())
    assert SEEN == []


async def test_the_function_of_the_page_tests_what_is_hard_for_the_model(
    bus: Bus, router_url: str, tmp_path: Path
) -> None:
    """By difficulty 0 to 3, of which 0 and 1 are answered right: it begins in the middle and looks at the border."""
    source = snippet(PAGE, "python", "# my_evaluation.py")
    file = tmp_path / source.splitlines()[0].removeprefix("# ")
    file.write_text(source)
    table = snippet(PAGE, "toml", "my_evaluation.py")
    name = tomllib.loads(table)["eval"][0]["custom_evaluation"]
    async with evaluating(bus, router_url, with_function(f"{tmp_path}/{name}"), is_easy) as engine:
        found = await answers(bus)
    assert {event.failed for event in found.values()} == {""}
    assert [request["input_ids"][1] for request in engine.requests] == [2, 2, 1, 1]
    assert {item for item, event in found.items() if event.not_asked} == {0, 3}


async def test_what_a_function_does_to_a_row_reaches_no_grader() -> None:
    async def run_sample(_item: int, sample: OpenSample, _function: object) -> None:
        sample.details = {"parts": [1]}

    row = Prompt(data="d", row=0, text="p", prompt_ids=Int32Array([1]), label=[1], metadata={"tags": ["a"]})
    evaluation = SetEvaluation("test", [row], run_sample, step=0, num_samples=1, key=KEY)
    (prompt,), graded = evaluation.prompts, await evaluation.sample(0)
    assert graded.score is not None
    for values in (prompt.label, prompt.metadata["tags"], graded.score["parts"]):
        values.clear()
    assert (row.label, row.metadata, [s.score for s in evaluation.samples(0)]) == (
        [1],
        {"tags": ["a"]},
        [{"parts": [1]}],
    )


def test_a_function_that_cannot_be_used_is_refused_before_the_start() -> None:
    (found,) = [each for each in function_problems(with_function(f"{MODULE}:plain")) if each.key == KEY]
    assert "write `async def`" in found.message
    assert [each for each in function_problems(with_function("adaptive")) if each.key == KEY] == []
    with pytest.raises(TopologyError, match=KEY):
        load_topology(ROOT / "topologies/examples/dpo.toml", (f"{KEY}=m:f",))


@pytest.mark.parametrize(("overlap", "bound"), [(False, 16), (True, 4)])
async def test_sets_with_and_without_a_function_share_the_slots_of_evaluations(
    overlap: bool, bound: int, bus: Bus
) -> None:
    topology = with_function("adaptive", eval_overlap=overlap)
    (own,) = topology.eval
    for sets in ((own,), (own, msgspec.structs.replace(own, name="plain", custom_evaluation=None))):
        runner = TaskRunner(msgspec.structs.replace(topology, eval=sets), bus, "policy", TargetWeights())
        for total, expected in ((16, bound), (2 * 16, 2 * bound)):
            runner.resize(total)
            slots = [runner._eval_slots.total, runner._set_slots.total]
            assert slots == ([expected] * 2 if len(sets) == 1 else [expected // 2] * 2)
