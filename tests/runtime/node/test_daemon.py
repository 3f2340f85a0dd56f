"""The node daemon with a real nats-server and small real processes."""

import errno
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from messages import ActorExited, ActorStarted, BatchReady, KillAnswered, KillRequested, Message, NodeLeft, RunStopped
from runtime.bus.addresses import Address
from runtime.bus.bus import Bus
from runtime.bus.errors import CallRefused
from runtime.bus.nats.server import ServerSettings
from runtime.node.claims.home import HomeLease
from runtime.node.daemon import NodeDaemon
from runtime.node.node_plan import RunEnd, announcement, exit_code_of
from runtime.node.reopen import find_run
from runtime.report.report import Notice, Report
from runtime.settings.processes import PortRequest, ProcessSpec, Tier, WhenListening
from tests.fixtures.nats import eventually
from tests.runtime.node.daemons import Running, broken_engine, plan, player, pool

pytestmark = pytest.mark.anyio

LISTENER = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(60)"


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


async def test_the_directory_of_a_run_that_ended_is_its_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = await Running(plan(tmp_path / "r", player("3"))).run()
    assert outcome.finished
    assert not find_run(str(tmp_path / "r")).foreign
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))  # nothing can be noted there
    outcome = await Running(plan(tmp_path / "s", player("3"))).run()
    assert outcome.finished
    assert find_run(str(tmp_path / "s")).foreign


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
        with anyio.fail_after(200):
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


async def test_a_run_goes_on_without_an_engine_that_was_given_up(tmp_path: Path) -> None:
    """It ended with the first engine that used up its restarts."""
    given_up = tmp_path / "given up"
    changed = msgspec.structs.replace(
        plan(tmp_path / "r", player("3", "--wait", str(given_up)), broken_engine(0)),
        needs=(pool("local", "local", least=1),),
    )
    running = Running(changed)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await running.shown("engine.policy.0 is given up, the run goes on without")
        given_up.touch()
    assert running.outcome is not None
    assert running.outcome.finished


async def test_a_run_ends_at_once_with_fewer_engines_than_it_needs(tmp_path: Path) -> None:
    changed = msgspec.structs.replace(
        plan(tmp_path / "r", player("1", "--then", "sleep"), broken_engine(0)),
        needs=(pool("local", "local", least=2),),
    )
    outcome = await Running(changed).run()
    assert outcome.failure is not None
    assert outcome.failure.spec.name == "engine.policy.0"


@pytest.mark.parametrize("least", [1, 2])
async def test_an_engine_that_is_to_be_given_up_is_not_started_again_and_named_with_its_node(
    tmp_path: Path, least: int
) -> None:
    """The run goes on while enough engines are left."""
    go_on, engine = tmp_path / "go_on", msgspec.structs.replace(listening_server(), critical=False)
    own = plan(tmp_path / "r", engine, player("3", "--wait", str(go_on)))
    running = Running(msgspec.structs.replace(own, needs=(pool("local", "local", least=least),)))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await running.shown("step 1/3")
        url = (tmp_path / "r" / "bus.url").read_text().strip()
        async with Bus.connect(url, "r", name="test") as bus:
            async with bus.kv.watch("address.engine.policy.*", Address) as addresses:
                first = await addresses.next(10)
            assert first is not None
            assert first.value is not None
            asked = KillRequested(process=engine.name, pid=first.value.pid, reason="refuses weights 7", gives_up=True)
            assert (await bus.call(first.value.agent, asked, KillAnswered, timeout_s=5)).killed
        if least == 1:
            await running.shown(f"{engine.name} is given up, the run goes on without it: node local: refuses weights 7")
            go_on.touch()
    assert running.outcome is not None
    assert running.outcome.finished == (least == 1)
    failure = running.outcome.failure
    assert least == 1 or (failure is not None and failure.reason == "node local: refuses weights 7")
    assert not [line for line in running.lines if "restarting" in line]


async def test_a_home_that_finds_a_later_one_ends_with_its_bus(tmp_path: Path) -> None:
    """As when its network returns: two servers on one store would destroy it."""
    of_two = msgspec.structs.replace(plan(tmp_path / "r", player("1", "--then", "sleep")), leases_home=True)
    running = Running(of_two)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await running.shown("step 1/3")
        server = pid_of(tmp_path / "r", "nats-server")
        later = await HomeLease.take(tmp_path / "r", "n0", take_over=True, place="elsewhere")
        tasks.start_soon(later.keep, 0.1)  # the running home may just have read the file, and overwrites it once more
        await eventually(lambda: running.outcome is not None)
        tasks.cancel_scope.cancel()
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
