"""Restart groups over several nodes agree on each start, whatever dies and however late keys arrive."""

import os
import random
import signal
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from runtime.bus.bus import Bus
from runtime.node import group_starts as group_starts_module
from runtime.node.group_starts import GroupStarts, Standing, Starts, group_starts
from runtime.node.supervisor.state_changes import Exited, GivenUp, Started
from runtime.node.supervisor.supervision import Supervision
from runtime.settings.processes import ProcessSpec, RestartGroupSpec
from tests.fixtures.nats import NatsServer, eventually
from tests.runtime.node.supervisor.test_restart_group import meetings, part
from tests.runtime.node.supervisor.test_supervisor import Changes, supervising

NODES = ("n0", "n1", "n2")


class Cluster:
    """Nodes with one process each, and a bucket whose changes reach each node in order, but at any later time."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._bucket: dict[str, Standing] = {}
        self._on_way: dict[str, deque[tuple[str, Standing]]] = {}
        self.starts: dict[str, Starts] = {}
        self.running: dict[str, int] = {}  # start of the process that runs, by node
        self.restarts = 0
        for node in NODES:
            self.restart_daemon(node)

    def restart_daemon(self, node: str) -> None:
        self.running.pop(node, None)  # its processes end with it
        self.starts[node] = Starts(NODES, node)
        self._on_way[node] = deque(self._bucket.items())
        while self._on_way[node]:
            self.deliver(node)
        self.starts[node].heard_all()

    def kill(self, node: str) -> None:
        if self.running.pop(node, None) is not None:
            self.starts[node].end(f"process on {node}")

    def deliver(self, node: str) -> None:
        if self._on_way[node] and self.starts[node].hear(*self._on_way[node].popleft()):
            self.running.pop(node, None)

    def write(self, node: str) -> None:
        own = self.starts[node].own
        if own is not None and self._bucket.get(node) != own:
            self._bucket[node] = own
            for queue in self._on_way.values():
                queue.append((node, own))

    def begin(self, node: str) -> None:
        starts = self.starts[node]
        if node in self.running or starts.own is None:
            return
        if not starts.own.is_ready:
            starts.be_ready(f"{node}:{starts.own.start}")
        address = starts.begin()
        if address is not None:
            start = starts.own.start
            assert set(self.running.values()) <= {start}, "a process met one of another start"
            assert address == f"n0:{start}"
            self.running[node] = start
            self.restarts += 1

    def disturb(self) -> None:
        """Let one thing happen at random."""
        node, what = self._chance.choice(NODES), self._chance.random()
        if what < 0.02:
            self.restart_daemon(node)
        elif what < 0.08:
            self.kill(node)
        else:
            self._chance.choice([self.deliver, self.write, self.begin])(node)

    def settle(self) -> None:
        """Let everything arrive that is on its way."""
        for _ in range(100):
            for node in NODES:
                self.write(node)
                while self._on_way[node]:
                    self.deliver(node)
                self.begin(node)


def test_processes_of_one_start_alone_run_together_and_all_run_at_last() -> None:
    for seed in range(300):
        cluster = Cluster(random.Random(seed))
        for _ in range(400):
            cluster.disturb()
        cluster.settle()
        assert set(cluster.running) == set(NODES), seed
        assert len(set(cluster.running.values())) == 1, seed


def test_one_death_or_one_on_each_node_at_once_costs_one_restart() -> None:
    cluster = Cluster(random.Random(0))
    cluster.settle()
    assert set(cluster.running.values()) == {1}
    cluster.kill("n1")
    cluster.settle()
    assert set(cluster.running.values()) == {2}
    for node in NODES:
        cluster.kill(node)
    cluster.settle()
    assert set(cluster.running.values()) == {3}
    cluster.restart_daemon("n2")
    cluster.settle()
    assert set(cluster.running.values()) == {4}
    assert cluster.restarts == 4 * len(NODES)


def over_nodes(name: str) -> ProcessSpec:
    return msgspec.structs.replace(part(name), restart_group=RestartGroupSpec("engine", 1, ("n0", "n1")))


@asynccontextmanager
async def node(
    bus: Bus, run_dir: Path, name: str, process: str, shown: list[str] | None = None, *, max_restarts: int = 10
) -> AsyncIterator[tuple[Supervision, Changes]]:
    """A node that runs one process of the group."""
    spec = msgspec.structs.replace(over_nodes(process), max_restarts=max_restarts)
    (agreement,) = group_starts(bus, name, (spec,), shown.append if shown is not None else lambda line: None).values()
    async with supervising(run_dir, node=name) as (supervision, changes), anyio.create_task_group() as tasks:
        tasks.start_soon(agreement.run)
        supervision.start(spec, agreement)
        yield supervision, changes
        tasks.cancel_scope.cancel()


def reasons(changes: Changes) -> list[str]:
    return [each.reason for each in changes.of(Exited) if isinstance(each, Exited)]


def pid(changes: Changes) -> int:
    return [each.pid for each in changes.of(Started) if isinstance(each, Started)][-1]


@pytest.mark.anyio
async def test_processes_of_two_nodes_start_and_restart_together(bus: Bus, tmp_path: Path) -> None:
    async with node(bus, tmp_path, "n0", "first") as (_, first):
        await anyio.sleep(0.3)
        assert not first.all, "the other node is not there yet"
        async with node(bus, tmp_path, "n1", "second") as (_, second):
            for name in ("first", "second"):
                await eventually(lambda name=name: len(meetings(tmp_path, name)) == 1)
            os.kill(pid(second), signal.SIGKILL)
            for name in ("first", "second"):
                await eventually(lambda name=name: len(meetings(tmp_path, name)) == 2)
            assert reasons(second) == ["killed by SIGKILL"]
            assert reasons(first) == ["second, another process of restart group engine, had ended"]
        async with node(bus, tmp_path, "n1", "second") as (_, again):  # its daemon was killed, and started again
            for name in ("first", "second"):
                await eventually(lambda name=name: len(meetings(tmp_path, name)) == 3)
            assert reasons(first)[1:] == ["a process on node n1, another process of restart group engine, had ended"]
            assert reasons(again) == []
    assert meetings(tmp_path, "first") == meetings(tmp_path, "second")


@pytest.mark.anyio
async def test_a_node_that_stops_its_processes_does_not_end_the_others(bus: Bus, tmp_path: Path) -> None:
    async with node(bus, tmp_path, "n0", "first") as (_, first), node(bus, tmp_path, "n1", "second") as (stopped, _):
        for name in ("first", "second"):
            await eventually(lambda name=name: len(meetings(tmp_path, name)) == 1)
        await stopped.stop()
        await anyio.sleep(0.3)
        assert reasons(first) == []


@pytest.mark.anyio
async def test_a_process_spends_one_restart_however_long_it_waits_for_another_node(bus: Bus, tmp_path: Path) -> None:
    """As a trainer rank at home that loses its connection to the ranks of a node that is gone."""
    async with node(bus, tmp_path, "n0", "first", max_restarts=2) as (_, first):
        for start in (1, 2, 3):
            async with node(bus, tmp_path, "n1", "second"):
                await eventually(lambda start=start: len(meetings(tmp_path, "first")) == start)
            if start < 3:  # the other node's daemon and its process are gone
                os.kill(pid(first), signal.SIGKILL)
                await anyio.sleep(1.0)  # longer than the delay before a restart
                assert reasons(first) == ["killed by SIGKILL"] * start
        assert not first.of(GivenUp)


@pytest.mark.anyio
async def test_a_death_while_the_bus_is_away_is_made_up_for_when_it_is_back(
    own_nats_server: NatsServer, own_bus: Bus, tmp_path: Path
) -> None:
    bus = own_bus
    async with node(bus, tmp_path, "n0", "first") as (_, first), node(bus, tmp_path, "n1", "second") as (_, second):
        for name in ("first", "second"):
            await eventually(lambda name=name: len(meetings(tmp_path, name)) == 1)
        own_nats_server.kill()
        os.kill(pid(second), signal.SIGKILL)
        await second.until(lambda: len(reasons(second)) == 1)
        assert reasons(first) == []
        await own_nats_server.restart()
        for name in ("first", "second"):
            await eventually(lambda name=name: len(meetings(tmp_path, name)) == 2)


def test_only_groups_with_processes_on_several_nodes_need_an_agreement() -> None:
    assert not group_starts(None, "n0", (part("first"),), str)  # type: ignore[arg-type]
    (found,) = group_starts(None, "n0", (over_nodes("first"), over_nodes("second")), str).values()  # type: ignore[arg-type]
    assert isinstance(found, GroupStarts)


@pytest.mark.anyio
async def test_the_terminal_names_the_node_that_a_group_waits_for(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_starts_module, "SHOW_AFTER_S", 0.2)
    shown: list[str] = []
    async with node(bus, tmp_path, "n0", "first", shown):
        await eventually(lambda: len(shown) > 0)
        async with node(bus, tmp_path, "n1", "second"):
            await eventually(lambda: len(meetings(tmp_path, "first")) == 1)
            await anyio.sleep(0.3)
    assert shown == ["engine waits for node n1: its processes on all nodes start together"]
