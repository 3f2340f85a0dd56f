"""Daemons of the nodes of one run: how they end together, and what home does without a node or an engine."""

import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from messages import ActorStarted, RunStopped
from runtime.bus.bus import Bus
from runtime.node.acceptance import Acceptance, NodeStatement
from runtime.node.checks.facts import NodeFacts
from runtime.node.claims.node_claim import NodeClaim
from runtime.node.claims.run_id import settle_run_id
from runtime.node.missing import Need, Part
from runtime.node.node_plan import NodePlan, RunEnd, exit_code_of
from runtime.node.run_log import note_begin_of_home
from runtime.node.supervisor.state_changes import GivenUp
from runtime.settings.processes import ProcessSpec
from tests.build.topology import topology_with
from tests.fixtures.nats import NatsServer, eventually
from tests.runtime.node.daemons import LIMITS, Running, broken_engine, plan, player, pool

pytestmark = pytest.mark.anyio


def node_plan(node: str, url: str, run_dir: Path, process: ProcessSpec, *, run: str) -> NodePlan:
    """Of one node of two, on a server that belongs to neither."""
    changed = msgspec.structs.replace(plan(run_dir, process), run=run, node=node, server=None, bus_url=url)
    return msgspec.structs.replace(changed, owns_streams=node == "n0", keeps_metrics=node == "n0", limits=LIMITS)


@asynccontextmanager
async def two_nodes(
    url: str, run: str, tmp_path: Path, *, within_s: float = 30.0, **changes: Any
) -> AsyncGenerator[tuple[Running, Running]]:
    """Two daemons at work, until both have ended, within so many seconds after both are at work."""
    running: list[Running] = []
    with anyio.fail_after(None) as scope:
        async with anyio.create_task_group() as tasks:
            for node, steps in (("n0", "1"), ("n1", "0")):
                spec = player(steps, "--then", "sleep", name=f"player-{node}")
                of_node = node_plan(node, url, tmp_path / node, spec, run=run)
                running.append(Running(msgspec.structs.replace(of_node, nodes=("n0", "n1"), **changes)))
                tasks.start_soon(running[-1].run)
                log = tmp_path / node / "logs" / f"player-{node}.jsonl"
                await eventually(lambda: log.exists() and "played" in log.read_text())  # noqa: B023 - awaited at once
            scope.deadline = anyio.current_time() + within_s
            yield running[0], running[1]


async def test_a_stop_of_the_home_node_ends_every_node_with_the_same_code(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    """The other nodes ended after 33 s, with "the bus failed"."""
    async with two_nodes(nats_server.url, "stopped", tmp_path) as (home, other):
        home.daemon._end(RunEnd(finished=False, stopped_by=signal.SIGINT))
    assert home.outcome is not None
    assert other.outcome is not None
    assert other.outcome.stopped == RunStopped(node="n0", reason="SIGINT", exit_code=130)
    assert (exit_code_of(home.outcome), exit_code_of(other.outcome)) == (130, 130)


async def test_a_node_that_still_reads_the_past_ends_with_the_run(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that started again in a long run folded its past for 20 s, and home no longer waited for it."""
    async with two_nodes(nats_server.url, "reads", tmp_path) as (home, other):
        reading = anyio.Event()

        async def take(_event: object) -> None:
            reading.set()
            await anyio.sleep_forever()

        monkeypatch.setattr(other.daemon.reporting, "take", take)
        async with Bus.connect(nats_server.url, "reads", name="test") as bus:
            await bus.publish(ActorStarted(actor="player-n0", node="n0", pid=7, restarts=1))
        await reading.wait()
        home.daemon._end(RunEnd(finished=False, stopped_by=signal.SIGINT))
    assert other.outcome is not None
    assert exit_code_of(other.outcome) == 130


async def test_another_node_that_is_stopped_leaves_and_the_run_goes_on(nats_server: NatsServer, tmp_path: Path) -> None:
    """Home went on without a word."""
    async with two_nodes(nats_server.url, "left", tmp_path) as (home, other):
        other.daemon._end(RunEnd(finished=False, stopped_by=signal.SIGINT))
        await home.shown("node n1 left the run: SIGINT")
        assert home.outcome is None
        home.daemon._end(RunEnd(finished=False, stopped_by=signal.SIGTERM))
    assert other.outcome is not None
    assert exit_code_of(other.outcome) == 130


async def test_giving_up_on_any_node_ends_the_run(nats_server: NatsServer, tmp_path: Path) -> None:
    async with two_nodes(nats_server.url, "given-up", tmp_path) as (home, other):
        spec = player("0", name="player-n1")
        failure = GivenUp(spec=spec, exit_code=2, reason="no such data", log="", tail=())
        other.daemon._end(RunEnd(finished=False, failure=failure))
    assert home.outcome is not None
    assert home.outcome.stopped == RunStopped(node="n1", reason="player-n1: no such data", exit_code=2)
    assert exit_code_of(home.outcome) == 2


@pytest.mark.parametrize("is_resumed", [False, True])
async def test_a_node_that_joins_after_the_run_was_stopped_ends_with_it(
    nats_server: NatsServer, tmp_path: Path, is_resumed: bool
) -> None:
    """It ran on alone. The stop of an earlier start of the home node ends nothing."""
    run = f"late-{is_resumed}"
    home, later = (
        tmp_path / "n0",
        node_plan("n1", nats_server.url, tmp_path / "n1", player("0", "--then", "sleep"), run=run),
    )
    home.mkdir()
    async with Bus.connect(nats_server.url, run, name="home") as bus:
        await bus.ensure_streams(LIMITS)
        await settle_run_id(bus, home, owns=True)
        claim = await NodeClaim.take(bus, "n0", home, incarnation=1)
        await note_begin_of_home(bus, claim.holder.incarnation, 1)
        stop = RunStopped(node="n0", reason="SIGINT", exit_code=130)
        seq = await bus.publish(stop)
        if is_resumed:
            claim = await NodeClaim.take(bus, "n0", home, incarnation=2)
            await note_begin_of_home(bus, claim.holder.incarnation, seq + 1)
        other = Running(msgspec.structs.replace(later, home="n0"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other.run)
            if is_resumed:
                log = tmp_path / "n1" / "logs" / "player.jsonl"
                await eventually(lambda: log.exists() and "played" in log.read_text())
                assert other.outcome is None
                await bus.publish(RunStopped(node="n0", reason="SIGTERM", exit_code=143))
    assert other.outcome is not None
    assert exit_code_of(other.outcome) == (143 if is_resumed else 130)


async def test_home_counts_the_engines_that_other_nodes_gave_up(nats_server: NatsServer, tmp_path: Path) -> None:
    async with two_nodes(
        nats_server.url, "counted", tmp_path, needs=(pool("n0", "n1", least=2),), waits={"n1": 60.0}
    ) as (home, other):
        other.daemon._supervision.start(broken_engine(1))
    assert home.outcome is not None
    assert home.outcome.error == (
        "engines.policy: 1 of 2 engines are left, fewer than min_engines = 2: engine.policy.1: exit code 7"
    )
    assert other.outcome is not None
    assert other.outcome.stopped is not None
    assert other.outcome.stopped.node == "n0"


async def test_a_later_home_counts_the_engines_that_other_nodes_gave_up_before(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still: it knew neither of the engine that had been given up, nor why no tokens came."""
    shared = topology_with(
        nodes={"n0": {}, "n1": {}}, bus={"node": "n0"}, trainer={"device": "cpu"}, engines={"policy": {"kind": "tiny"}}
    )
    url, run = nats_server.url, "counted-later"

    def home(least: int) -> Running:
        of_node = node_plan("n0", url, tmp_path / "n0", player("0", "--then", "sleep"), run=run)
        needs = (pool("n0", "n1", least=least),)
        two = msgspec.structs.replace(of_node, nodes=("n0", "n1"), needs=needs, waits={"n1": 60.0})
        return Running(two, comparison=Acceptance(shared, "n0", NodeFacts(), tmp_path / "n0"))

    monkeypatch.setattr("runtime.node.other_nodes.LEAVE_WITHIN_S", 0.1)  # the other node stays
    with anyio.fail_after(200):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon((first := home(1)).run)
            statement = NodeStatement("n1", NodeFacts(), tmp_path / "n1")
            await eventually((tmp_path / "n0" / "logs" / "player.jsonl").exists)
            async with Bus.connect(url, run, name="n1") as bus:
                assert (await statement.state(bus, wait_s=40)).refusals == ()
            of_node = node_plan("n1", url, tmp_path / "n1", broken_engine(1), run=run)
            tasks.start_soon((other := Running(of_node, comparison=statement)).run)
            line = "engine.policy.1 is given up, the run goes on without it: exit code 7"
            await other.shown(line)
            await first.shown(line)
            first.daemon._end(RunEnd(finished=False, error="killed", is_announced=True))
            await eventually(lambda: first.outcome is not None)
            later = await home(2).run()
    assert later.error == (
        "engines.policy: 1 of 2 engines are left, fewer than min_engines = 2: engine.policy.1: exit code 7; "
        "restarted 0 times without progress"
    )
    assert other.outcome is not None
    assert other.outcome.stopped is not None


async def test_home_waits_for_a_node_that_it_needs_and_then_ends_with_its_name(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    need = Need("trainer.1", (Part("trainer.1", {"trainer.1": "n1"}),), 1)
    async with two_nodes(nats_server.url, "needed", tmp_path, within_s=50.0, needs=(need,), waits={"n1": 6.0}) as (
        home,
        other,
    ):
        other.daemon._end(RunEnd(finished=False, stopped_by=signal.SIGINT))
        await home.shown("waiting for node n1, up to 6 s (nodes.n1.wait_s): trainer.1 can run on no other node")
    assert home.outcome is not None
    assert home.outcome.error == (
        "node n1 did not come within 6 s (nodes.n1.wait_s): trainer.1 can run on no other node"
    )
    assert exit_code_of(home.outcome) == 1
