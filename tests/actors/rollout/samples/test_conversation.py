"""A user's generate function through a rollout actor: several turns, resumed where they were, bounded in any case."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from actors.hooks import check_hooks
from actors.rollout.samples.conversation import Conversation
from actors.rollout.samples.sample import OpenSample, Turn
from actors.rollout.sglang.errors import EngineUnavailable
from messages import (
    EvalCompleted,
    EvalRequested,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    RolloutRequested,
    RoundHalted,
    SampleKey,
    SampleStatus,
    SampleSummary,
    SamplingParams,
    ScoreRequested,
    Segment,
    SegmentsPublished,
)
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.settings.topology import Topology
from tests.actors.rollout.samples.generate_functions import RUNS
from tests.build.topology import topology_with
from tests.support.any_tokens import AnyTokens
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
async def test_a_halted_conversation_goes_on_in_the_turn_where_it_was(
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
        ("hangs", "took more than 0.3 s outside of generate"),
        ("talks_twice_in_a_row", "two turns in a row"),
        ("never_asks", "ended without a turn of the model: it never called generate"),
        ("asks_for_nothing", "max_new_tokens = 0: a turn has at least 1 token"),
        ("stops_at_letters", "stop = '</add>': write a list of texts"),
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
    (found,) = [found for found in check_hooks(topology) if found.key == "rollout.custom_generate"]
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
    wrong = topology_with(eval=[{**sets[0], "custom_generate": f"{FUNCTIONS}:plain"}])
    assert "eval.0.custom_generate" in {problem.key for problem in check_hooks(wrong)}


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
    asked = with_function("uses_a_tool", reward={"sample_fields": ("tokens", "log_probs", "turns")})
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
    assert item.tokens is item.log_probs is item.turns is msgspec.UNSET


def two_turns() -> OpenSample:
    """A sample of two turns that ended, carried on from an earlier attempt."""
    turns = [Turn(num_tokens=1, text="a"), Turn(num_tokens=1, text="b")]
    return OpenSample(index=0, prompt_len=2, turns=turns, metadata={"num_turns": 2})


async def ask_nobody(sample: OpenSample, params: SamplingParams, limit: int) -> bool:
    raise AssertionError("an engine was asked")


async def test_a_replay_that_is_halted_forgets_no_turn() -> None:
    reached = anyio.Event()

    async def waits_between_turns(talk: Conversation) -> None:
        await talk.generate()
        reached.set()
        await anyio.sleep_forever()

    sample = two_turns()
    talk = Conversation(
        task(0).prompt, sample, params=SamplingParams(max_new_tokens=9), ask=ask_nobody, model=AnyTokens()
    )
    async with anyio.create_task_group() as group:

        async def run() -> None:
            assert await talk.run(waits_between_turns) is SampleStatus.ABORTED

        group.start_soon(run)
        await reached.wait()
        assert sample.metadata["num_turns"] == 2  # so a spill says, too
        talk.halt()
    assert sample.metadata["num_turns"] == 2


@pytest.mark.parametrize(("waits", "status"), [(True, SampleStatus.ABORTED), (False, SampleStatus.COMPLETED)])
async def test_a_halt_during_a_turn_ends_the_function_where_it_next_waits(waits: bool, status: SampleStatus) -> None:
    sample = OpenSample(index=0, prompt_len=2)

    async def ask(sample: OpenSample, params: SamplingParams, limit: int) -> bool:
        talk.halt()
        sample.turn_status = SampleStatus.COMPLETED
        return False

    async def function(talk: Conversation) -> None:
        await talk.generate()
        if waits:
            await anyio.sleep_forever()

    talk = Conversation(task(0).prompt, sample, params=SamplingParams(max_new_tokens=9), ask=ask, model=AnyTokens())
    with anyio.fail_after(5):
        assert await talk.run(function) is status
    assert sample.metadata["num_turns"] == 1


class Answers:
    """An engine whose first calls do what a test says. All others answer with one token."""

    def __init__(self, *calls: str) -> None:
        self.calls = list(calls)
        self.params: list[SamplingParams] = []  # of its requests
        self.asked = anyio.Event()

    async def __call__(self, sample: OpenSample, params: SamplingParams, limit: int) -> bool:
        call = self.calls.pop(0) if self.calls else "answers"
        self.params.append(params)
        if call == "fails":
            raise EngineUnavailable("no engine")
        if call != "hangs":
            await self.keep(sample)
        if call != "answers":
            self.asked.set()
            await anyio.sleep_forever()
        sample.turn_status = SampleStatus.COMPLETED
        return False

    async def keep(self, sample: OpenSample) -> None:
        sample.buffer.append_input(sample.pending)
        sample.buffer.append(np.array([5]), np.array([-1.0]), "e", "1@engine")
        sample.take(SampleKey(group_id=0, attempt=0, index=0), sample.prompt_of(task(0).prompt.prompt_ids))


def conversation(answers: Answers, *, max_tokens: int = 9, limit_s: float = 5.0) -> tuple[Conversation, OpenSample]:
    sample = OpenSample(index=0, prompt_len=2)
    talk = Conversation(
        task(0).prompt,
        sample,
        params=SamplingParams(max_new_tokens=max_tokens),
        ask=answers,
        model=AnyTokens(),
        keep=answers.keep,
        limit_s=limit_s,
    )
    return talk, sample


async def waits_after_a_turn_that_it_gave_up(talk: Conversation) -> None:
    with anyio.move_on_after(0.01):
        await talk.generate()
    await anyio.sleep_forever()


@pytest.mark.parametrize("call", ["hangs", "begins"])
async def test_after_a_turn_that_a_function_gave_up_its_time_counts_again(call: str) -> None:
    talk, _ = conversation(Answers(call), limit_s=0.05)
    with anyio.fail_after(5), pytest.raises(ValueError, match=r"took more than 0\.05 s outside of generate"):
        await talk.run(waits_after_a_turn_that_it_gave_up)


async def test_a_halt_during_a_turn_that_is_given_up_ends_the_function() -> None:
    answers = Answers("hangs")
    talk, _ = conversation(answers)
    with anyio.fail_after(2):
        async with anyio.create_task_group() as group:

            async def run() -> None:
                assert await talk.run(waits_after_a_turn_that_it_gave_up) is SampleStatus.ABORTED

            group.start_soon(run)
            await answers.asked.wait()
            talk.halt()


async def test_a_turn_that_was_cut_off_goes_on() -> None:
    """Otherwise the sample would end in the middle of it."""

    async def goes_on(talk: Conversation) -> None:
        with anyio.move_on_after(0.01):
            await talk.generate()
        if waits:
            assert await talk.generate() == "ee"

    waits = True
    talk, sample = conversation(Answers("begins"))
    assert await talk.run(goes_on) is SampleStatus.COMPLETED
    assert sample.buffer.ids.tolist() == [5, 5]
    waits = False
    talk, _ = conversation(Answers("begins"))
    with pytest.raises(ValueError, match="ended in the middle of a turn"):
        await talk.run(goes_on)


async def test_a_turn_whose_call_failed_has_not_begun() -> None:
    async def service(ids: list[int]) -> tuple[list[int], list[float]]:
        if len(ids) == 2:
            raise OSError("no service")
        raise AssertionError

    async def uses_what_answers(talk: Conversation) -> None:
        with pytest.raises(OSError, match="no service"):
            await talk.generate_by(service)
        with pytest.raises(EngineUnavailable):
            await talk.generate(temperature=0.0)
        await talk.generate(temperature=0.5)
        talk.append_ids([60])
        with pytest.raises(EngineUnavailable):
            await talk.generate(temperature=0.5)
        await talk.generate()

    answers = Answers("fails", "answers", "fails")
    talk, sample = conversation(answers)
    assert await talk.run(uses_what_answers) is SampleStatus.COMPLETED
    assert sample.metadata == {"num_turns": 2}
    assert [turn.temperature for turn in sample.turns] == [0.5, None]
    assert sample.buffer.ids.tolist() == [5, 60, 5]


CUT = {"top_p": 0.9, "top_k": 50}
LISTED = CUT | {"return_sampling_mask": True}
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "return_sampling_mask": False}


@pytest.mark.parametrize(
    ("recipe", "own", "sent", "trains"),
    [
        ({}, {"temperature": 0.5}, {"temperature": 0.5}, True),
        ({}, {"temperature": 0.0, "top_p": 0.5}, GREEDY, False),
        ({}, {"top_p": 0.5}, {"top_p": 0.5}, False),  # the engine's log-probs are those of all tokens
        ({}, {"top_k": 5}, {"top_k": 5}, False),
        (CUT, {"temperature": 0.5}, CUT | {"temperature": 0.5}, True),
        (CUT, {"top_p": 1.0, "top_k": -1}, {"top_p": 1.0, "top_k": -1}, True),
        (CUT, {"top_p": 1.0}, {"top_p": 1.0, "top_k": 50}, False),
        (LISTED, {"top_p": 0.5, "top_k": 5}, {"top_p": 0.5, "top_k": 5, "return_sampling_mask": True}, True),
        (LISTED, {"top_k": 51}, {"top_p": 0.9, "top_k": 51, "return_sampling_mask": False}, False),
        (LISTED, {"top_k": 1}, {"top_p": 0.9, "top_k": 1, "return_sampling_mask": False}, False),
        (LISTED, {"top_k": -1}, {"top_p": 0.9, "top_k": -1, "return_sampling_mask": False}, False),
    ],
)
async def test_a_turn_trains_if_its_log_probs_are_of_the_distribution_it_came_from(
    recipe: dict[str, Any], own: dict[str, Any], sent: dict[str, Any], trains: bool
) -> None:
    async def function(talk: Conversation) -> None:
        await talk.generate(**own)

    answers, params = Answers(), SamplingParams(max_new_tokens=9, **recipe)
    sample = OpenSample(index=0, prompt_len=2)
    talk = Conversation(task(0).prompt, sample, params=params, ask=answers, model=AnyTokens())
    assert await talk.run(function) is SampleStatus.COMPLETED
    assert answers.params == [SamplingParams(max_new_tokens=9, **sent)]
    assert sample.untrained == (() if trains else ((0, 1),))


async def test_beside_log_probs_of_pools_a_turn_at_its_own_temperature_does_not_train() -> None:
    """Pools compute them at temperature 1."""

    async def function(talk: Conversation) -> None:
        await talk.generate(temperature=0.5)
        talk.append_ids([60])
        await talk.generate(temperature=1.0)

    sample = OpenSample(index=0, prompt_len=2)
    params = SamplingParams(max_new_tokens=9)
    talk = Conversation(
        task(0).prompt, sample, params=params, ask=Answers(), model=AnyTokens(), trains_temperatures=False
    )
    assert await talk.run(function) is SampleStatus.COMPLETED
    assert sample.untrained == ((0, 1),)


@pytest.mark.parametrize(
    "own",
    [
        *({"temperature": -1.0}, {"temperature": True}, {"temperature": "1"}),
        *({"top_p": 0.0}, {"top_p": 1.5}, {"top_p": True}),
        *({"top_k": 0}, {"top_k": -2}, {"top_k": True}, {"top_k": 2.0}, {"max_new_tokens": True}),
    ],
)
async def test_impossible_sampling_is_refused(own: dict[str, Any]) -> None:
    async def function(talk: Conversation) -> None:
        await talk.generate(**own)

    talk, _ = conversation(Answers())
    with pytest.raises(ValueError, match=f"{next(iter(own))} = "):
        await talk.run(function)


async def test_numbers_of_numpy_become_those_that_messages_carry() -> None:
    async def function(talk: Conversation) -> None:
        numbers: dict[str, Any] = {"temperature": np.float64(0.5), "top_p": np.float32(0.5), "top_k": np.int64(5)}
        await talk.generate(**numbers, max_new_tokens=np.int64(1))  # pyright: ignore[reportArgumentType] - a user's

    answers = Answers()
    talk, sample = conversation(answers)
    assert await talk.run(function) is SampleStatus.COMPLETED
    (params,) = answers.params
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.5, 5)
    assert type(sample.turns[0].temperature) is float


@pytest.mark.parametrize(("text", "reason"), [(["a"], "text(['a']): expected a str"), ("\udc80", "not text in UTF-8")])
async def test_a_response_that_no_message_carries_fails_the_group(text: Any, reason: str) -> None:
    async def function(talk: Conversation) -> None:
        await talk.generate()
        talk.text = text

    talk, _ = conversation(Answers())
    with pytest.raises(ValueError, match=re.escape(reason)):
        await talk.run(function)


async def test_a_prompt_that_graders_cannot_read_is_refused_before_it_is_sent() -> None:
    async def function(talk: Conversation) -> None:
        await talk.generate()
        chat: Any = [{"role": "user", "content": "Who?"}]
        await talk.grade("a draft", chat)

    talk, _ = conversation(Answers())  # its grader raises "there is no grader here"
    with pytest.raises(ValueError, match=re.escape("grade: prompt([{'role': 'user'")):
        await talk.run(function)


async def test_waiting_for_a_grader_is_not_the_time_of_the_function() -> None:
    async def grade_late(text: str, prompt: str | None) -> float:
        assert talk.is_waiting
        await anyio.sleep(0.3)
        return 1.0

    async def function(talk: Conversation) -> None:
        await talk.generate()
        talk.reward = await talk.grade("a draft")
        assert not talk.is_waiting

    sample, params = OpenSample(index=0, prompt_len=2), SamplingParams(max_new_tokens=9)
    model = AnyTokens()
    talk = Conversation(
        task(0).prompt, sample, params=params, ask=Answers(), model=model, grade=grade_late, limit_s=0.1
    )
    assert await talk.run(function) is SampleStatus.COMPLETED
    assert sample.own_score is not None


async def test_a_function_does_not_see_that_the_bus_fails() -> None:
    """If it went on after its turn was not stored, an engine would add to a turn that is complete."""

    async def service(ids: list[int]) -> tuple[list[int], list[float]]:
        return [5], [-1.0]

    async def goes_on(talk: Conversation) -> None:
        with suppress(Exception):
            await talk.generate_by(service)
        with suppress(Exception):
            await talk.generate()

    async def keep(sample: OpenSample) -> None:
        raise BusError("no bus")

    sample, answers = OpenSample(index=0, prompt_len=2), Answers()
    params = SamplingParams(max_new_tokens=9)
    talk = Conversation(task(0).prompt, sample, params=params, ask=answers, model=AnyTokens(), keep=keep)
    with pytest.raises(BusError, match="no bus"):
        await talk.run(goes_on)
    assert answers.params == []


async def sets_rewards(talk: Conversation) -> None:
    talk.rewards["format"] = 1.0
    await talk.generate()
    talk.append_ids([60])
    await talk.generate()


async def sets_no_number(talk: Conversation) -> None:
    talk.reward = float("nan")
    await talk.generate()


@pytest.mark.parametrize(
    ("function", "max_tokens", "reason"),
    [
        (sets_rewards, 9, "rewards without a reward: set both"),
        (sets_rewards, 2, "rewards without a reward: set both"),  # truncated before the function set it
        (sets_no_number, 9, "the reward 'reward' is nan, not a finite number"),
    ],
)
async def test_a_reward_that_is_none_fails_the_sample(function: Any, max_tokens: int, reason: str) -> None:
    talk, _ = conversation(Answers(), max_tokens=max_tokens)
    assert await talk.run(function) is SampleStatus.FAILED
    assert talk.reason == reason


async def test_a_halted_function_need_not_have_set_its_reward() -> None:
    async def is_halted(talk: Conversation) -> None:
        talk.rewards["format"] = 1.0
        await talk.generate()
        talk.halt()
        await anyio.sleep_forever()

    talk, _ = conversation(Answers())
    assert await talk.run(is_halted) is SampleStatus.ABORTED
