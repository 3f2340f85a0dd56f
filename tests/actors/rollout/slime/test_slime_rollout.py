"""Rollout functions with slime's imports and signature, on a rollout actor: groups, rewards, halts, and mistakes."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from actors.rollout.slime import rollout as slime_rollout
from messages import (
    EvalCompleted,
    EvalRequested,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    Int32Array,
    RoundHalted,
    SampleStatus,
    SamplingParams,
)
from runtime.bus.bus import Bus
from runtime.compat.slime.functions import PAGE
from runtime.settings.load import load_topology
from runtime.settings.reading.config import TopologyError
from runtime.settings.tables.estimators import Gdpo
from runtime.settings.topology import Topology
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.checks import function_problems
from tests.support.rollout import announcement, grade, next_event, rollout_actor, task
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[4]
FUNCTIONS = """
import asyncio
import threading
import time

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.rm_hub import async_rm
from slime.rollout.sglang_rollout import GenerateState, eval_rollout, generate_and_rm, generate_and_rm_group
from slime.utils.async_utils import run
from slime.utils.http_utils import get_rollout_num_engines, post
from slime.utils.types import Sample

CALLS = []
LOCK = asyncio.Lock()  # of the loop of its first use, which all calls have in common


async def keeps_a_pool_busy(args, rollout_id, data_buffer):  # as fully_async
    assert args.rollout_global_dataset
    state, active, collected = GenerateState(args), set(), {}
    most = min(2, args.sglang_server_concurrency * get_rollout_num_engines(args))
    while len(collected) < args.rollout_batch_size:
        while len(active) < most:
            groups = data_buffer.get_samples(1)
            if not groups:
                break
            async with LOCK:
                params = state.sampling_params.copy()
                active.add(asyncio.create_task(generate_and_rm_group(args, groups[0], params, evaluation=False)))
        done, active = await asyncio.wait(active, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            group = each.result()
            if any(sample.status == Sample.Status.ABORTED for sample in group):
                data_buffer.add_samples([group])
                continue
            collected[group[0].index] = group
    return [collected[index] for index in sorted(collected)]


def fully_async(args, rollout_id, data_buffer, evaluation=False):
    if evaluation:
        raise ValueError("no evaluations")
    CALLS.append((rollout_id, args.rollout_batch_size, args.n_samples_per_prompt))
    return run(keeps_a_pool_busy(args, rollout_id, data_buffer))


async def posts_itself(args, sample, state):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    tokens = state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    output = await post(url, {"input_ids": tokens, "sampling_params": state.sampling_params, "return_logprob": True})
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.tokens = tokens
    sample.append_response_tokens(
        args, tokens=[item[1] for item in pairs], log_probs=[item[0] for item in pairs],
        meta_info=output["meta_info"], text=output["text"],
    )
    sample.reward = await async_rm(args, sample)


def skeleton(args, rollout_id, data_source, evaluation=False):  # as the page about own rollout functions
    if evaluation:
        return run(eval_rollout(args, rollout_id))[0]
    groups = data_source.get_samples(args.over_sampling_batch_size)

    async def all_of_them():
        state = GenerateState(args)
        await asyncio.gather(*[posts_itself(args, each, state) for group in groups for each in group])

    run(all_of_them())
    for group in groups:
        for number, sample in enumerate(group):
            sample.reward = sample.reward + 0.25 * number
            sample.metadata["seen"] = len(groups)
    groups[0][1].remove_sample = True
    groups[0][0].loss_mask[0] = 0
    data_source.add_samples(groups[2:])
    assert data_source.get_buffer_length() == len(groups[2:])
    return RolloutFnTrainOutput(samples=groups[:2], metrics={"own": 1})


def one_by_one(args, rollout_id, data_buffer, evaluation=False):
    groups = data_buffer.get_samples(args.rollout_batch_size)

    async def all_of_them():
        state = GenerateState(args)
        for group in groups:
            for sample in group:
                CALLS.append(sample.index)
                await generate_and_rm(args, sample, state.sampling_params.copy(), evaluation=False)

    run(all_of_them())
    return groups


def forgets_rewards(args, rollout_id, data_buffer, evaluation=False):
    groups = one_by_one(args, rollout_id, data_buffer)
    for sample in groups[0]:
        assert sample.reward == 1.0
        sample.reward = None
    return groups


async def turns(args, sample, sampling_params, evaluation=False):  # a generate function for `one_by_one`
    if sample.label == "bad":
        raise KeyError(sample.index)
    await posts_itself(args, sample, GenerateState(args))
    sample.reward = 7.0 if evaluation else 3.0
    return sample


def raises(args, groups, data_buffer):
    raise KeyError("no such page")


def asks_for_ever(args, groups, data_buffer):
    while True:
        data_buffer.get_samples(5)


def returns_text(args, groups, data_buffer):
    return "groups"


def makes_its_own(args, groups, data_buffer):
    return [[Sample(prompt="p", tokens=[0, 1], response="1", response_length=1, reward=1.0)]]


def gives_back_others(args, groups, data_buffer):
    data_buffer.add_samples([[Sample(index=0)]])


def wants_metadata(args, groups, data_buffer):
    data_buffer.get_metadata()


def wants_an_argument(args, groups, data_buffer):
    args.rollout_buffer_url


def wants_state(args, groups, data_buffer):
    GenerateState(args).submit_generate_tasks(groups)


def returns_it_twice(args, groups, data_buffer):
    return [groups[0], groups[0]]


def leaves_the_process(args, groups, data_buffer):
    raise SystemExit(3)


def as_labelled(args, rollout_id, data_buffer, evaluation=False):
    groups = data_buffer.get_samples(1)
    return globals()[groups[0][0].label](args, groups, data_buffer)


def changes_tokens(args, rollout_id, data_buffer, evaluation=False):
    groups = one_by_one(args, rollout_id, data_buffer)
    groups[0][0].tokens[-1] = 9
    return groups


def of_two(args, rollout_id):
    return []


async def is_async(args, rollout_id, data_buffer, evaluation=False):
    return []


GO = threading.Event()


def hangs(args, rollout_id, data_buffer, evaluation=False):
    GO.wait(30)
    return data_buffer.get_samples(1)


def has_a_thread(args, rollout_id, data_buffer, evaluation=False):  # as fully_async's worker
    def pulls():
        try:
            data_buffer.get_samples(1)
        except Exception:
            pass

    threading.Thread(target=pulls).start()
    run(asyncio.sleep(3600))


LATE = []


def leaves_a_task(args, rollout_id, data_buffer, evaluation=False):
    async def for_ever():
        try:
            while True:
                await asyncio.sleep(0.01)
        finally:
            LATE.append(1)

    async def begin():
        asyncio.create_task(for_ever())
        await asyncio.sleep(0)

    before = len(LATE)
    run(begin())
    CALLS.append(before)
    return one_by_one(args, rollout_id, data_buffer)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path


def with_function(folder: Path, name: str, **rollout: Any) -> Topology:
    own = f"slime:{folder}/mine.py:{name}"
    of = {"custom_rollout": own, "custom_rollout_prompts": 3, "rollout_batch_size": 4} | rollout
    return topology_with(rollout=of)


def module_of(topology: Topology) -> Any:
    """The user's module, as the actor has imported it."""
    import sys

    name = (topology.rollout.custom_rollout or "").removeprefix("slime:").rpartition(":")[0]
    return next(each for each in sys.modules.values() if getattr(each, "__file__", None) == name)


def of_label(group_id: int, label: str = "1", **of_task: Any) -> Any:
    given = task(group_id, **of_task)
    prompt = msgspec.structs.replace(given.prompt, label=label, prompt_ids=Int32Array([0]))  # as the model encodes it
    return msgspec.structs.replace(given, prompt=prompt, sampling=SamplingParams(max_new_tokens=900))


async def ended_groups(bus: Bus, number: int) -> dict[int, GroupCompleted | GroupFailed]:
    found: dict[int, Any] = {}
    async with bus.read(GroupCompleted, GroupFailed) as events:
        while len(found) < number:
            received = await events.next(15)
            assert received is not None, sorted(found)
            found[received.message.group_id] = received.message
    return found


@asynccontextmanager
async def running(
    bus: Bus, router_url: str, topology: Topology, engine: ScriptedEngine | None = None, **details: Any
) -> AsyncGenerator[ScriptedEngine]:
    """Run a rollout actor with one engine and a grader."""
    async with serving(engine or ScriptedEngine()) as served, anyio.create_task_group() as group:
        group.start_soon(grade, bus, 1.0, details or None)
        async with rollout_actor(bus, router_url, [served], topology):
            await bus.publish(announcement(1))
            yield served
        group.cancel_scope.cancel()


async def run_groups(
    bus: Bus, router_url: str, topology: Topology, labels: Sequence[str], details: dict[str, Any] | None = None
) -> tuple[dict[int, Any], ScriptedEngine]:
    """Return how each group ended, and the engine."""
    async with running(bus, router_url, topology, **(details or {})) as engine:
        for number, label in enumerate(labels):
            await bus.publish(of_label(number, label))
        return await ended_groups(bus, len(labels)), engine


async def test_a_function_that_keeps_a_pool_busy_generates_the_groups_of_each_call(
    bus: Bus, router_url: str, folder: Path
) -> None:
    """Four groups in two calls. The module's lock lives on between calls, as in slime."""
    topology = with_function(folder, "fully_async", custom_rollout_prompts=2)
    ended, engine = await run_groups(bus, router_url, topology, ["1"] * 4)
    assert not [each.reason for each in ended.values() if isinstance(each, GroupFailed)]
    for group in ended.values():
        assert [(each.index, each.reward, each.status) for each in group.samples] == [
            (0, 1.0, SampleStatus.COMPLETED),
            (1, 1.0, SampleStatus.COMPLETED),
        ]
    assert [request["input_ids"] for request in engine.requests] == [[0]] * 8
    calls = module_of(topology).CALLS
    assert sum(number for _, number, _ in calls) == 4
    assert {(of, samples) for of, _, samples in calls} == {(0, 2)}


async def test_what_the_function_returns_of_its_samples_counts(bus: Bus, router_url: str, folder: Path) -> None:
    """It posts itself, changes rewards, excludes tokens and a sample, and gives the third group back."""
    ended, _ = await run_groups(bus, router_url, with_function(folder, "skeleton"), ["1"] * 3)
    by_end = sorted(ended, key=lambda number: isinstance(ended[number], GroupFailed))
    first, second, third = (ended[number] for number in by_end)
    assert sorted(each.reward for each in first.samples) == [1.0, 1.25]
    assert sorted(each.reward for each in second.samples) == [1.0, 1.25]
    masked = [each.untrained for group in (first, second) for each in group.samples]
    assert sorted(masked) == [(), (), ((0, 1),), ((0, 4),)]
    assert {each.metadata["metadata"]["seen"] for each in first.samples} == {3}
    assert third.reason == "rollout.custom_rollout: the function returned without it"


async def test_samples_have_the_generate_function_of_the_recipe_and_one_that_raises_costs_its_sample(
    bus: Bus, router_url: str, folder: Path
) -> None:
    topology = with_function(
        folder, "one_by_one", custom_rollout_prompts=2, custom_generate=f"slime:{folder}/mine.py:turns"
    )
    ended, _ = await run_groups(bus, router_url, topology, ["1", "bad"])
    assert [each.reward for each in ended[0].samples] == [3.0, 3.0]
    assert ended[1].reason == "rollout.custom_rollout: generate: KeyError(2)"


async def test_named_rewards_come_from_the_grader_after_the_call(bus: Bus, router_url: str, folder: Path) -> None:
    """generate_and_rm would give one number, and the sample would lack the others."""
    topology = with_function(folder, "one_by_one", custom_rollout_prompts=1)
    named = msgspec.structs.replace(topology.algorithm, estimator=Gdpo(reward_keys=("a", "b")))
    topology = msgspec.structs.replace(topology, algorithm=named)
    ended, _ = await run_groups(bus, router_url, topology, ["1"], {"a": 1.0, "b": 2.0})
    assert [each.rewards for each in ended[0].samples] == [{"a": 1.0, "b": 2.0}] * 2


@pytest.mark.parametrize(("function", "score"), [("one_by_one", None), ("forgets_rewards", {"a": 1.0})])
async def test_a_reward_that_the_function_takes_back_is_graded_again_with_its_details(
    bus: Bus, router_url: str, folder: Path, function: str, score: Any
) -> None:
    topology = with_function(folder, function, custom_rollout_prompts=1)
    ended, _ = await run_groups(bus, router_url, topology, ["1"], {"a": 1.0})
    assert [(each.reward, each.score) for each in ended[0].samples] == [(1.0, score)] * 2


async def test_a_halted_group_runs_the_function_again_and_keeps_its_turns(
    bus: Bus, router_url: str, folder: Path
) -> None:
    topology, engine = with_function(folder, "one_by_one", custom_rollout_prompts=1), ScriptedEngine()

    def script(prompt: list[int], params: dict[str, Any]) -> list[int]:
        engine.hold = len(engine.requests) == 2
        return [1, 2, 3, 4]

    engine.script = script
    async with running(bus, router_url, topology, engine):
        await bus.publish(of_label(0))
        await engine.wait_for_streams(2)
        await bus.publish(RoundHalted(incarnation=1, round=0))
        aborted, _ = await next_event(bus, GroupAborted)
        assert isinstance(aborted, GroupAborted)
        await bus.publish(of_label(0, attempt=1, round=1, carried=aborted.samples))
        ended = await ended_groups(bus, 1)
    assert [each.status for each in aborted.samples] == [SampleStatus.ABORTED] * 2
    assert aborted.samples[0].response_len == 4
    assert [(each.reward, each.response_len) for each in ended[0].samples] == [(1.0, 4), (1.0, 6)]
    assert len(engine.requests) == 3  # the one that was halted goes on; the one that had ended does not
    assert module_of(topology).CALLS == [0, 1, 0, 1]


async def test_the_function_generates_an_evaluation(bus: Bus, router_url: str, folder: Path) -> None:
    topology = with_function(
        folder, "skeleton", custom_rollout_prompts=1, custom_generate=f"slime:{folder}/mine.py:turns"
    )
    prompt = msgspec.structs.replace(of_label(0).prompt, data="eval")
    sampling = SamplingParams(max_new_tokens=900)
    request = EvalRequested(step=0, set="e", item=0, version=1, prompt=prompt, num_samples=2, sampling=sampling)
    async with running(bus, router_url, topology):
        await bus.publish(request)
        done, _ = await next_event(bus, EvalCompleted)
    assert isinstance(done, EvalCompleted)
    assert [each.reward for each in done.samples] == [7.0, 7.0]


async def test_what_a_function_does_wrong_costs_the_groups_of_its_call(bus: Bus, router_url: str, folder: Path) -> None:
    said = {
        "raises": "KeyError('no such page')",
        "asks_for_ever": "data_buffer.get_samples: this call has no further prompt groups",
        "returns_text": "the function returned 'groups'; expected groups of samples",
        "makes_its_own": "is not a sample that get_samples handed out in this call",
        "gives_back_others": "data_buffer.add_samples: a sample that get_samples did not hand out",
        "wants_metadata": f"data_buffer.get_metadata is not provided to functions of slime: {PAGE}",
        "wants_an_argument": f"args.rollout_buffer_url is not provided to functions of slime: {PAGE}",
        "wants_state": f"GenerateState.submit_generate_tasks is not provided to functions of slime: {PAGE}",
        "returns_it_twice": "the function returned sample 0 of its call twice",
        "leaves_the_process": "SystemExit(3)",
    }
    topology = with_function(folder, "as_labelled", custom_rollout_prompts=1)
    ended, _ = await run_groups(bus, router_url, topology, list(said))
    assert [
        reason
        for reason, group in zip(said.values(), map(ended.get, range(len(said))), strict=True)
        if reason not in group.reason
    ] == []


async def test_a_function_that_pulls_between_calls_is_refused(bus: Bus, router_url: str, folder: Path) -> None:
    topology = with_function(folder, "has_a_thread", custom_rollout_prompts=1)
    ended, _ = await run_groups(bus, router_url, topology, ["1", "1"])
    said = "get_samples in a thread of the function's own, which would go on between calls"
    assert [said in each.reason for each in ended.values()] == [True, True]


async def test_a_sample_with_other_tokens_than_the_engine_gave_fails_alone(
    bus: Bus, router_url: str, folder: Path
) -> None:
    ended, _ = await run_groups(
        bus, router_url, with_function(folder, "changes_tokens", custom_rollout_prompts=1), ["1"]
    )
    first, second = ended[0].samples
    assert "sample.tokens must be the tokens of the prompt and those that the engines gave" in first.reason
    assert second.reward == 1.0


async def test_a_hanging_call_costs_its_groups_and_after_some_of_them_the_process_is_started_again(
    bus: Bus, router_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third group waits for the end of the process, and is generated by the next one."""
    problems: list[str] = []

    async def end_process(problem: str) -> None:
        problems.append(problem)

    monkeypatch.setattr(slime_rollout, "END_S", 0.05)
    monkeypatch.setattr(slime_rollout, "MAX_LEFT", 2)
    monkeypatch.setattr(slime_rollout, "end_process", end_process)
    topology = with_function(folder, "hangs", custom_generate_timeout_s=0.1, custom_rollout_prompts=1)
    async with serving(ScriptedEngine()) as engine:
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            for number in range(3):
                await bus.publish(of_label(number))
            failed = await ended_groups(bus, 2)
            await eventually(lambda: bool(problems))
        module_of(topology).GO.set()
        async with rollout_actor(bus, router_url, [engine], topology):
            ended = await ended_groups(bus, 3)
    assert ["took more than 0.1 s" in each.reason for each in failed.values()] == [True, True]
    assert problems == ["rollout.custom_rollout: 2 calls of the function never ended"]
    (third,) = ended.keys() - failed.keys()
    assert ended[third].reason == "rollout.custom_rollout: the function returned without it"


async def test_tasks_that_a_call_leaves_behind_end_with_it(bus: Bus, router_url: str, folder: Path) -> None:
    topology = with_function(folder, "leaves_a_task", custom_rollout_prompts=1)
    ended, _ = await run_groups(bus, router_url, topology, ["1"] * 2)
    assert all(isinstance(each, GroupCompleted) for each in ended.values())
    assert module_of(topology).LATE == [1, 1]


def test_a_check_refuses_what_is_no_rollout_function_of_slime(folder: Path) -> None:
    (folder / "other.py").write_text("from slime.rollout.sglang_rollout import generate_rollout\n")
    for name, said in (
        (f"slime:{folder}/mine.py:is_async", "slime calls it as a plain function"),
        (
            f"slime:{folder}/mine.py:of_two",
            "takes (args, rollout_id) but is called with (args, rollout_id, data_buffer)",
        ),
        (f"slime:{folder}/other.py:generate_rollout", "cannot import name 'generate_rollout'"),
    ):
        (problem,) = [each for each in function_problems(topology_with(rollout={"custom_rollout": name}))]
        assert (problem.key, said in problem.message) == ("rollout.custom_rollout", True), problem.message
    mixed = (f"rollout.custom_rollout=slime:{folder}/mine.py:one_by_one", "rollout.custom_generate=m:f")
    with pytest.raises(TopologyError, match="must be a function of slime too"):
        load_topology(ROOT / "topologies/laptop.toml", mixed)
