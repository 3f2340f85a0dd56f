"""A generate function that raises or hangs in some samples costs these, and one that never works ends the run."""

import re
from typing import Any

import anyio
import msgspec
import pytest
from aiohttp import web

from messages import GroupCompleted, GroupFailed, RolloutRequested, SampleStatus, UserFunctionRaised
from runtime.bus.bus import Bus
from runtime.process.actor import InputError
from runtime.settings.topology import Topology
from runtime.util.errors import flatten
from tests.build.topology import topology_with
from tests.support.rollout import announcement, grade, next_event, rollout_actor, task
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio

SHORT_S = 0.3


def with_function(name: str, **rollout: Any) -> Topology:
    generate = f"tests.actors.rollout.samples.failing_functions:{name}"
    return topology_with(rollout={"custom_generate": generate, "n_samples_per_prompt": 3, **rollout})


def of(group_id: int, num_samples: int = 3) -> RolloutRequested:
    return msgspec.structs.replace(task(group_id), num_samples=num_samples)


async def ending(bus: Bus, url: str, topology: Topology, num_samples: int = 3) -> GroupCompleted | GroupFailed:
    async with serving(ScriptedEngine()) as engine, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, url, [engine], topology):
            await bus.publish(announcement(1))
            await bus.publish(of(0, num_samples))
            event, _ = await next_event(bus, GroupFailed, GroupCompleted)
        group.cancel_scope.cancel()
    assert isinstance(event, GroupCompleted | GroupFailed)
    return event


@pytest.mark.parametrize(
    ("name", "chosen", "rewards"),
    [
        ("raises_in_the_first", {}, [None, 1.0, 1.0]),
        ("raises_in_the_first_at_once", {}, [None, 1.0, 1.0]),
        ("hangs_in_the_first", {}, [None, 1.0, 1.0]),
        ("raises_in_the_first", {"on_exception": "zero"}, [0.0, 1.0, 1.0]),
        ("hangs_in_the_first", {"on_exception": "zero"}, [0.0, 1.0, 1.0]),
        ("raises_in_the_first_at_once", {"on_exception": "zero"}, [None, 1.0, 1.0]),  # it has no token to train
        ("raises_in_the_first_two", {"on_exception": "zero"}, [0.0, 0.0, 1.0]),
    ],
)
async def test_a_sample_whose_function_fails_ends_alone_or_trains_with_reward_0(
    bus: Bus, router_url: str, name: str, chosen: dict[str, Any], rewards: list[float | None]
) -> None:
    topology = with_function(name, custom_generate_timeout_s=SHORT_S, **chosen)
    event = await ending(bus, router_url, topology)
    assert isinstance(event, GroupCompleted), event
    assert [sample.reward for sample in event.samples] == rewards
    failed, trained = event.samples[0], event.samples[-1]
    assert failed.status is (SampleStatus.FAILED if rewards[0] is None else SampleStatus.COMPLETED)
    assert (failed.reason or "").startswith("rollout.custom_generate: ")
    assert (trained.status, trained.reason) == (SampleStatus.COMPLETED, None)
    assert failed.response_len == (0 if name.endswith("at_once") else trained.response_len)


@pytest.mark.parametrize(
    ("name", "chosen", "num_samples"),
    [
        ("raises_in_the_first", {"on_exception": "drop"}, 3),
        ("raises_in_the_first_two", {}, 3),  # one sample is left
        ("raises_in_the_first", {}, 2),
        ("raises_in_the_first", {}, 1),
    ],
)
async def test_a_group_without_two_samples_left_fails_and_so_does_one_by_the_setting(
    bus: Bus, router_url: str, name: str, chosen: dict[str, Any], num_samples: int
) -> None:
    topology = with_function(name, **{"n_samples_per_prompt": num_samples, **chosen})
    event = await ending(bus, router_url, topology, num_samples)
    assert isinstance(event, GroupFailed), event
    assert event.reason.startswith("rollout.custom_generate: ")


@pytest.mark.parametrize("name", ["raises_in_the_first", "passes_it_on", "passes_it_on_in_a_group"])
async def test_an_error_of_an_engine_is_not_the_functions(bus: Bus, router_url: str, name: str) -> None:
    def refuse(prompt: list[int], params: dict[str, object]) -> list[int]:
        raise web.HTTPBadRequest(text='{"error": {"message": "token 8 is not in the vocabulary"}}')

    engine = ScriptedEngine(script=refuse)
    async with serving(engine), rollout_actor(bus, router_url, [engine], with_function(name)):
        await bus.publish(announcement(1))
        for number in range(6):  # more than the first calls that may all fail
            await bus.publish(of(number))
        for _ in range(6):
            event, _ = await next_event(bus, GroupFailed)
            assert isinstance(event, GroupFailed)
            assert "not in the vocabulary" in event.reason
            assert "custom_generate" not in event.reason


@pytest.mark.parametrize(
    ("name", "said", "place"),
    [
        ("raises_always", "KeyError('no such tool')", "in raises_always"),
        ("hangs_always", f"took more than {SHORT_S:g} s", "in the_tool"),
    ],
)
async def test_a_function_that_never_works_ends_the_run_with_its_traceback(
    bus: Bus, router_url: str, name: str, said: str, place: str
) -> None:
    topology = with_function(name, custom_generate_timeout_s=SHORT_S)

    async def run() -> None:
        engine = ScriptedEngine()
        async with serving(engine), anyio.create_task_group() as group:
            group.start_soon(grade, bus)
            async with rollout_actor(bus, router_url, [engine], topology):
                await bus.publish(announcement(1))
                for number in range(8):
                    await bus.publish(of(number))
                await anyio.sleep(30)

    with pytest.raises(ExceptionGroup) as caught:
        await run()
    (error,) = {str(error) for error in flatten(caught.value) if isinstance(error, InputError)}
    assert re.match(
        r"the first \d+ calls of generate functions in this run, for \d+ prompt groups, all failed; ", error
    )
    assert said in error
    assert place in error
    shown, _ = await next_event(bus, UserFunctionRaised)
    assert isinstance(shown, UserFunctionRaised)
    assert place in shown.traceback
    assert shown.took_too_long is (name == "hangs_always")


async def test_a_function_that_worked_once_may_fail_as_often_as_it_likes(bus: Bus, router_url: str) -> None:
    engine = ScriptedEngine()
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        topology = with_function("hangs_after_a_good_one", custom_generate_timeout_s=SHORT_S)
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announcement(1))
            for number in range(6):
                await bus.publish(of(number))
            async with bus.read(GroupFailed) as events:
                for _ in range(6):
                    assert await events.next(30) is not None
        group.cancel_scope.cancel()
