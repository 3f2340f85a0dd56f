"""Engines that make no token of our requests: found, asked no more, killed, and their requests sent again."""

from typing import Any

import anyio
import pytest

from actors.rollout.requests.request import OpenRequest
from actors.rollout.requests.watching import TokenTimeouts, silence
from messages import EngineState, EngineStateChanged, KillAnswered, KillRequested
from runtime.bus.addresses import Address, address_key
from runtime.bus.bus import Bus
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import announcement, completed, grade, rollout_actor, task, until_applied
from tests.support.scripted_engine import ScriptedEngine, serving

LIMITS = TokenTimeouts(first_s=10.0, next_s=3.0)


def sent(at: float, *, engine: str = "", token_at: float = 0.0) -> OpenRequest:
    return OpenRequest(sent_at=at, reader=None, engine=engine, token_at=token_at)


SILENCES: dict[str, tuple[list[OpenRequest], float, str]] = {
    "nothing is open": ([], 0.0, ""),
    "one was sent a while ago": ([sent(91)], 0.0, ""),
    "one may be there for long": (
        [sent(89), sent(95)],
        0.0,
        "no first token within 10 s for 1 request that it may hold",
    ),
    "others there get tokens": ([sent(80)], 98.0, ""),
    "it is asked since a moment": ([sent(10, engine="e", token_at=20)], 99.0, ""),
    "one there got none for long": (
        [sent(10, engine="e", token_at=96)],
        96.0,
        "no further token for 1 request within 3 s",
    ),
    "one there waits while others get tokens": ([sent(10, engine="e", token_at=50)], 99.5, ""),
    "one is at another engine": ([sent(10, engine="other", token_at=20)], 0.0, ""),
}


@pytest.mark.parametrize("case", list(SILENCES))
def test_when_an_engine_is_asked_for_a_sign_of_life(case: str) -> None:
    requests, sign_at, reason = SILENCES[case]
    assert silence(requests, "e", sign_at, 100.0, LIMITS) == reason


def pool(**settings: Any) -> dict[str, Any]:
    limits = {"first_token_after_s": 1, "next_token_after_s": 1}
    return {"policy": {"kind": "tiny", "concurrency": 8, **limits, **settings}}


async def states(bus: Bus, number: int) -> list[EngineState]:
    async with bus.read(EngineStateChanged) as events:
        found = [await events.next(15) for _ in range(number)]
    return [one.message.new for one in found if one is not None]


@pytest.mark.anyio
async def test_an_engine_that_hangs_is_killed_once_and_its_requests_are_sent_elsewhere(
    bus: Bus, router_url: str
) -> None:
    asked: list[KillRequested] = []

    async def kill(request: KillRequested) -> KillAnswered:
        asked.append(request)
        hanging.break_connections()
        return KillAnswered(killed=True)

    hanging = ScriptedEngine(hold=True)
    async with serving(hanging), serving(ScriptedEngine()) as other, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        topology = topology_with(engines=pool(num_engines=2))
        async with bus.serve({KillRequested: kill}), rollout_actor(bus, router_url, [hanging, other], topology):
            address = Address(url=hanging.url, agent=bus.name, pid=17)
            await bus.kv.put(address_key("engine", "policy", 0), address)
            await bus.publish(announcement(1))
            await until_applied(bus, 1)
            await eventually(lambda: len(hanging.updates) * len(other.updates) > 0)
            hanging.probe_at = anyio.Event()  # and answers /ready all the time
            for group_id in range(4):
                await bus.publish(task(group_id))
            await completed(bus)
            await eventually(lambda: len(asked) > 0)
        group.cancel_scope.cancel()
    (request,) = asked
    assert (request.process, request.pid) == ("engine.policy.0", 17)
    assert request.reason.startswith("no first token within 1 s for ")
    assert EngineState.SUSPECT in await states(bus, 3)


@pytest.mark.anyio
async def test_an_engine_that_is_slow_and_answers_a_tiny_request_is_let_be(bus: Bus, router_url: str) -> None:
    engine = ScriptedEngine(hold=True, load={"num_running_reqs": 2})
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology_with(engines=pool())):
            await bus.publish(announcement(1))
            await bus.publish(task(0))
            await engine.wait_for_requests(2)
            looks = len(engine.probes)
            await eventually(lambda: len(engine.probes) >= looks + 2)
            engine.release()
            await completed(bus)
        group.cancel_scope.cancel()
    assert await states(bus, 1) == [EngineState.CURRENT]
    assert len(engine.requests) == 2


@pytest.mark.anyio
async def test_an_engine_of_others_that_hangs_is_asked_again_once_it_makes_tokens(bus: Bus, router_url: str) -> None:
    """Nobody kills it; our requests there are given up."""
    engine = ScriptedEngine(hold=True)
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        topology = topology_with(engines=pool(urls=[engine.url]))
        async with rollout_actor(bus, router_url, [], topology):
            await bus.publish(announcement(1))
            await until_applied(bus, 1)
            engine.probe_at = anyio.Event()
            await bus.publish(task(0))
            assert await states(bus, 2) == [EngineState.CURRENT, EngineState.SUSPECT]
            engine.hold = False
            engine.probe_at.set()
            engine.probe_at = None
            await completed(bus)
        group.cancel_scope.cancel()
    expected = [EngineState.CURRENT, EngineState.SUSPECT, EngineState.STARTING, EngineState.CURRENT]
    assert await states(bus, 4) == expected
