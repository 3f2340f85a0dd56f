"""Rank 0's weight syncs against a rollout actor on a real bus."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from actors.trainer.torch_thread import TorchThread
from actors.trainer.weights.syncs import WeightSessions
from messages import (
    EnginesAnswered,
    MembersGiven,
    WeightSyncClosed,
    WeightSyncEnded,
    WeightSyncMember,
    WeightSyncOffered,
    WeightSyncPrepared,
    WeightSyncRequested,
)
from runtime.bus.bus import Bus
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

    num_prepared: int = 0
    offered: list[WeightSyncOffered] = field(default_factory=list[WeightSyncOffered])
    closed: list[str] = field(default_factory=list[str])

    async def offer(self, request: WeightSyncOffered) -> MembersGiven:
        self.offered.append(request)
        return MembersGiven(members=(WeightSyncMember(engine=ENGINE, key="1", num_ranks=1),))

    async def prepare(self, _request: WeightSyncPrepared) -> EnginesAnswered:
        self.num_prepared += 1
        if self.num_prepared % 3:
            return EnginesAnswered(failed={}, pending={ENGINE: "waits for 2 requests"})
        return EnginesAnswered(failed={ENGINE: "no pause"})

    async def close(self, request: WeightSyncClosed) -> EnginesAnswered:
        self.closed.append(request.reason)
        return EnginesAnswered(failed={})


async def wake() -> None:
    """The leader has nothing to do meanwhile."""


@pytest.mark.anyio
async def test_a_sync_that_keeps_failing_is_tried_five_times_and_again_when_an_engine_requests_one(bus: Bus) -> None:
    topology = load_topology(ROOT / "topologies" / "laptop-colocated.toml").topology
    actor, rank = RolloutActor(), Rank()
    handlers: Any = {WeightSyncOffered: actor.offer, WeightSyncPrepared: actor.prepare, WeightSyncClosed: actor.close}
    with TorchThread("cpu") as torch_thread:
        syncs = WeightSessions(topology, bus, torch_thread, rank, incarnation=2, wake=wake)  # pyright: ignore[reportArgumentType]
        syncs.weights_are(7)
        await Roster(bus).join("rollout", Member(instance="rollout.0", incarnation=1, node="n0"))
        async with bus.serve(handlers, instance="rollout.0"):
            await syncs.bring()
    assert [offer.version for offer in actor.offered] == [7] * 5
    assert len({offer.session for offer in actor.offered}) == 5
    assert actor.closed == ["no pause"] * 5
    assert rank.sending.left == 5
    assert actor.num_prepared == 15
    assert syncs.waits_for() == ""
    async with bus.read(WeightSyncEnded) as events:
        ended = [event.message async for event in events.so_far()]
    assert [each.out for each in ended] == [{ENGINE: "no pause"}] * 5
    assert not syncs.is_requested
    assert (await syncs.requested(WeightSyncRequested(version=7, engines=(ENGINE,)))).granted
    assert syncs.is_requested
    assert not (await syncs.requested(WeightSyncRequested(version=6, engines=(ENGINE,)))).granted
