"""One engine's way into the pool, with a router that does not take it."""

from collections.abc import AsyncGenerator
from typing import Any, cast

import anyio
import pytest

from actors.rollout.engines.engine import Engine
from actors.rollout.engines.memory import MemoryShare
from actors.rollout.engines.rate_limited_events import RateLimitedEvents
from actors.rollout.engines.router import ThroughRouter
from actors.rollout.engines.status import MemoryLevel, NextStep, Trigger, UpdateStage
from actors.rollout.engines.target import FleetTarget
from actors.rollout.engines.weights.sync import WeightSyncs
from actors.rollout.engines.weights.verification import WeightsMismatch
from actors.rollout.engines.weights.verifier import Updated, WeightVerifier
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.control_answers import RouterWorker
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

    async def update(self, engine: str, url: str, announced: WeightsAnnounced, **_: Any) -> AsyncGenerator[Updated]:
        yield Updated(UpdateStage.LOADED, "1@lazy")
        yield Updated(UpdateStage.RESUMED, "1@lazy")
        if announced.version > 1:
            raise WeightsMismatch("it did not load these")

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
    engine._change(Trigger.ADMITTED, "")
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
    with anyio.fail_after(200):
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


class InSteps:
    """Updates engines in steps, and notes what becomes of the updates."""

    def __init__(self) -> None:
        self.did: list[str] = []

    async def update(self, engine: str, url: str, announced: WeightsAnnounced, **_: Any) -> AsyncGenerator[Updated]:
        try:
            yield Updated(UpdateStage.LOADED, "1@one")
            self.did.append("resumed")
            yield Updated(UpdateStage.RESUMED, "1@one", 0.5)
            self.did.append("verified")
        finally:
            self.did.append("ended")

    async def adopt(self, engine: str, url: str, announced: WeightsAnnounced) -> None:
        """It was started without weights."""


class Shared:
    """Memory that an engine shares with the trainer."""

    def __init__(self) -> None:
        self.room, self.is_sure = MemoryLevel.WEIGHTS, True

    async def give_back(self) -> None:
        self.room = MemoryLevel.NOTHING

    async def take_rest(self) -> None:
        self.room = MemoryLevel.EVERYTHING


def beside_the_trainer(verifier: InSteps) -> tuple[Engine, FleetTarget]:
    """An engine with memory for weights, which may load them."""
    client, target = OneRouter(), FleetTarget()
    target.weights, target.allowed = announcement(1), MemoryLevel.LOADED
    engine = Engine(
        "one",
        "http://one",
        client,
        cast(WeightVerifier, verifier),
        target,
        workers=ThroughRouter(client),
        events=RateLimitedEvents(),
        syncs=WeightSyncs(target, list),
        memory_share=cast(MemoryShare, Shared()),
    )
    engine._change(answers=True, is_found=True, room=MemoryLevel.WEIGHTS)
    return engine, target


async def steps_of(engine: Engine, number: int) -> list[NextStep]:
    """Carry out so many steps."""
    steps: list[NextStep] = []
    with anyio.fail_after(200):
        for _ in range(number):
            steps.append(await engine.next_step())
            await engine.carry_out(steps[-1])
    return steps


async def test_weights_are_verified_once_the_trainer_leaves_the_memory() -> None:
    verifier = InSteps()
    engine, target = beside_the_trainer(verifier)
    assert await steps_of(engine, 2) == [NextStep.LOAD, NextStep.RESUME]
    assert (engine.status.memory_level, engine.version) == (MemoryLevel.LOADED, 0)
    with anyio.move_on_after(0.05) as waiting:
        await engine.next_step()
    assert waiting.cancelled_caught
    target.allowed = MemoryLevel.EVERYTHING
    assert await steps_of(engine, 2) == [NextStep.TAKE_REST, NextStep.VERIFY]
    assert verifier.did == ["resumed", "verified", "ended"]
    status = engine.status
    assert (status.version, status.label, status.pause_s, status.stage) == (1, "1@one", 0.5, UpdateStage.NONE)


@pytest.mark.parametrize("num_steps", [1, 2])
async def test_an_update_between_two_steps_ends_when_the_trainer_takes_the_memory_back(num_steps: int) -> None:
    verifier = InSteps()
    engine, target = beside_the_trainer(verifier)
    await steps_of(engine, num_steps)
    target.allowed = MemoryLevel.NOTHING
    assert (await steps_of(engine, 3 - num_steps))[-1] is NextStep.GIVE_BACK
    assert verifier.did == ["resumed", "ended"]
    assert (engine.state, engine.version, engine.status.stage) == (EngineState.RELEASED, 0, UpdateStage.NONE)


@pytest.mark.parametrize("num_steps", [1, 2])
async def test_an_update_between_two_steps_ends_when_the_engine_is_lost(num_steps: int) -> None:
    verifier = InSteps()
    engine, _ = beside_the_trainer(verifier)
    await steps_of(engine, num_steps)
    engine.replaced()
    assert await engine.next_step() is NextStep.FIND
    await engine.abandon_update()
    assert verifier.did == ["resumed", "ended"][2 - num_steps :]
    assert engine.status.stage is UpdateStage.NONE
