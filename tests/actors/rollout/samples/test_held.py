"""Generate functions live over halts and weight updates: called once, bounded, and never left behind."""

from collections.abc import Iterator
from typing import Any

import anyio
import msgspec
import pytest

from actors.rollout.samples.conversation import Conversation
from actors.rollout.samples.held import Delivery, Episode, Episodes, HeldGroup
from actors.rollout.samples.must_end import gives_up_nothing
from actors.rollout.samples.sample import OpenSample
from messages import (
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupsClosed,
    Message,
    RoundHalted,
    RunFinished,
    SampleStatus,
    SamplingParams,
    SegmentsSpilled,
    StatsGiven,
    StatsRequested,
)
from runtime.bus.bus import Bus
from runtime.settings.topology import Topology
from tests.actors.rollout.samples.test_conversation import one_sample, segments_of
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.any_tokens import AnyTokens
from tests.support.rollout import announcement, completed, grade, next_event, rollout_actor, task, until_applied
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio

HERE = "tests.actors.rollout.samples.test_held"
TURN = [1, 2, 3, 4]
CALLS: list[str] = []  # begins and ends of functions
TOOLS: list[anyio.Event] = []  # that running tools wait for


@pytest.fixture(autouse=True)
def no_calls() -> Iterator[None]:
    CALLS.clear()
    TOOLS.clear()
    yield
    CALLS.clear()


async def talks(conversation: Conversation) -> None:
    """Two turns."""
    CALLS.append("begins")
    try:
        conversation.sample_metadata["first"] = await conversation.generate(max_new_tokens=300)
        conversation.append_ids([60])
        await conversation.generate(max_new_tokens=300)
    finally:
        CALLS.append("ends")


async def uses_a_tool(conversation: Conversation) -> None:
    """A turn, and a tool that takes as long as a test wants."""
    CALLS.append("begins")
    try:
        await conversation.generate()
        TOOLS.append(anyio.Event())
        await TOOLS[-1].wait()
        conversation.reward = 0.25
    finally:
        CALLS.append("ends")


def held_topology(function: str, **rollout: Any) -> Topology:
    return topology_with(rollout={"custom_generate": f"{HERE}:{function}", **rollout})


async def halted(bus: Bus, round: int, seq: int) -> tuple[GroupAborted, int]:
    await bus.publish(RoundHalted(incarnation=1, round=round))
    event, found = await next_event(bus, GroupAborted, GroupCompleted, GroupFailed, from_seq=seq + 1)
    assert isinstance(event, GroupAborted)
    return event, found


async def test_a_function_is_called_once_over_three_halts_and_its_turn_goes_on_with_new_weights(
    bus: Bus, router_url: str
) -> None:
    """The first tokens of the second turn are of version 1, the others of version 2."""
    engine = ScriptedEngine(hold=True)
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], held_topology("talks")):
            await bus.publish(announcement(1))
            await bus.publish(one_sample())
            await engine.wait_for_streams(1)
            engine.release_one()
            await engine.wait_for_streams(2)  # of the second turn
            first, seq = await halted(bus, 0, 0)
            await bus.publish(announcement(2))
            await until_applied(bus, 2)
            await bus.publish(one_sample(attempt=1, round=1, carried=first.samples))
            await engine.wait_for_streams(3)
            second, seq = await halted(bus, 1, seq)
            await bus.publish(one_sample(attempt=2, round=1, carried=second.samples))  # after its halt
            third, seq = await next_event(bus, GroupAborted, from_seq=seq + 1)
            assert isinstance(third, GroupAborted)
            await bus.publish(one_sample(attempt=3, round=2, carried=third.samples))
            await engine.wait_for_streams(4)
            assert CALLS == ["begins"]
            engine.release()
            event = await completed(bus)
        group.cancel_scope.cancel()
    assert CALLS == ["begins", "ends"]
    assert [first.held, second.held, third.held] == [1, 1, msgspec.UNSET]
    (stored,) = first.samples
    assert (stored.status, stored.response_len, stored.metadata) == (
        SampleStatus.ABORTED,
        7,  # a turn, a token of input, and two tokens
        {"first": "1 2 3 4", "num_turns": 1},
    )
    (sample,) = event.samples
    segments = await segments_of(bus, sample)
    ids = [token for segment in segments for token in (*segment.prompt_ids.tolist(), *segment.response_ids.tolist())]
    assert ids == [7, 8, *TURN, 60, 1, 2, 1, 2, *TURN]
    versions = [(span.version, span.end - span.start) for segment in segments for span in segment.weight_spans]
    assert versions == [(1, 4), (1, 2), (2, 2), (2, 4)]
    assert [len(request["input_ids"]) for request in engine.requests] == [2, 7, 9, 11]
    assert (sample.status, sample.reward, sample.metadata["num_turns"]) == (SampleStatus.COMPLETED, 1.0, 2)
    assert (sample.first_version, sample.last_version) == (1, 2)


async def test_a_function_that_works_at_a_halt_is_not_disturbed_and_ends_with_its_group(
    bus: Bus, router_url: str
) -> None:
    async with serving(ScriptedEngine()) as engine:
        async with rollout_actor(bus, router_url, [engine], held_topology("uses_a_tool")):
            await bus.publish(announcement(1))
            await bus.publish(one_sample())
            await eventually(lambda: len(TOOLS) == 1)
            aborted, _ = await halted(bus, 0, 0)
            assert CALLS == ["begins"]
            given = await bus.call("rollout", StatsRequested(), StatsGiven, timeout_s=5)
            assert "the next issue of 1 prompt group (0) with 1 function held" in given.waits_for
            TOOLS[0].set()
            await eventually(lambda: CALLS == ["begins", "ends"])
            await bus.publish(one_sample(attempt=1, round=1, carried=aborted.samples))
            event = await completed(bus)
    assert len(engine.requests) == 1
    (sample,) = event.samples
    assert (sample.status, sample.reward, sample.own_reward, sample.response_len) == (
        SampleStatus.COMPLETED,
        0.25,
        True,
        4,
    )


async def test_a_sample_that_waits_for_its_score_at_a_halt_is_not_generated_again(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        async with rollout_actor(bus, router_url, [engine], held_topology("talks")):
            await bus.publish(announcement(1))
            await bus.publish(one_sample())
            await eventually(lambda: CALLS == ["begins", "ends"])
            aborted, _ = await halted(bus, 0, 0)
            group.start_soon(grade, bus)
            await bus.publish(one_sample(attempt=1, round=1, carried=aborted.samples))
            event = await completed(bus)
        group.cancel_scope.cancel()
    assert CALLS == ["begins", "ends"]
    assert len(engine.requests) == 2
    assert (event.attempt, event.samples[0].reward) == (1, 1.0)


@pytest.mark.parametrize(
    "event",
    [
        GroupsClosed(incarnation=1, group_ids=(0,), outcome="dropped", reason="pool_full"),
        RunFinished(incarnation=1, steps=1, reason="all steps trained"),
    ],
)
async def test_a_function_ends_with_its_group_and_with_the_run(bus: Bus, router_url: str, event: Message) -> None:
    async with serving(ScriptedEngine()) as engine:
        async with rollout_actor(bus, router_url, [engine], held_topology("uses_a_tool")):
            await bus.publish(announcement(1))
            await bus.publish(one_sample())
            await eventually(lambda: len(TOOLS) == 1)
            await halted(bus, 0, 0)
            assert CALLS == ["begins"]
            await bus.publish(event)
            await eventually(lambda: CALLS == ["begins", "ends"])


async def test_a_function_whose_tokens_are_not_those_of_the_task_runs_again(bus: Bus, router_url: str) -> None:
    """As after `rollout.max_token_staleness`, or if another rollout actor has had the group."""
    async with serving(ScriptedEngine()) as engine:
        async with rollout_actor(bus, router_url, [engine], held_topology("uses_a_tool")):
            await bus.publish(announcement(1))
            await bus.publish(one_sample())
            await eventually(lambda: len(TOOLS) == 1)
            await halted(bus, 0, 0)
            await bus.publish(one_sample(attempt=1, round=1, carried=()))
            await eventually(lambda: len(TOOLS) == 2)
            assert CALLS == ["begins", "ends", "begins"]
            TOOLS[1].set()
            event = await completed(bus)
    assert len(engine.requests) == 2
    assert [len(segment.response_ids) for segment in await segments_of(bus, event.samples[0])] == [4]


async def test_without_resumed_groups_no_function_is_held(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine()) as engine:
        topology = held_topology("uses_a_tool", on_halt="restart")
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            await bus.publish(one_sample())
            await eventually(lambda: len(TOOLS) == 1)
            aborted, _ = await halted(bus, 0, 0)
            assert CALLS == ["begins", "ends"]
    assert aborted.held is msgspec.UNSET


def group_of(*episodes: Episode, attempt: int = 0) -> HeldGroup:
    samples = [OpenSample(index=index, prompt_len=1) for index in range(len(episodes))]
    return HeldGroup.of(attempt, samples, dict(enumerate(episodes)))


async def test_what_is_held_is_bounded_in_number_and_time() -> None:
    async with anyio.create_task_group() as tasks:
        episodes, running = Episodes(most=3, limit_s=0.2), [Episode() for _ in range(5)]
        await tasks.start(episodes.run)
        for episode in running:
            talk = Conversation(
                task(0).prompt,
                OpenSample(index=0, prompt_len=2),
                params=SamplingParams(max_new_tokens=9),
                ask=episode.ask,
                model=AnyTokens(),
            )
            episodes.start(episode, talk, talks)
        await eventually(lambda: CALLS == ["begins"] * 5)
        episodes.hold(1, group_of(*running[:2]))
        episodes.hold(2, group_of(*running[2:4]))  # four are too many
        await eventually(lambda: CALLS == ["begins"] * 5 + ["ends"] * 2)
        assert (episodes.num_held, [episode.has_ended for episode in running]) == (2, [True, True, False, False, False])
        episodes.hold(3, group_of(running[4]))
        await eventually(lambda: len(CALLS) == 10)  # by the limit of time
        assert (episodes.num_held, episodes.waits_for()) == (0, "")
        tasks.cancel_scope.cancel()


async def test_a_group_that_another_rollout_actor_went_on_with_is_let_go() -> None:
    """Its events of an earlier attempt, and our own, do not count."""

    def spilled(attempt: int, instance: str) -> SegmentsSpilled:
        return SegmentsSpilled(group_id=7, attempt=attempt, lease="l", round=0, instance=instance, samples=())

    episodes = Episodes(most=3, limit_s=60)
    episodes.hold(7, group_of(Episode(), attempt=2))
    for event in (spilled(2, "rollout.1"), spilled(3, "rollout.0"), spilled(1, "rollout.1")):
        episodes.note(event, "rollout.0")
        assert episodes.num_held == 1
    episodes.note(spilled(3, "rollout.1"), "rollout.0")
    assert episodes.num_held == 0


async def test_a_call_that_has_begun_before_a_halt_ends_first() -> None:
    asked = anyio.Event()
    order: list[str] = []
    sample = OpenSample(index=0, prompt_len=1, turn_status=SampleStatus.COMPLETED)

    async def ask(_sample: OpenSample, _params: SamplingParams, _limit: int) -> bool:
        await asked.wait()
        order.append("answered")
        return False

    async def keep(_sample: OpenSample) -> None: ...

    episode = Episode()

    async def carries() -> None:
        assert not await episode.carried_by(Delivery(ask, keep, gives_up_nothing))
        order.append("given back")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(carries)
        tasks.start_soon(episode.ask, sample, SamplingParams(max_new_tokens=1), 1)
        await anyio.wait_all_tasks_blocked()
        episode.halt()
        await anyio.wait_all_tasks_blocked()
        assert order == []
        asked.set()
    assert order == ["answered", "given back"]
