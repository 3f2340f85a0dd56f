"""What a generate function decides of its sample: reward, end, what trains, further conversations; and its replays."""

from typing import Any

import anyio
import msgspec
import pytest

from messages import (
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    Message,
    RoundHalted,
    SampleStatus,
    SampleSummary,
    with_untrained,
)
from runtime.bus.bus import Bus
from tests.actors.rollout.samples.generate_functions import RUNS, SCOPES
from tests.actors.rollout.samples.test_conversation import one_sample, segments_of, with_function
from tests.support.rollout import announcement, grade, next_event, rollout_actor
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio
TURN = [1, 2, 3, 4]  # every answer of a scripted engine


@pytest.fixture(autouse=True)
def no_runs() -> None:
    RUNS.clear()


async def ending(
    bus: Bus, router_url: str, name: str, *, num_samples: int = 1, graded: bool = False
) -> tuple[Message, ScriptedEngine]:
    """Run one task with a generate function; return the event that ends it."""
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        if graded:
            group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], with_function(name)):
            await bus.publish(announcement(1))
            await bus.publish(msgspec.structs.replace(one_sample(), num_samples=num_samples))
            event, _ = await next_event(bus, GroupCompleted, GroupAborted, GroupFailed)
        group.cancel_scope.cancel()
        return event, engine
    raise AssertionError


async def resumed(
    bus: Bus, router_url: str, name: str, *, held: int, graded: bool = True
) -> tuple[Message, ScriptedEngine]:
    """Halt a task during its request number `held`, and run it again with what it had, in another process."""
    engine = ScriptedEngine()

    def script(prompt: list[int], params: dict[str, Any]) -> list[int]:
        engine.hold = len(engine.requests) == held
        return TURN

    engine.script = script
    async with serving(engine), anyio.create_task_group() as group:
        if graded:
            group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], with_function(name)):
            await bus.publish(announcement(1))
            await bus.publish(one_sample())
            await engine.wait_for_streams(held)
            await bus.publish(RoundHalted(incarnation=1, round=0))
            aborted, _ = await next_event(bus, GroupAborted)
            assert isinstance(aborted, GroupAborted)
        async with rollout_actor(bus, router_url, [engine], with_function(name)):
            await bus.publish(one_sample(attempt=1, round=1, carried=aborted.samples))
            event, _ = await next_event(bus, GroupCompleted, GroupFailed)
        group.cancel_scope.cancel()
        return event, engine
    raise AssertionError


async def tokens_of(bus: Bus, sample: SampleSummary) -> list[list[int]]:
    """Return inputs and responses of a sample's segments in turns."""
    return [
        ids.tolist() for segment in await segments_of(bus, sample) for ids in (segment.prompt_ids, segment.response_ids)
    ]


async def test_a_function_sets_reward_status_and_what_trains(bus: Bus, router_url: str) -> None:
    """No grader is there to be asked."""
    event, _ = await ending(bus, router_url, "decides_alone")
    assert isinstance(event, GroupCompleted)
    (sample,) = event.samples
    assert (sample.status, sample.reward, sample.own_reward) == (SampleStatus.TRUNCATED, 0.25, True)
    assert sample.untrained == ((5, 9), (11, 13))
    masks = [segment.loss_mask.tolist() for segment in with_untrained(await segments_of(bus, sample), sample.untrained)]
    assert masks == [[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 1]]


async def test_a_sample_that_a_function_fails_costs_itself_alone(bus: Bus, router_url: str) -> None:
    event, _ = await ending(bus, router_url, "fails_first", num_samples=2, graded=True)
    assert isinstance(event, GroupCompleted)
    failed, other = sorted(event.samples, key=lambda sample: sample.status is SampleStatus.COMPLETED)
    assert (failed.status, failed.reason) == (SampleStatus.FAILED, "rollout.custom_generate: no such page")
    assert (other.status, other.reward, other.own_reward) == (SampleStatus.COMPLETED, 1.0, False)


async def test_a_group_of_failed_samples_fails_with_their_reason(bus: Bus, router_url: str) -> None:
    event, _ = await ending(bus, router_url, "always_fails", num_samples=2)
    assert isinstance(event, GroupFailed)
    assert event.reason == "rollout.custom_generate: no such page"


async def test_an_aborted_sample_starts_again_from_its_prompt_three_times_at_most(bus: Bus, router_url: str) -> None:
    event, engine = await ending(bus, router_url, "aborts")
    assert isinstance(event, GroupFailed)
    assert event.reason == "rollout.custom_generate: aborted 3 times, last: the shop is closed"
    assert len(RUNS) == 3
    assert [request["input_ids"] for request in engine.requests] == [[7, 8], [7, 8, *TURN, 60]] * 3


async def test_a_tool_that_answers_otherwise_in_a_replay_starts_the_sample_again(bus: Bus, router_url: str) -> None:
    """The first run has seen token 61, the second 62: so there is a third, from the prompt, which sees 63."""
    event, engine = await resumed(bus, router_url, "changes_its_mind", held=3)
    assert isinstance(event, GroupCompleted)
    (sample,) = event.samples
    assert len(RUNS) == 3
    assert await tokens_of(bus, sample) == [[7, 8], TURN, [63], TURN, [63], TURN]
    assert engine.requests[3]["input_ids"] == [7, 8]
    assert sample.metadata == {"num_turns": 3}


async def test_a_function_marked_deterministic_fails_its_sample_with_both_values(bus: Bus, router_url: str) -> None:
    event, _ = await resumed(bus, router_url, "promises_too_much", held=3)
    assert isinstance(event, GroupFailed)
    assert "marked deterministic" in event.reason
    assert "input before turn 2: [61], now [62]" in event.reason


async def test_further_conversations_are_parts_of_the_sample_with_contexts_of_their_own(
    bus: Bus, router_url: str
) -> None:
    event, engine = await ending(bus, router_url, "delegates", graded=True)
    assert isinstance(event, GroupCompleted)
    first, helper, rest = event.samples
    assert [(sample.index, sample.part) for sample in event.samples] == [(0, 0), (0, 1), (0, 2)]
    assert await tokens_of(bus, first) == [[7, 8], TURN, [1], TURN]
    assert await tokens_of(bus, helper) == [[20, 21], TURN]
    assert await tokens_of(bus, rest) == [[7, 3, 4], TURN]
    assert [request["input_ids"] for request in engine.requests] == [
        [7, 8],
        [20, 21],
        [7, 3, 4],
        [7, 8, *TURN, 1],
    ]
    assert [(sample.reward, sample.own_reward) for sample in event.samples] == [(1.0, False), (0.5, True), (1.0, False)]
    assert [sample.prompt_len for sample in event.samples] == [2, 2, 3]
    assert helper.metadata == {"role": "helper", "num_turns": 1}
    assert len({request["sampling_params"]["sampling_seed"] for request in engine.requests}) == 3  # one a conversation


async def test_a_halted_sample_goes_on_with_all_its_conversations(bus: Bus, router_url: str) -> None:
    event, engine = await resumed(bus, router_url, "delegates", held=3)
    assert isinstance(event, GroupCompleted)
    first, helper, rest = event.samples
    assert len(RUNS) == 2
    assert await tokens_of(bus, first) == [[7, 8], TURN, [1], TURN]
    assert await tokens_of(bus, helper) == [[20, 21], TURN]
    assert await tokens_of(bus, rest) == [[7, 3, 4], [1, 2], [], TURN]  # two tokens came before the halt
    assert [request["input_ids"] for request in engine.requests].count([20, 21]) == 1


async def test_a_service_gives_tokens_in_place_of_an_engine_and_is_not_asked_again(bus: Bus, router_url: str) -> None:
    event, engine = await resumed(bus, router_url, "asks_a_service", held=1)
    assert isinstance(event, GroupCompleted)
    (sample,) = event.samples
    assert RUNS == ["p", "service [7, 8]", "p"]
    segments = await segments_of(bus, sample)
    assert segments[0].response_ids.tolist() == [30, 31]
    assert segments[0].rollout_log_probs.tolist() == [-0.5, -0.25]
    assert [(span.version, span.start, span.end) for span in segments[0].weight_spans] == [(0, 0, 2)]
    assert segments[0].text == "ab"
    assert engine.requests[0]["input_ids"] == [7, 8, 30, 31, 60]


async def test_a_turn_of_a_service_is_stored_with_the_input_before_it(bus: Bus, router_url: str) -> None:
    event, engine = await resumed(bus, router_url, "asks_a_service_in_between", held=2)
    assert isinstance(event, GroupCompleted)
    (sample,) = event.samples
    assert RUNS == [f"service {[7, 8, *TURN, 60]}"]
    stored = await tokens_of(bus, sample)
    assert stored[:5] == [[7, 8], TURN, [60], [30, 31], [61]]
    assert [token for ids in stored for token in ids] == [7, 8, *TURN, 60, 30, 31, 61, 1, 2, *TURN]
    assert engine.requests[1]["input_ids"] == [7, 8, *TURN, 60, 30, 31, 61]
    assert sample.untrained == ((5, 7),)
    assert sample.metadata == {"num_turns": 3}
    assert (sample.first_version, sample.last_version) == (1, 1)  # a service has no weights that could be too old


async def test_a_turn_that_a_function_gave_up_leaves_no_tokens(bus: Bus, router_url: str) -> None:
    """Two tokens of its first request have come."""
    engine = ScriptedEngine()

    def script(prompt: list[int], params: dict[str, Any]) -> list[int]:
        engine.hold = len(engine.requests) == 1
        return TURN

    engine.script = script
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], with_function("tries_a_turn_twice")):
            await bus.publish(announcement(1))
            await bus.publish(one_sample())
            await engine.wait_for_streams(1)
            await anyio.wait_all_tasks_blocked()
            SCOPES.pop().cancel()
            event, _ = await next_event(bus, GroupCompleted, GroupFailed)
        group.cancel_scope.cancel()
    assert isinstance(event, GroupCompleted)
    (sample,) = event.samples
    assert await tokens_of(bus, sample) == [[7, 8], TURN]
    assert [request["input_ids"] for request in engine.requests] == [[7, 8], [7, 8]]


async def test_a_service_without_log_probs_is_told_what_to_set(bus: Bus, router_url: str) -> None:
    event, _ = await ending(bus, router_url, "asks_a_service_without_log_probs")
    assert isinstance(event, GroupFailed)
    assert "give them, or set train=False" in event.reason


async def test_the_temperature_of_a_turn_is_recorded_and_a_greedy_turn_does_not_train(
    bus: Bus, router_url: str
) -> None:
    event, engine = await ending(bus, router_url, "plans_greedily", graded=True)
    assert isinstance(event, GroupCompleted)
    (sample,) = event.samples
    temperatures = [segment.temperature for segment in await segments_of(bus, sample)]
    assert [request["sampling_params"]["temperature"] for request in engine.requests] == [0.0, 0.5]
    assert sample.untrained == ((0, 4),)
    assert sample.metadata == {"num_turns": 2}
    assert temperatures == [0.0, 0.5]


async def test_greedy_tokens_never_train_after_a_replay(bus: Bus, router_url: str) -> None:
    """The second run would train the greedy tokens of the first: the third begins from the prompt."""
    event, engine = await resumed(bus, router_url, "plans_greedily", held=2)
    assert isinstance(event, GroupCompleted)
    (sample,) = event.samples
    assert len(RUNS) == 3
    assert [request["sampling_params"]["temperature"] for request in engine.requests] == [0.0, 0.5, 0.0, 0.5]
    assert sample.untrained == ((0, 4),)
