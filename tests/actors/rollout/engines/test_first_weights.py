"""Weights that a peer gave an engine at its start count once they are proven; others are brought the usual way."""

from pathlib import Path
from typing import Any

import pytest

from messages import WeightsAnnounced
from runtime.bus.addresses import Address, address_key
from runtime.bus.bus import Bus
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import PROBE, announcement, rollout_actor, until_applied
from tests.support.scripted_engine import ScriptedEngine, serving

pytestmark = pytest.mark.anyio

FROM_PEER = {"load_format": "remote_instance"}
POOL = {"policy": {"kind": "tiny", "concurrency": 8, "verify": "always", "start_weights": "peer"}}


def told(version: int) -> WeightsAnnounced:
    return announcement(version, checksum=f"files {version}", probe=PROBE)


def tensors(version: int) -> str:
    return f"tensors of {Path(told(version).path).name}"


def engine(tensors_of: int, **knobs: Any) -> ScriptedEngine:
    """One that has the tensors of a version, and those of what it loads."""
    return ScriptedEngine(loads=lambda path: f"tensors of {Path(path).name}", checksum=tensors(tensors_of), **knobs)


async def come(bus: Bus, newcomer: ScriptedEngine) -> None:
    await bus.kv.put(address_key("engine", "policy", 1), Address(url=newcomer.url))


async def test_what_it_was_started_with_is_proven_and_not_loaded_again(bus: Bus, router_url: str) -> None:
    async with serving(engine(0)) as old, serving(engine(1, info=FROM_PEER)) as newcomer:
        async with rollout_actor(bus, router_url, [old], topology_with(engines=POOL)):
            await bus.publish(told(1))
            await until_applied(bus, 1)
            await come(bus, newcomer)
            await eventually(lambda: newcomer.held == 1 and len(newcomer.probes) == 1)
            await bus.publish(told(2))
            await until_applied(bus, 2)
            await eventually(lambda: newcomer.held == 2)
    assert len(newcomer.updates) == 1  # the second version alone
    assert newcomer.checks == ["running", "paused"]


@pytest.mark.parametrize(
    ("tensors_of", "knobs"),
    [
        pytest.param(0, {"info": FROM_PEER}, id="a mixture, or older ones"),
        pytest.param(1, {}, id="started from files"),
        pytest.param(1, {"info": FROM_PEER, "version": "1@another"}, id="told by an earlier rollout actor"),
        pytest.param(1, {"info": FROM_PEER, "prompt_log_prob": -0.6}, id="log-probs of other weights"),
    ],
)
async def test_what_is_not_proven_is_brought_the_usual_way(
    bus: Bus, router_url: str, tensors_of: int, knobs: dict[str, Any]
) -> None:
    async with serving(engine(0)) as old, serving(engine(tensors_of, **knobs)) as newcomer:
        async with rollout_actor(bus, router_url, [old], topology_with(engines=POOL)):
            await bus.publish(told(1))
            await until_applied(bus, 1)
            await come(bus, newcomer)
            await eventually(lambda: newcomer.updates != [])


async def test_the_first_engine_of_a_rollout_actor_has_nobody_to_be_compared_with(bus: Bus, router_url: str) -> None:
    async with serving(engine(1, info=FROM_PEER)) as newcomer:
        async with rollout_actor(bus, router_url, [newcomer], topology_with(engines=POOL)):
            await bus.publish(told(1))
            await until_applied(bus, 1)
    assert len(newcomer.updates) == 1
