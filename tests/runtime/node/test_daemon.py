"""The node daemon with a real nats-server and small real processes."""

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from messages import ActorExited, ActorStarted, BatchReady, KillAnswered, KillRequested, Message, NodeLeft, RunStopped
from runtime.bus.addresses import Address
from runtime.bus.bus import Bus
from runtime.bus.errors import CallRefused
from runtime.bus.limits import MIB, StreamLimits
from runtime.bus.nats.server import ServerSettings
from runtime.node.acceptance import Acceptance, NodeStatement
from runtime.node.checks.facts import NodeFacts
from runtime.node.claims.home import HomeLease
from runtime.node.claims.node_claim import NodeClaim
from runtime.node.claims.run_id import settle_run_id
from runtime.node.daemon import NodeDaemon
from runtime.node.missing import Part, Role
from runtime.node.node_plan import NodePlan, RunEnd, announcement, exit_code_of
from runtime.node.run_log import note_begin_of_home
from runtime.node.supervisor.state_changes import GivenUp
from runtime.report.report import Notice, Report
from runtime.settings.processes import PortRequest, ProcessSpec, Tier, WhenListening
from tests.build.topology import topology_with
from tests.fixtures.nats import NatsServer, eventually

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
PLAYER = Path(__file__).parent / "player.py"
LIMITS = StreamLimits(
    event_bytes=16 * MIB, work_bytes=4 * MIB, data_bytes=16 * MIB, dead_bytes=4 * MIB, kv_bytes=4 * MIB
)
LISTENER = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(60)"


def player(*arguments: str, name: str = "player", max_restarts: int = 10) -> ProcessSpec:
    command = (sys.executable, str(PLAYER), *arguments)
    return ProcessSpec(name=name, command=command, env={"PYTHONPATH": str(ROOT)}, max_restarts=max_restarts)


def plan(run_dir: Path, *processes: ProcessSpec, incarnation: int = 1) -> NodePlan:
    run_dir.mkdir(exist_ok=True)
    return NodePlan(
        run="r",
        node="local",
        run_dir=run_dir,
        incarnation=incarnation,
        num_steps=3,
        started=time.time(),
        processes=processes,
        server=ServerSettings(store_dir=run_dir / "nats"),
        limits=LIMITS,
    )


class Running:
    """A node daemon in this process, its lines, and its outcome."""

    def __init__(self, node_plan: NodePlan, **options: Any) -> None:
        self.lines: list[str] = []
        self.daemon = NodeDaemon(node_plan, show=self._show, **options)
        self.outcome: RunEnd | None = None
        self._more = anyio.Event()

    def _show(self, text: str) -> None:
        self.lines.append(text)
        self._more.set()
        self._more = anyio.Event()

    async def run(self) -> RunEnd:
        with anyio.fail_after(20):
            self.outcome = await self.daemon.run()
        return self.outcome

    async def shown(self, part: str) -> str:
        """Wait for a line that holds a text."""
        with anyio.fail_after(15):
            while True:
                for line in self.lines:
                    if part in line:
                        return line
                await self._more.wait()


async def events_of(run_dir: Path) -> list[Message]:
    """The log of a run that has ended, read from its store."""
    from tests.support.running_server import running_server

    settings = ServerSettings(store_dir=run_dir / "nats")
    async with (
        running_server(run_dir / "bus", settings) as server,
        Bus.connect(server.url, "r", name="test") as bus,
        bus.read() as events,
    ):
        found: list[Message] = []
        while events.pending:
            received = await events.next(5)
            assert received is not None
            found.append(received.message)
        return found


async def test_a_run_ends_when_the_log_says_that_it_is_finished(tmp_path: Path) -> None:
    running = Running(plan(tmp_path / "r", player("3")))
    outcome = await running.run()
    assert outcome.finished
    assert exit_code_of(outcome) == 0
    steps = [line for line in running.lines if line.startswith("step ")]
    assert len(steps) == 3
    rows = [msgspec.json.decode(line) for line in (tmp_path / "r" / "metrics.jsonl").read_bytes().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert running.daemon.reporting.report.result(time.time()).groups["trained"] == 3
    events = await events_of(tmp_path / "r")
    started = [event.actor for event in events if isinstance(event, ActorStarted)]
    assert sorted(started) == ["nats-server", "player"]
    assert "player" in [event.actor for event in events if isinstance(event, ActorExited)]


async def test_the_last_exits_are_told_on_a_slow_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon ended before it published which processes it had stopped: one of many runs lacked its last event."""
    publish = Bus.publish

    async def slowly(bus: Bus, message: Message, **options: Any) -> Any:
        if isinstance(message, ActorExited):
            await anyio.sleep(0.3)
        return await publish(bus, message, **options)

    monkeypatch.setattr(Bus, "publish", slowly)
    assert (await Running(plan(tmp_path / "r", player("3"))).run()).finished
    exits = [event for event in await events_of(tmp_path / "r") if isinstance(event, ActorExited)]
    assert [(event.actor, event.reason) for event in exits] == [("player", "stopped")]


async def test_what_cannot_be_shown_does_not_end_a_run(tmp_path: Path) -> None:
    """A group without samples and a batch without groups ended the daemon, as an error in a line would."""
    running = Running(plan(tmp_path / "r", player("3", "--odd")))
    outcome = await running.run()
    assert outcome.finished
    assert any(line.startswith("first sample: group 99 has none") for line in running.lines)


async def test_an_error_in_the_report_costs_what_is_shown_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = Report.apply

    def failing(report: Report, event: Message, seq: int, time: float) -> list[Notice]:
        if isinstance(event, BatchReady):
            raise LookupError("a report that nobody foresaw")
        return apply(report, event, seq, time)

    monkeypatch.setattr(Report, "apply", failing)
    running = Running(plan(tmp_path / "r", player("3")))
    outcome = await running.run()
    assert outcome.finished
    (line,) = [line for line in running.lines if "a report that nobody foresaw" in line]
    assert "cannot be shown: LookupError" in line
    assert line.endswith("the run goes on (logs/daemon.jsonl has more)")


@pytest.mark.slow
async def test_a_terminal_that_fails_or_stands_still_holds_nobody_up(tmp_path: Path) -> None:
    go_on = threading.Event()

    def stuck(text: str) -> None:
        if text.startswith("step 1/"):
            raise RuntimeError("no such terminal")
        if text.startswith("step 2/"):
            go_on.wait(30)

    try:
        with anyio.fail_after(20):
            outcome = await NodeDaemon(plan(tmp_path / "r", player("3")), show=stuck).run()
    finally:
        go_on.set()
    assert outcome.finished


@pytest.mark.slow
async def test_a_given_up_process_fails_the_run_with_its_reason(tmp_path: Path) -> None:
    running = Running(plan(tmp_path / "r", player("1", "--then", "crash", max_restarts=1)))
    outcome = await running.run()
    assert exit_code_of(outcome) == 1
    assert outcome.failure is not None
    assert outcome.failure.spec.name == "player"
    assert "RuntimeError: the player stumbled" in outcome.failure.reason
    assert any("the player stumbled" in line for line in outcome.failure.tail)
    assert "player ended: RuntimeError: the player stumbled (exit code 1); restarting in 0.1 s" in running.lines


@pytest.mark.slow
async def test_wrong_input_of_a_process_ends_the_run(tmp_path: Path) -> None:
    outcome = await Running(plan(tmp_path / "r", player("0", "--then", "input_error"))).run()
    assert exit_code_of(outcome) == 2


@pytest.mark.slow
async def test_a_fenced_process_is_not_restarted_and_the_run_goes_on_with_the_other(tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"
    fenced = player("0", "--then", "fenced", name="fenced")
    running = Running(plan(tmp_path / "r", fenced, player("1", "--wait", str(go_on))))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await running.shown("fenced is not started again")
        go_on.touch()
    assert running.outcome is not None
    assert running.outcome.finished


async def test_a_killed_nats_server_comes_back_on_its_port_and_the_run_goes_on(tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"
    running = Running(plan(tmp_path / "r", player("2", "--wait", str(go_on))))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await running.shown("step 2/3")
        url = (tmp_path / "r" / "bus.url").read_text()
        os.kill(pid_of(tmp_path / "r", "nats-server"), signal.SIGKILL)
        await running.shown("nats-server restarted")
        go_on.touch()
    assert running.outcome is not None
    assert running.outcome.finished
    assert (tmp_path / "r" / "bus.url").read_text() == url


def listening_server() -> ProcessSpec:
    """A server whose address is on the bus."""
    return ProcessSpec(
        name="engine.policy.0",
        command=(sys.executable, "-c", LISTENER, "{port}"),
        port=PortRequest(),
        ready=WhenListening(),
        address_key="address.engine.policy.0",
        tier=Tier.SERVICE,
    )


async def test_servers_are_found_in_the_kv_where_they_listen_now(tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"
    running = Running(plan(tmp_path / "r", listening_server(), player("1", "--wait", str(go_on))))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await running.shown("step 1/3")
        url = (tmp_path / "r" / "bus.url").read_text().strip()
        async with (
            Bus.connect(url, "r", name="test") as bus,
            bus.kv.watch("address.engine.policy.*", Address) as addresses,
        ):
            first = await addresses.next(10)
            os.kill(pid_of(tmp_path / "r", "engine.policy.0"), signal.SIGKILL)
            second = await addresses.next(10)
        go_on.touch()
    assert first is not None
    assert first.value is not None
    assert second is not None
    assert first.value.url == second.value.url  # the same port, another process
    assert first.value.pid != second.value.pid
    assert second.revision > first.revision


async def test_a_server_is_killed_and_started_again_when_that_is_asked_for_once_for_each_process(
    tmp_path: Path,
) -> None:
    go_on = tmp_path / "go_on"
    running = Running(plan(tmp_path / "r", listening_server(), player("1", "--wait", str(go_on))))

    async def kill(bus: Bus, address: Address, **fields: Any) -> KillAnswered:
        asked = {"process": "engine.policy.0", "pid": address.pid, "reason": "no token for 3 s", **fields}
        return await bus.call(address.agent, KillRequested(**asked), KillAnswered, timeout_s=5)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await running.shown("step 1/3")
        url = (tmp_path / "r" / "bus.url").read_text().strip()
        async with (
            Bus.connect(url, "r", name="test") as bus,
            bus.kv.watch("address.engine.policy.*", Address) as addresses,
        ):
            first = await addresses.next(10)
            assert first is not None
            assert first.value is not None
            os.kill(first.value.pid, signal.SIGSTOP)  # nothing but SIGKILL ends it now
            assert (await kill(bus, first.value)).killed
            second = await addresses.next(10)
            assert second is not None
            assert second.value is not None
            assert not (await kill(bus, first.value)).killed  # the one that was meant is gone
            with pytest.raises(CallRefused, match=r"is not a server of this node; allowed: engine\.policy\.0"):
                await kill(bus, second.value, process="player")
            os.kill(second.value.pid, 0)
        go_on.touch()
    assert "engine.policy.0 ended: no token for 3 s; restarting in 0." in "\n".join(running.lines)


async def test_a_resumed_run_counts_what_went_before_and_shows_only_what_is_new(tmp_path: Path) -> None:
    failed = Running(plan(tmp_path / "r", player("2", "--then", "input_error")))
    await failed.run()
    resumed = Running(plan(tmp_path / "r", player("0"), incarnation=2))
    outcome = await resumed.run()
    assert outcome.finished
    result = resumed.daemon.reporting.report.result(time.time())
    assert (result.steps, result.groups["trained"]) == (2, 2)
    assert not [line for line in resumed.lines if line.startswith("step ")]
    rows = [msgspec.json.decode(line)["step"] for line in (tmp_path / "r" / "metrics.jsonl").read_bytes().splitlines()]
    assert rows == [1, 2]


@pytest.mark.parametrize("ahead_s", [7200.0, -7200.0])
async def test_a_failure_of_this_start_ends_it_and_an_earlier_one_does_not(tmp_path: Path, ahead_s: float) -> None:
    """Whatever this machine's clock says: with one ahead of the server's, no failure ended the run."""
    first = plan(tmp_path / "r", player("1", "--then", "fail"))
    failed = await Running(msgspec.structs.replace(first, started=time.time() + ahead_s)).run()
    assert failed.error == "the player has had enough"
    second = plan(tmp_path / "r", player("2"), incarnation=2)
    resumed = Running(msgspec.structs.replace(second, started=time.time() + ahead_s))
    assert (await resumed.run()).finished
    assert [line.partition(" ")[0] for line in resumed.lines if line.startswith("step ")] == ["step"]


async def test_the_first_signal_stops_in_order(tmp_path: Path) -> None:
    running = Running(plan(tmp_path / "r", player("1", "--then", "sleep")))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await running.shown("step 1/3")
        os.kill(os.getpid(), signal.SIGINT)
    assert running.outcome is not None
    assert exit_code_of(running.outcome) == 130


def node_plan(node: str, url: str, run_dir: Path, process: ProcessSpec, *, run: str) -> NodePlan:
    """Of one node of two, on a server that belongs to neither."""
    changed = msgspec.structs.replace(plan(run_dir, process), run=run, node=node, server=None, bus_url=url)
    return msgspec.structs.replace(changed, owns_streams=node == "n0", keeps_metrics=node == "n0", limits=LIMITS)


@asynccontextmanager
async def two_nodes(url: str, run: str, tmp_path: Path, **changes: Any) -> AsyncGenerator[tuple[Running, Running]]:
    """Two daemons at work, until both have ended."""
    running: list[Running] = []
    async with anyio.create_task_group() as tasks:
        for node, steps in (("n0", "1"), ("n1", "0")):
            spec = player(steps, "--then", "sleep", name=f"player-{node}")
            of_node = node_plan(node, url, tmp_path / node, spec, run=run)
            running.append(Running(msgspec.structs.replace(of_node, nodes=("n0", "n1"), **changes)))
            tasks.start_soon(running[-1].run)
            log = tmp_path / node / "logs" / f"player-{node}.jsonl"
            await eventually(lambda: log.exists() and "played" in log.read_text())  # noqa: B023 - awaited at once
        yield running[0], running[1]


async def test_a_stop_of_the_home_node_ends_every_node_with_the_same_code(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    """The other nodes ended after 33 s, with "the bus failed"."""
    with anyio.fail_after(15):
        async with two_nodes(nats_server.url, "stopped", tmp_path) as (home, other):
            home.daemon._end(RunEnd(finished=False, stopped_by=signal.SIGINT))
    assert home.outcome is not None
    assert other.outcome is not None
    assert other.outcome.stopped == RunStopped(node="n0", reason="SIGINT", exit_code=130)
    assert (exit_code_of(home.outcome), exit_code_of(other.outcome)) == (130, 130)


async def test_another_node_that_is_stopped_leaves_and_the_run_goes_on(nats_server: NatsServer, tmp_path: Path) -> None:
    """Home went on without a word."""
    with anyio.fail_after(15):
        async with two_nodes(nats_server.url, "left", tmp_path) as (home, other):
            other.daemon._end(RunEnd(finished=False, stopped_by=signal.SIGINT))
            await home.shown("node n1 left the run: SIGINT")
            assert home.outcome is None
            home.daemon._end(RunEnd(finished=False, stopped_by=signal.SIGTERM))
    assert other.outcome is not None
    assert exit_code_of(other.outcome) == 130


async def test_giving_up_on_any_node_ends_the_run(nats_server: NatsServer, tmp_path: Path) -> None:
    with anyio.fail_after(15):
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


def broken_engine(number: int) -> ProcessSpec:
    """An engine that ends at once and is not started again."""
    command = (sys.executable, "-c", "raise SystemExit(7)")
    name = f"engine.policy.{number}"
    return ProcessSpec(name=name, command=command, tier=Tier.SERVICE, critical=False, max_restarts=0)


def pool(*nodes: str, least: int) -> Role:
    parts = [(f"engine.policy.{number}", node) for number, node in enumerate(nodes)]
    return Role("engines.policy", tuple(Part(name, {name: node}) for name, node in parts), least, "min_engines")


async def test_a_run_goes_on_without_an_engine_that_was_given_up(tmp_path: Path) -> None:
    """It ended with the first engine that used up its restarts."""
    changed = msgspec.structs.replace(
        plan(tmp_path / "r", player("3"), broken_engine(0)), roles=(pool("local", "local", least=1),)
    )
    running = Running(changed)
    assert (await running.run()).finished
    assert [line for line in running.lines if line.startswith("engine.policy.0 is given up, the run goes on without")]


async def test_a_run_ends_at_once_with_fewer_engines_than_it_needs(tmp_path: Path) -> None:
    changed = msgspec.structs.replace(
        plan(tmp_path / "r", player("1", "--then", "sleep"), broken_engine(0)),
        roles=(pool("local", "local", least=2),),
    )
    outcome = await Running(changed).run()
    assert outcome.failure is not None
    assert outcome.failure.spec.name == "engine.policy.0"


async def test_home_counts_the_engines_that_other_nodes_gave_up(nats_server: NatsServer, tmp_path: Path) -> None:
    with anyio.fail_after(15):
        async with two_nodes(
            nats_server.url, "counted", tmp_path, roles=(pool("n0", "n1", least=2),), waits={"n1": 60.0}
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
        roles = (pool("n0", "n1", least=least),)
        two = msgspec.structs.replace(of_node, nodes=("n0", "n1"), roles=roles, waits={"n1": 60.0})
        return Running(two, comparison=Acceptance(shared, "n0", NodeFacts(), tmp_path / "n0"))

    monkeypatch.setattr("runtime.node.other_nodes.LEAVE_WITHIN_S", 0.1)  # the other node stays
    with anyio.fail_after(18):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon((first := home(1)).run)
            statement = NodeStatement("n1", NodeFacts(), tmp_path / "n1")
            await eventually((tmp_path / "n0" / "logs" / "player.jsonl").exists)
            async with Bus.connect(url, run, name="n1") as bus:
                assert (await statement.state(bus, wait_s=10)).refusals == ()
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
    role = Role("trainer.1", (Part("trainer.1", {"trainer.1": "n1"}),), 1)
    with anyio.fail_after(28):
        async with two_nodes(nats_server.url, "needed", tmp_path, roles=(role,), waits={"n1": 6.0}) as (home, other):
            other.daemon._end(RunEnd(finished=False, stopped_by=signal.SIGINT))
            await home.shown("waiting for node n1, up to 6 s (nodes.n1.wait_s): trainer.1 can run on no other node")
    assert home.outcome is not None
    assert home.outcome.error == (
        "node n1 did not come within 6 s (nodes.n1.wait_s): trainer.1 can run on no other node"
    )
    assert exit_code_of(home.outcome) == 1


async def test_a_home_that_finds_a_later_one_ends_with_its_bus(tmp_path: Path) -> None:
    """As when its network returns: two servers on one store would destroy it."""
    of_two = msgspec.structs.replace(plan(tmp_path / "r", player("1", "--then", "sleep")), leases_home=True)
    running = Running(of_two)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await running.shown("step 1/3")
        server = pid_of(tmp_path / "r", "nats-server")
        await HomeLease.take(tmp_path / "r", "n0", take_over=True, place="elsewhere")
    assert running.outcome is not None
    assert running.outcome.error is not None
    assert running.outcome.error.endswith("is home now")
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


@pytest.mark.parametrize(
    ("outcome", "is_home", "told"),
    [
        (RunEnd(finished=True), True, None),
        (RunEnd(finished=False, refused="x"), True, RunStopped(node="n", reason="x", exit_code=2)),
        (RunEnd(finished=False, refused="x"), False, NodeLeft(node="n", reason="x")),
        (RunEnd(finished=False, error="the buffer said so", is_announced=True), True, None),
        (RunEnd(finished=False, error="no space"), True, RunStopped(node="n", reason="no space", exit_code=1)),
        (RunEnd(finished=False, error="no space"), False, NodeLeft(node="n", reason="no space")),
        (RunEnd(finished=False, stopped_by=15), True, RunStopped(node="n", reason="SIGTERM", exit_code=143)),
        (RunEnd(finished=False, stopped_by=15), False, NodeLeft(node="n", reason="SIGTERM")),
    ],
)
def test_what_a_node_that_ends_tells_the_others(
    outcome: RunEnd, is_home: bool, told: RunStopped | NodeLeft | None
) -> None:
    assert announcement(outcome, "n", is_home=is_home) == told


def pid_of(run_dir: Path, process: str) -> int:
    """The running process of this name; the session has a nats-server of its own beside it."""
    import psutil

    children = psutil.Process().children(recursive=True)
    words = {"nats-server": str(run_dir / "bus" / "nats.conf"), "engine.policy.0": "create_server"}
    (found,) = [child.pid for child in children if any(words[process] in part for part in child.cmdline())]
    return found


@pytest.mark.parametrize("answers", [True, False], ids=["an error", "silence"])
async def test_a_disk_that_does_not_tell_its_free_bytes_ends_no_run(
    answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, asked = threading.Event(), threading.Event()

    def stale(path: Path) -> int:
        asked.set()
        assert answers or over.wait(30)
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr("runtime.node.daemon.free_bytes", stale)
    try:
        outcome = await Running(plan(tmp_path / "r", player("3")), disk_timeout_s=1.0).run()
    finally:
        over.set()
    assert asked.is_set()
    assert outcome.finished, outcome
