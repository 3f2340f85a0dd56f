"""One engine's way into the pool, with a router that does not take it."""

from typing import Any, cast

import anyio
import pytest

from actors.rollout.engines.engine import Engine
from actors.rollout.engines.memory.levels import MemoryLevel
from actors.rollout.engines.memory.share import MemoryShare
from actors.rollout.engines.rate_limited_events import RateLimitedEvents
from actors.rollout.engines.reconcile import NextStep
from actors.rollout.engines.router import ThroughRouter
from actors.rollout.engines.states import Trigger
from actors.rollout.engines.target import FleetTarget
from actors.rollout.engines.weights.sync import WeightSyncs
from actors.rollout.engines.weights.verification import WeightsMismatch
from actors.rollout.engines.weights.verifier import UpdateResult, WeightVerifier
from actors.rollout.sglang.client import RouterWorker, SglangClient
from actors.rollout.sglang.errors import EngineError, EngineUnavailable
from messages import EngineState, WeightsAnnounced
from runtime.bus.background import in_background
from tests.fixtures.nats import eventually
from tests.support.one_router import OneRouter
from tests.support.rollout import announcement

pytestmark = pytest.mark.anyio


class NoRouter(SglangClient):
    """Lists no engine, whatever it is asked to add."""

    def __init__(self) -> None:
        pass

    async def workers(self, router: str) -> list[RouterWorker]:
        return []

    async def add_worker(self, router: str, engine: str) -> None:
        pass

    async def ready(self, url: str) -> bool:
        return True


class OnlyFirst:
    """Finds that the first weights are held, and later ones are not."""

    async def update(self, engine: str, url: str, announced: WeightsAnnounced, **_: Any) -> UpdateResult:
        if announced.version > 1:
            raise WeightsMismatch("it did not load these")
        return UpdateResult("1@lazy", 0.0)

    async def adopt(self, engine: str, url: str, announced: WeightsAnnounced) -> None:
        """It takes no weights for proven that it was started with."""

    def is_paused(self, url: str) -> bool:
        return False

    async def forget_pause(self, url: str) -> None:
        """It was never paused."""


async def test_one_that_refuses_weights_before_it_was_admitted_holds_up_no_other() -> None:
    """All engines that the router may know count for the version that requests wait for."""
    target = FleetTarget()
    target.weights, target.router = announcement(1), "http://router"
    client = NoRouter()
    verifier = cast(WeightVerifier, OnlyFirst())
    engine = Engine(
        "lazy",
        "http://lazy",
        client,
        verifier,
        target,
        workers=ThroughRouter(client),
        events=RateLimitedEvents(),
        syncs=WeightSyncs(target, list),
    )
    async with anyio.create_task_group() as group:
        group.start_soon(until_out, engine, target)
        with pytest.raises(WeightsMismatch):
            await admitted_while_weights_change(engine, target)
        assert not engine.registration.is_known


class LostMeanwhile:
    """Memory of an engine that others find dead while it is told to give that back."""

    def __init__(self, error: EngineError | None, *, is_sure: bool) -> None:
        self.room, self.is_sure = MemoryLevel.EVERYTHING, is_sure
        self.engine: Engine | None = None
        self._error = error

    async def give_back(self) -> None:
        assert self.engine is not None
        self.engine.replaced()
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("error", [None, EngineUnavailable("connection lost")])
async def test_one_that_is_found_dead_while_it_gives_memory_back_is_lost_once(error: EngineError | None) -> None:
    client, memory_share = NoRouter(), LostMeanwhile(error, is_sure=error is None)
    verifier, target = cast(WeightVerifier, OnlyFirst()), FleetTarget()
    engine = memory_share.engine = Engine(
        "lost",
        "http://lost",
        client,
        verifier,
        target,
        workers=ThroughRouter(client),
        events=RateLimitedEvents(),
        syncs=WeightSyncs(target, list),
        memory_share=cast(MemoryShare, memory_share),
    )
    with pytest.raises(EngineUnavailable):
        await engine.carry_out(NextStep.GIVE_BACK)
    assert engine.state is EngineState.GONE


def admitted_at(client: OneRouter) -> Engine:
    target = FleetTarget()
    target.router = "http://router"
    engine = Engine(
        "one",
        "http://one",
        client,
        cast(WeightVerifier, OnlyFirst()),
        target,
        workers=ThroughRouter(client),
        events=RateLimitedEvents(),
        syncs=WeightSyncs(target, list),
    )
    client.known.add(engine.url)
    engine._apply(Trigger.ADMITTED, "")
    return engine


async def test_one_that_is_set_apart_while_it_is_looked_at_is_not_lost() -> None:
    client = OneRouter()
    engine = admitted_at(client)
    client.asked = engine.registration.set_apart
    await engine.check_or_expel()
    assert engine.state is EngineState.CURRENT
    await engine.registration.join()
    assert client.known == {engine.url}
    client.known.clear()
    await engine.check_or_expel()
    assert engine.state is EngineState.STARTING


async def until_out(engine: Engine, target: FleetTarget) -> None:
    """Wait as requests and reports do: looking only when somebody says that there is something new."""
    await eventually(lambda: engine.registration.is_known)
    with anyio.fail_after(5):
        async with target.changed:
            while engine.registration.is_known:
                await target.changed.wait()


async def admitted_while_weights_change(engine: Engine, target: FleetTarget) -> None:
    async with in_background(lambda: change_weights_of(engine, target)):
        while True:
            await engine.carry_out(await engine.next_step())


async def change_weights_of(engine: Engine, target: FleetTarget) -> None:
    await eventually(lambda: engine.registration.is_known)
    target.weights = announcement(2)
    await target.notify()
