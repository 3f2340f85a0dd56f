"""A user's generate function through a rollout actor: several turns, resumed where they were, bounded in any case."""

from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from messages import (
    ColumnPublished,
    EvalCompleted,
    EvalRequested,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    RolloutRequested,
    RoundHalted,
    SampleStatus,
    SampleSummary,
    SamplingParams,
    ScoreRequested,
    Segment,
    SegmentsPublished,
    StatsGiven,
    StatsRequested,
    UserFunctionRaised,
)
from runtime.bus.bus import Bus
from runtime.settings.topology import Topology
from tests.actors.rollout.samples.generate_functions import RUNS
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.checks import function_problems
from tests.support.rollout import announcement, completed, grade, next_event, rollout_actor, task
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio

FUNCTIONS = Path(__file__).with_name("generate_functions.py")


def with_function(name: str, **others: Any) -> Topology:
    generate = f"tests.actors.rollout.samples.generate_functions:{name}"
    return topology_with(rollout={"custom_generate": generate}, **others)


def one_sample(
    *, max_new_tokens: int = 900, carried: tuple[SampleSummary, ...] = (), **of_task: Any
) -> RolloutRequested:
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    return msgspec.structs.replace(task(0, carried=carried, **of_task), sampling=sampling, num_samples=1)


async def segments_of(bus: Bus, sample: SampleSummary) -> list[Segment]:
    return [(await bus.fetch(SegmentsPublished, ref.seq)).segments[ref.position] for ref in sample.segments]


async def test_turns_are_segments_and_what_stands_between_them_does_not_train(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], with_function("calculator")):
            await bus.publish(announcement(1))
            await bus.publish(one_sample())
            event = await completed(bus)
        group.cancel_scope.cancel()
    (sample,) = event.samples
    turn, first, second = [1, 2, 3, 4], [60, 61], [61, 62]
    segments = await segments_of(bus, sample)
    assert [segment.prompt_ids.tolist() for segment in segments] == [[7, 8], first, second]
    assert [segment.response_ids.tolist() for segment in segments] == [turn] * 3
    assert [request["input_ids"] for request in engine.requests] == [
        [7, 8],
        [7, 8, *turn, *first],
        [7, 8, *turn, *first, *turn, *second],
    ]
    assert {tuple(request["sampling_params"]["stop"]) for request in engine.requests} == {(".",)}
    assert (sample.status, sample.response_len, sample.reward) == (SampleStatus.COMPLETED, 16, 1.0)
    assert sample.metadata == {"last": "1 2 3 4", "label": "1", "num_turns": 3}


@pytest.mark.parametrize(
    ("function", "first"), [("calculator", [7, 8]), ("calculator_with_another_prompt", [50, 51, 52])]
)
async def test_a_halted_conversation_goes_on_in_another_process_in_the_turn_where_it_was(
    bus: Bus, router_url: str, function: str, first: list[int]
) -> None:
    """Its function runs again; the first turn is returned without an engine, the second one continued."""
    engine = ScriptedEngine()
    RUNS.clear()

    def script(prompt: list[int], params: dict[str, Any]) -> list[int]:
        engine.hold = len(engine.requests) == 2
        return [1, 2, 3, 4] if len(prompt) <= len(first) + 6 else [5, 6]

    engine.script = script
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], with_function(function)):
            await bus.publish(announcement(1))
            await bus.publish(one_sample())
            await engine.wait_for_streams(2)
            await bus.publish(RoundHalted(incarnation=1, round=0))
            aborted, _ = await next_event(bus, GroupAborted)
            assert isinstance(aborted, GroupAborted)
        async with rollout_actor(bus, router_url, [engine], with_function(function)):
            await bus.publish(one_sample(attempt=1, round=1, carried=aborted.samples))
            event = await completed(bus)
        group.cancel_scope.cancel()
    (halted,) = aborted.samples
    assert (halted.status, halted.metadata["num_turns"]) == (SampleStatus.ABORTED, 1)
    assert len(RUNS) == 2
    assert len(engine.requests) == 4  # two of the first run, and no third first turn
    (sample,) = event.samples
    segments = await segments_of(bus, sample)
    ids = [token for segment in segments for token in (*segment.prompt_ids.tolist(), *segment.response_ids.tolist())]
    assert engine.requests[2]["input_ids"] == ids[: len(engine.requests[2]["input_ids"])]
    assert engine.requests[3]["input_ids"] == ids[: len(engine.requests[3]["input_ids"])]
    assert [segment.prompt_ids.tolist() for segment in segments if len(segment.prompt_ids)] == [
        first,
        [60, 61],
        [61, 62],
    ]
    assert (sample.status, sample.prompt_len, sample.metadata["num_turns"]) == (SampleStatus.COMPLETED, len(first), 3)


async def test_a_function_gets_the_grade_of_a_draft(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], with_function("grades_its_draft")):
            await bus.publish(announcement(1))
            await bus.publish(one_sample())
            event = await completed(bus)
        group.cancel_scope.cancel()
    assert event.samples[0].reward == 1.25  # 1 of the grader


async def test_a_function_rewards_its_turns_at_their_last_tokens(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine()) as engine:
        topology = with_function("rewards_its_turns", reward={"per": "turn"})
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            await bus.publish(one_sample())
            event = await completed(bus)
            (sample,) = event.samples
            column = await bus.fetch(ColumnPublished, sample.columns["token_rewards"])
    assert (sample.status, sample.reward) == (SampleStatus.COMPLETED, 0.75)
    assert column.values.tolist() == [0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.25]  # 4 + 1 + 4 + 1 + 4 tokens


@pytest.mark.parametrize(
    ("function", "per", "reason"),
    [
        ("rewards_more_turns_than_it_has", "turn", "2 turn_rewards for 1 turns"),
        ("rewards_its_turns", "sample", 'rewards per token, and reward.per is "sample"'),
    ],
)
async def test_rewards_of_turns_that_cannot_train_fail_their_sample_by_name(
    function: str, per: str, reason: str, bus: Bus, router_url: str
) -> None:
    async with serving(ScriptedEngine()) as engine:
        async with rollout_actor(bus, router_url, [engine], with_function(function, reward={"per": per})):
            await bus.publish(announcement(1))
            await bus.publish(one_sample())
            event, _ = await next_event(bus, GroupFailed, GroupCompleted)
    assert isinstance(event, GroupFailed)
    assert reason in event.reason


async def test_a_conversation_without_end_is_truncated_where_there_is_no_more_room(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], with_function("chatters_without_end")):
            await bus.publish(announcement(1))
            await bus.publish(one_sample(max_new_tokens=12))
            event, _ = await next_event(bus, GroupCompleted)
        group.cancel_scope.cancel()
    assert isinstance(event, GroupCompleted)
    (sample,) = event.samples
    assert (sample.status, sample.response_len, sample.reward) == (SampleStatus.TRUNCATED, 12, 1.0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "KeyError('no such tool')"),
        ("exits", "SystemExit(3)"),
        ("awaits_what_was_cancelled", "CancelledError()"),
        ("hangs", "took more than 0.3 s outside of generate"),
        ("talks_twice_in_a_row", "two turns in a row"),
        ("returns_its_text", "returns_its_text returned '1 2 3 4'; expected nothing: what it does with its"),
        ("never_asks", "ended without a turn of the model: it never awaited generate"),
        ("asks_for_nothing", "max_new_tokens = 0: a turn has at least 1 token"),
        ("stops_at_letters", "stop = '</add>': write a list of texts"),
        ("stops_at_nothing", "stop text '': an empty one ends each response at its first token"),
        ("appends_a_number", "append(5): expected a str"),
        ("appends_letters_as_ids", "'str' object cannot be interpreted as an integer"),
        ("appends_what_is_no_token", "1000000 is not a token of the model, whose vocabulary has 1000000"),
        ("talks_twice_at_once", "two turns at the same time"),
        ("leaves_a_turn", "ended without a turn of the model"),
        ("notes_what_no_message_can_carry", "sample_metadata cannot be sent"),
    ],
)
async def test_a_function_that_fails_costs_its_group_alone(bus: Bus, router_url: str, name: str, reason: str) -> None:
    topology = with_function(name)
    rollout = msgspec.structs.replace(topology.rollout, custom_generate_timeout_s=0.3)
    async with (
        serving(ScriptedEngine()) as engine,
        rollout_actor(bus, router_url, [engine], msgspec.structs.replace(topology, rollout=rollout)),
    ):
        await bus.publish(announcement(1))
        await bus.publish(one_sample())
        failed, _ = await next_event(bus, GroupFailed)
    assert isinstance(failed, GroupFailed)
    assert "rollout.custom_generate" in failed.reason
    assert reason in failed.reason


@pytest.mark.parametrize(
    ("name", "problem"), [("plain", "write `async def`"), ("chatter", "there is no 'chatter' in it")]
)
def test_a_function_that_cannot_be_used_is_refused_before_the_start(name: str, problem: str) -> None:
    topology = topology_with(rollout={"custom_generate": f"{FUNCTIONS}:{name}"})
    (found,) = [found for found in function_problems(topology) if found.key == "rollout.custom_generate"]
    assert problem in found.message


async def test_an_evaluation_set_may_have_a_function_of_its_own(bus: Bus, router_url: str) -> None:
    """Training samples and the other set have that of the rollout."""
    sets = [{"name": name, "path": "none", "interval": 1} for name in ("own", "other")]
    own = "tests.actors.rollout.samples.generate_functions:talks_once"
    topology = with_function("calculator", eval=[{**sets[0], "custom_generate": own}, sets[1]])
    prompt, turns, seq = one_sample(), dict[str, int](), 0
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            for name in ("own", "other"):
                evaluation = EvalRequested(
                    step=0, set=name, item=0, version=1, prompt=prompt.prompt, num_samples=1, sampling=prompt.sampling
                )
                await bus.publish(evaluation)
                _, seq = await next_event(bus, EvalCompleted, from_seq=seq + 1)
                turns[name] = len(engine.requests) - sum(turns.values())
        group.cancel_scope.cancel()
    assert turns == {"own": 1, "other": 3}


async def test_errors_of_an_evaluation_name_the_key_of_its_function(bus: Bus, router_url: str) -> None:
    sets = [{"name": name, "path": "none", "interval": 1} for name in ("other", "own")]
    own = "tests.actors.rollout.samples.generate_functions:raises"
    topology = topology_with(eval=[sets[0], {**sets[1], "custom_generate": own}])
    prompt = one_sample()
    asked = EvalRequested(
        step=0, set="own", item=0, version=1, prompt=prompt.prompt, num_samples=1, sampling=prompt.sampling
    )
    async with serving(ScriptedEngine()) as engine, rollout_actor(bus, router_url, [engine], topology):
        await bus.publish(announcement(1))
        await bus.publish(asked)
        raised, _ = await next_event(bus, UserFunctionRaised)
        ended, _ = await next_event(bus, EvalCompleted)
    assert isinstance(raised, UserFunctionRaised)
    assert raised.function == "eval.1.custom_generate"
    assert isinstance(ended, EvalCompleted)
    assert [(s.status, s.reward) for s in ended.samples] == [(SampleStatus.FAILED, None)]
    assert str(ended.samples[0].reason).startswith("eval.1.custom_generate: ")


async def test_a_stall_names_the_key_of_the_function_that_generates_nothing(bus: Bus, router_url: str) -> None:
    sets = [{"name": "own", "path": "none", "interval": 1, "custom_generate": f"{FUNCTIONS}:hangs"}]
    prompt = one_sample()
    asked = EvalRequested(
        step=0, set="own", item=0, version=1, prompt=prompt.prompt, num_samples=1, sampling=prompt.sampling
    )

    async def is_named() -> bool:
        given = await bus.call("rollout", StatsRequested(), StatsGiven, timeout_s=5)
        return "eval.0.custom_generate, outside of generate and grade in 1 sample" in given.waits_for

    topology = topology_with(eval=sets)
    async with serving(ScriptedEngine()) as engine, rollout_actor(bus, router_url, [engine], topology):
        await bus.publish(announcement(1))
        await bus.publish(asked)
        await eventually(is_named)


def test_the_check_names_the_key_of_a_set() -> None:
    sets = [{"name": "own", "path": "none", "interval": 1}]
    wrong = topology_with(eval=[{**sets[0], "custom_generate": f"{FUNCTIONS}:plain"}])
    assert "eval.0.custom_generate" in {problem.key for problem in function_problems(wrong)}


async def test_notes_that_fit_no_event_cost_their_group_and_not_the_actor(bus: Bus, router_url: str) -> None:
    training = one_sample()
    evaluation = EvalRequested(
        step=0, set="s", item=0, version=1, prompt=training.prompt, num_samples=1, sampling=training.sampling
    )
    async with (
        serving(ScriptedEngine()) as engine,
        rollout_actor(bus, router_url, [engine], with_function("notes_too_much")),
    ):
        await bus.publish(announcement(1))
        await bus.publish(evaluation)
        evaluated, _ = await next_event(bus, EvalCompleted)
        await bus.publish(training)
        failed, _ = await next_event(bus, GroupFailed)
    assert isinstance(evaluated, EvalCompleted)
    assert [sample.reward for sample in evaluated.samples] == [None]
    assert isinstance(failed, GroupFailed)
    assert "sample_metadata has 9000012 bytes as JSON; allowed: at most 65536" in failed.reason


async def test_a_sample_that_waits_for_its_score_alone_is_scored_with_all_that_it_has(
    bus: Bus, router_url: str
) -> None:
    asked = with_function("uses_a_tool", reward={"sample_fields": ("prompt_ids", "tokens", "log_probs", "turns")})
    async with (
        serving(ScriptedEngine()) as engine,
        rollout_actor(bus, router_url, [engine], asked),
        bus.consume(ScoreRequested, durable="reward") as requests,
    ):
        await bus.publish(announcement(1))
        await bus.publish(one_sample())
        first = await requests.next(10)
        assert first is not None
        await bus.publish(RoundHalted(incarnation=1, round=0))
        aborted, _ = await next_event(bus, GroupAborted)
        assert isinstance(aborted, GroupAborted)
        await bus.publish(one_sample(attempt=1, round=1, carried=aborted.samples))
        second = await requests.next(10)
        assert second is not None
    assert first.message.items[0].response == "1 2 3 4 (sixty) 1 2 3 4"
    assert len(engine.requests) == 2
    for request in (first.message, second.message):
        (item,) = request.items
        assert isinstance(item.turns, tuple)
        assert item.prompt_ids.tolist() == [7, 8]
        assert [item.tokens[turn.start : turn.end].tolist() for turn in item.turns] == [[1, 2, 3, 4]] * 2
        assert [turn.text for turn in item.turns] == ["1 2 3 4"] * 2
        assert (item.turns[0].start, item.turns[1].end, item.response_len) == (0, len(item.tokens), len(item.tokens))
        between = item.log_probs[item.turns[0].end : item.turns[1].start]
        assert (between == 0).all()
        assert item.sample_metadata == {"num_turns": 2}


async def test_a_grader_gets_what_a_generate_function_noted_and_no_more_unless_asked(bus: Bus, router_url: str) -> None:
    async with (
        serving(ScriptedEngine()) as engine,
        rollout_actor(bus, router_url, [engine], with_function("calculator")),
        bus.consume(ScoreRequested, durable="reward") as requests,
    ):
        await bus.publish(announcement(1))
        await bus.publish(one_sample())
        request = await requests.next(10)
        assert request is not None
    (item,) = request.message.items
    assert item.sample_metadata == {"last": "1 2 3 4", "label": "1", "num_turns": 3}
    assert item.prompt_ids is item.tokens is item.log_probs is item.turns is msgspec.UNSET
