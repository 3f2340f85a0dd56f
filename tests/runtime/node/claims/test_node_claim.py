"""One daemon per node of a run, wherever their run directories are."""

import os
from pathlib import Path

import anyio
import pytest

from runtime.bus.bus import Bus
from runtime.node.claims.node_claim import NodeClaim, NodeClaimed, NodeHolder
from runtime.node.daemon import NodeDaemon
from runtime.node.node_plan import NodePlan
from tests.fixtures.nats import TEST_STREAMS, NatsServer, eventually
from tests.runtime.node.daemons import Running, player

pytestmark = pytest.mark.anyio


RENEW_EVERY_S = 0.2


async def died_elsewhere(bus: Bus, *, incarnation: int) -> None:
    """Leave the claim of a node daemon that will not renew it."""
    holder = NodeHolder(host="other", pid=1, run_dir="/elsewhere", incarnation=incarnation, since=0.0)
    await bus.kv.put("agent.n0", holder, ttl_s=1)
    await bus.kv.put("agent_incarnation.n0", incarnation)


async def test_a_second_agent_is_refused_and_told_who_runs_the_node(bus: Bus, tmp_path: Path) -> None:
    claim = await NodeClaim.take(bus, "n0", tmp_path / "one", incarnation=1, renew_every_s=RENEW_EVERY_S)
    async with anyio.create_task_group() as group:
        group.start_soon(claim.keep)
        with pytest.raises(NodeClaimed, match=f"process {os.getpid()} on .*, in {tmp_path / 'one'}; stop that first"):
            await NodeClaim.take(bus, "n0", tmp_path / "two", incarnation=1)
        assert (await NodeClaim.take(bus, "n1", tmp_path / "two", incarnation=1)).holder.incarnation == 1
        group.cancel_scope.cancel()


async def test_the_claim_of_a_dead_agent_expires_and_the_incarnation_rises(bus: Bus, tmp_path: Path) -> None:
    await died_elsewhere(bus, incarnation=4)
    claim = await NodeClaim.take(bus, "n0", tmp_path, incarnation=1)
    assert claim.holder.incarnation == 5


async def test_the_claim_of_a_dead_agent_in_this_directory_is_taken_over_at_once(bus: Bus, tmp_path: Path) -> None:
    first = await NodeClaim.take(bus, "n0", tmp_path, incarnation=1, lifetime_s=600)
    with anyio.fail_after(200):  # sooner than it expires
        second = await NodeClaim.take(bus, "n0", tmp_path, incarnation=2)
    assert (first.holder.incarnation, second.holder.incarnation) == (1, 2)


async def test_two_hosts_of_one_name_and_path_do_not_take_each_others_node(bus: Bus, tmp_path: Path) -> None:
    """Two containers called alike took each other's node at once. Their directories are two to the kernel."""
    (tmp_path / "run").mkdir()
    first = await NodeClaim.take(bus, "n0", tmp_path / "run", incarnation=1, renew_every_s=RENEW_EVERY_S)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    (tmp_path / "run").mkdir()
    async with anyio.create_task_group() as group:
        group.start_soon(first.keep)
        with pytest.raises(NodeClaimed, match=f"process {os.getpid()} on "):
            await NodeClaim.take(bus, "n0", tmp_path / "run", incarnation=1)
        group.cancel_scope.cancel()


async def test_a_claim_that_a_late_clock_keeps_is_taken_over_when_nobody_renews_it(bus: Bus, tmp_path: Path) -> None:
    """As after a move of the server to a machine whose clock is hours behind."""
    holder = NodeHolder(host="other", pid=1, run_dir="/elsewhere", incarnation=4, since=0.0)
    await bus.kv.put("agent.n0", holder, ttl_s=7200)
    claim = await NodeClaim.take(bus, "n0", tmp_path, incarnation=1, lifetime_s=1, renew_every_s=RENEW_EVERY_S)
    assert claim.holder.host != "other"


async def test_a_claim_that_was_given_up_is_free_at_once(bus: Bus, tmp_path: Path) -> None:
    claim = await NodeClaim.take(bus, "n0", tmp_path / "one", incarnation=1)
    await claim.release()
    with anyio.fail_after(200):
        await NodeClaim.take(bus, "n0", tmp_path / "two", incarnation=1)


async def test_a_claim_that_expired_is_entered_again_or_lost_to_another_agent(bus: Bus, tmp_path: Path) -> None:
    claim = await NodeClaim.take(bus, "n0", tmp_path, incarnation=1, renew_every_s=RENEW_EVERY_S)
    await bus.kv.delete("agent.n0")
    async with anyio.create_task_group() as group:
        group.start_soon(claim.keep)
        await eventually(lambda: is_held(bus))
        group.cancel_scope.cancel()
    await died_elsewhere(bus, incarnation=9)
    with pytest.raises(NodeClaimed, match="process 1 on other, in /elsewhere"), anyio.fail_after(200):
        await claim.keep()


async def is_held(bus: Bus) -> bool:
    return await bus.kv.get("agent.n0", NodeHolder) is not None


def plan_on(url: str, run_dir: Path, go_on: Path) -> NodePlan:
    run_dir.mkdir()
    return NodePlan(
        run="two-agents",
        node="n0",
        run_dir=run_dir,
        incarnation=1,
        num_steps=3,
        started=0.0,
        processes=(player("3", "--wait", str(go_on)),),
        bus_url=url,
        limits=TEST_STREAMS,
    )


async def test_of_two_agents_in_two_directories_on_one_server_the_second_ends(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    go_on = tmp_path / "go_on"
    first = Running(plan_on(nats_server.url, tmp_path / "one", go_on))
    second = Running(plan_on(nats_server.url, tmp_path / "two", go_on))
    async with anyio.create_task_group() as group:
        group.start_soon(first.run)
        await first.shown("step 3/3")
        outcome = await second.run()
        go_on.touch()
    assert outcome.refused is not None
    here = f"on {os.uname().nodename}"
    assert f"belong to {tmp_path / 'one'} {here}, not to {tmp_path / 'two'}; " in outcome.refused
    assert f"node n0 of it is run by process {os.getpid()} {here}, in {tmp_path / 'one'}" in outcome.refused
    assert first.outcome is not None
    assert first.outcome.finished
    assert not (tmp_path / "two" / "logs" / "player.jsonl").exists()
    assert isinstance(first.daemon, NodeDaemon)
