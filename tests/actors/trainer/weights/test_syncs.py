"""Rank 0's weight syncs against a rollout actor on a real bus."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from actors.trainer.torch_thread import TorchThread
from actors.trainer.weights.syncs import WeightSessions
from messages import (
    WeightSyncAnswered,
    WeightSyncDecided,
    WeightSyncEnded,
    WeightSyncMember,
    WeightSyncPrepared,
    WeightSyncRequested,
)
from runtime.bus.bus import Bus
from runtime.bus.errors import BusUnavailable
from runtime.bus.roster import Member, Roster
from runtime.settings.load import load_topology

ROOT = Path(__file__).parents[4]
ENGINE = "engine.policy.0"


@dataclass
class Orders:
    """Orders to the ranks; a sync that fails before its first bucket gives only this one."""

    left: int = 0

    def leave_groups(self, _part: int) -> None:
        self.left += 1


@dataclass
class Rank:
    """Rank 0 without a model."""

    sending: Orders = field(default_factory=Orders)


@dataclass
class RolloutActor:
    """A rollout actor whose only engine takes part, is at work for two answers, and refuses to be prepared."""

    prepared: list[WeightSyncPrepared] = field(default_factory=list[WeightSyncPrepared])
    aborted: list[str] = field(default_factory=list[str])

    async def prepare(self, request: WeightSyncPrepared) -> WeightSyncAnswered:
        self.prepared.append(request)
        members = (WeightSyncMember(engine=ENGINE, key="1", num_ranks=1),)
        if len(self.prepared) % 3:
            return WeightSyncAnswered(pending={ENGINE: "waits for 2 requests"}, members=members)
        return WeightSyncAnswered(failed={ENGINE: "no pause"}, members=members)

    async def decide(self, request: WeightSyncDecided) -> WeightSyncAnswered:
        assert not request.is_commit
        self.aborted.append(request.reason)
        return WeightSyncAnswered()


async def wake() -> None:
    """The leader has nothing to do meanwhile."""


@pytest.mark.anyio
async def test_a_sync_that_keeps_failing_is_tried_five_times_and_again_when_an_engine_requests_one(bus: Bus) -> None:
    topology = load_topology(ROOT / "topologies" / "laptop-colocated.toml").topology
    actor, rank = RolloutActor(), Rank()
    handlers: Any = {WeightSyncPrepared: actor.prepare, WeightSyncDecided: actor.decide}
    with TorchThread("cpu") as torch_thread:
        syncs = WeightSessions(topology, bus, torch_thread, rank, incarnation=2, wake=wake)  # pyright: ignore[reportArgumentType]
        syncs.weights_are(7)
        await Roster(bus).join("rollout", Member(instance="rollout.0", incarnation=1, node="n0"))
        async with bus.serve(handlers, instance="rollout.0"):
            await syncs.bring()
    assert [step.version for step in actor.prepared] == [7] * 15
    assert len({step.session for step in actor.prepared}) == 5
    assert actor.aborted == ["no pause"] * 5
    assert rank.sending.left == 5
    assert syncs.waits_for() == ""
    async with bus.read(WeightSyncEnded) as events:
        ended = [event.message async for event in events.so_far()]
    assert [each.out for each in ended] == [{ENGINE: "no pause"}] * 5
    assert not syncs.is_requested
    assert await syncs.requested(WeightSyncRequested(version=7, engines=(ENGINE,))) == WeightSyncAnswered()
    assert syncs.is_requested
    refused = await syncs.requested(WeightSyncRequested(version=6, engines=(ENGINE,)))
    assert refused.failed == {ENGINE: "the trainer has no weights 6 to send"}


@pytest.mark.anyio
async def test_a_bus_that_fails_while_engines_are_at_work_has_those_paused_already_aborted(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = load_topology(ROOT / "topologies" / "laptop-colocated.toml").topology
    actor, rank, call_all = RolloutActor(), Rank(), Roster.call_all

    async def calling(self: Roster, *arguments: Any, **options: Any) -> Any:
        if actor.prepared:
            raise BusUnavailable("no server for 30 s")
        return await call_all(self, *arguments, **options)

    monkeypatch.setattr(Roster, "call_all", calling)
    handlers: Any = {WeightSyncPrepared: actor.prepare, WeightSyncDecided: actor.decide}
    with TorchThread("cpu") as torch_thread:
        syncs = WeightSessions(topology, bus, torch_thread, rank, incarnation=2, wake=wake)  # pyright: ignore[reportArgumentType]
        syncs.weights_are(7)
        await Roster(bus).join("rollout", Member(instance="rollout.0", incarnation=1, node="n0"))
        async with bus.serve(handlers, instance="rollout.0"):
            await syncs.bring()
    assert len(actor.prepared) == 1
    assert actor.aborted == ["no server for 30 s"]
    assert syncs.waits_for() == ""
