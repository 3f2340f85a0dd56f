"""laptop-split.toml: two ranks, two engines, weights by broadcast; whoever dies, engines get the newest."""

from pathlib import Path

import pytest

from messages import ActorExited, EngineStateChanged, Message, WeightsAnnounced, WeightsApplied, WeightSyncEnded
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import ROOT, Run
from tests.chaos.test_kill import finish, kill_in_turn

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]

SPLIT = ROOT / "topologies" / "laptop-split.toml"


async def test_engines_are_updated_in_groups_of_which_one_is_killed(tmp_path: Path) -> None:
    rolling = ("engines.policy.update_groups=2", "rollout.max_staleness=1")
    run = Run(tmp_path, num_steps=40, topology=SPLIT, overrides=rolling)
    exited: list[int] = []

    def is_back(event: Message) -> bool:
        if isinstance(event, ActorExited) and event.actor == "engine.policy.1":
            exited.append(event.pid)
        return bool(exited) and isinstance(event, WeightSyncEnded) and "engine.policy.1" in event.holds

    async with run.started() as command:
        await command.log.until_trained(3)
        command.log.kill("engine.policy.1")
        await command.log.until(is_back)
        await finish(run, command)
    await audit(run, killed=["engine.policy.1"], ordered=False)
    async with run.reopened() as bus:
        log = [event for _, event in await read_all(bus, run)]
    sessions = [event for event in log if isinstance(event, WeightSyncEnded)]
    assert {(event.part, event.holds) for event in sessions if event.holds} == {
        (0, ("engine.policy.0",)),
        (1, ("engine.policy.1",)),
    }
    lost = [event for event in log if isinstance(event, EngineStateChanged) and "router" in event.reason]
    assert not lost  # one that is out of the router for its update is not looked for there
    newest = max(event.version for event in log if isinstance(event, WeightsAnnounced))
    assert {event.part for event in sessions if event.version == newest and event.holds} == {0, 1}
    applied = [event for event in log if isinstance(event, WeightsApplied)]
    assert max(len(event.engines) for event in applied) == 2


async def test_engine_rollout_actor_and_rank_are_killed_while_weights_go_by_broadcast(tmp_path: Path) -> None:
    run = Run(tmp_path, num_steps=14, topology=SPLIT)
    names = ["engine.policy.1", "rollout", "trainer.1"]
    async with run.started() as command:
        await kill_in_turn(command, names, every=2)
        await finish(run, command)
    await audit(run, killed=[*names, "trainer.0"])
    async with run.reopened() as bus:
        log = [event for _, event in await read_all(bus, run)]
    announced = [event for event in log if isinstance(event, WeightsAnnounced)]
    assert announced[-1].version in {event.version for event in log if isinstance(event, WeightsApplied)}
    sessions = [event for event in log if isinstance(event, WeightSyncEnded)]
    assert {event.transport for event in sessions} == {"collective"}
    whole = [event for event in sessions if event.holds]
    assert {event.sent_bytes for event in whole} == {announced[0].size_bytes}
    assert sum(len(event.holds) == 2 for event in whole) >= 5
    assert not (run.directory / "weights").exists()
    rows = [row for row in run.rows() if row["step"] > 0]
    assert all(0 < row["perf/update_weights_pause_time"] < row["perf/update_weights_applied_time"] for row in rows)
    sent = [row["perf/update_weights_wire_bytes"] for row in rows if "perf/update_weights_session_time" in row]
    assert sum(sent) <= sum(event.sent_bytes for event in sessions)  # the last version's comes after the last row
    assert len([number for number in sent if number >= announced[0].size_bytes]) >= 5
