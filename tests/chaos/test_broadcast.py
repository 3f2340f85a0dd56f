"""laptop-split.toml: two ranks, two engines, weights by broadcast; whoever dies, engines get the newest."""

from pathlib import Path

import pytest

from messages import SessionEnded, WeightsAnnounced, WeightsApplied
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import ROOT, Run
from tests.chaos.test_kill import finish, kill_in_turn

pytestmark = [pytest.mark.chaos, pytest.mark.anyio, pytest.mark.timeout(400)]

SPLIT = ROOT / "topologies" / "laptop-split.toml"


async def test_engine_rollout_actor_and_rank_are_killed_while_weights_go_by_broadcast(tmp_path: Path) -> None:
    run = Run(tmp_path, num_steps=8, topology=SPLIT)
    names = ["engine.policy.1", "rollout", "trainer.1"]
    async with run.started() as command:
        await kill_in_turn(command, names, every=2)
        await finish(run, command)
    await audit(run, killed=[*names, "trainer.0"])
    async with run.reopened() as bus:
        log = [event for _, event in await read_all(bus, run)]
    announced = [event for event in log if isinstance(event, WeightsAnnounced)]
    assert announced[-1].version in {event.version for event in log if isinstance(event, WeightsApplied)}
    sessions = [event for event in log if isinstance(event, SessionEnded)]
    assert {event.transport for event in sessions} == {"collective"}
    whole = [event for event in sessions if event.holds]
    assert {event.sent_bytes for event in whole} == {announced[0].size_bytes}
    assert sum(len(event.holds) == 2 for event in whole) >= 5
    assert not (run.directory / "weights").exists()
