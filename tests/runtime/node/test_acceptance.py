"""Nodes state their facts on a real bus, and home accepts or refuses them."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime.bus.bus import Bus
from runtime.node.acceptance import (
    COMMON_FILE,
    HOME_KEY,
    Acceptance,
    Answer,
    HomeStart,
    NodeStatement,
    NotAnswered,
    Statement,
)
from runtime.node.checks.comparison import Refusal
from runtime.node.checks.facts import NodeFacts
from runtime.node.claims.node_claim import NodeClaim
from runtime.settings.reading.config import Problem
from runtime.settings.topology import Topology
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually

pytestmark = pytest.mark.anyio

NODES: dict[str, Any] = {name: {} for name in ("n0", "n1", "n2")}
POOL: dict[str, Any] = {"kind": "tiny", "nodes": ["n1"], "weight_transport": "disk"}


def topology() -> Topology:
    return topology_with(nodes=NODES, bus={"node": "n0"}, trainer={"device": "cpu"}, engines={"policy": POOL})


def facts(version: str = "1") -> NodeFacts:
    return NodeFacts(versions={"physarum": version} if version else {})


@asynccontextmanager
async def home(
    bus: Bus, run_dir: Path, *, ends: bool = False, version: str = "1"
) -> AsyncGenerator[list[list[Refusal]]]:
    """Home's side, and what it refused."""
    refused: list[list[Refusal]] = []

    acceptance = Acceptance(topology(), "n0", facts(version), run_dir)
    await acceptance.open(bus)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(acceptance.run, bus, lambda _: ends, lambda refusals, _: refused.append(refusals))
        yield refused
        tasks.cancel_scope.cancel()


async def test_a_node_that_sees_the_directory_is_accepted_and_another_is_refused_by_key(
    bus: Bus, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    async with home(bus, tmp_path) as refused:
        assert (await NodeStatement("n1", facts(), tmp_path).state(bus, wait_s=40)).refusals == ()
        [line] = (await NodeStatement("n1", facts(), elsewhere).state(bus, wait_s=40)).refusals
        assert line.startswith('node n1: engines.policy.weight_transport = "disk": ')
        assert (await NodeStatement("n2", facts(), elsewhere).state(bus, wait_s=40)).refusals == ()  # it has no engine
        [unknown] = (await NodeStatement("n7", facts(), tmp_path).state(bus, wait_s=40)).refusals
        assert unknown == 'node n7: nodes.n7 = "n7": the topology of node n0 has no such node; it has: n0, n1, n2'
    assert [str(refusal) for refusal in refused[0]] == [line]
    entry = await bus.kv.get("facts.n2", Statement)
    assert entry is not None
    assert entry.value is not None
    assert entry.value.facts.clock_ahead_s == pytest.approx(0, abs=1)


async def test_an_answer_of_an_earlier_home_does_not_count(bus: Bus, tmp_path: Path) -> None:
    async with home(bus, tmp_path):
        assert (await NodeStatement("n1", facts(), tmp_path).state(bus, wait_s=40)).refusals == ()
    with pytest.raises(NotAnswered, match=r"node n1 was not accepted within 0.5 s .* it does not answer"):
        await NodeStatement("n1", facts(), tmp_path).state(bus, wait_s=0.5)
    async with anyio.create_task_group() as tasks:
        answers: list[tuple[str, ...]] = []
        answered = anyio.Event()

        async def state() -> None:
            answers.append((await NodeStatement("n1", facts("2"), tmp_path).state(bus, wait_s=40)).refusals)
            answered.set()

        tasks.start_soon(state)
        async with home(bus, tmp_path):  # a later home: the node states its facts again
            await answered.wait()
    assert answers == [('node n1: physarum = "2": node n0 has 1; install one version on all nodes',)]
    assert [path.name for path in _common_files(tmp_path)] != []
    assert len(_common_files(tmp_path)) == 1


async def test_a_refusal_that_ends_the_run_reaches_the_nodes_that_wait(bus: Bus, tmp_path: Path) -> None:
    async with home(bus, tmp_path, ends=True):
        wrong = (await NodeStatement("n1", facts("2"), tmp_path).state(bus, wait_s=40)).refusals
        async with bus.kv.watch(HOME_KEY, HomeStart) as starts:
            with anyio.fail_after(200):
                start = await anext(entry.value async for entry in starts if entry.value and entry.value.refused)
    assert start.refused == wrong
    with pytest.raises(NotAnswered):  # it is of an earlier start
        await NodeStatement("n2", facts(), tmp_path).state(bus, wait_s=0.5)
    acceptance = Acceptance(topology(), "n0", facts(), tmp_path)
    await acceptance.open(bus)
    answers: list[tuple[str, ...]] = []

    async def state() -> None:
        answers.append((await NodeStatement("n2", facts(), tmp_path).state(bus, wait_s=40)).refusals)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(state)
        async with bus.kv.watch("facts.n2", Statement) as statements:
            with anyio.fail_after(200):
                stated = await anext(entry.value async for entry in statements if entry.value)
        await bus.kv.put(HOME_KEY, HomeStart(start=stated.home, file="", refused=wrong))
    assert answers == [wrong]


async def test_a_run_ends_only_after_the_refused_node_has_read_why(bus: Bus, tmp_path: Path) -> None:
    """Home and its bus had ended before the node looked for its answer."""
    async with home(bus, tmp_path, ends=True) as refused, bus.kv.watch("answer.n1", Answer) as answers:
        await bus.kv.put("facts.n1", Statement(start="s", home=await announced(bus), facts=facts("2")))
        with anyio.fail_after(200):
            await anext(entry async for entry in answers if entry.value and entry.value.start == "s")
        await anyio.sleep(0.3)
        assert refused == []
        await bus.kv.delete("facts.n1")
        await eventually(lambda: bool(refused))


async def test_a_refused_node_that_never_reads_its_answer_delays_no_other(bus: Bus, tmp_path: Path) -> None:
    """The others waited up to 10 s."""
    async with home(bus, tmp_path) as refused:
        await bus.kv.put("facts.n1", Statement(start="s", home=await announced(bus), facts=facts("2")))
        assert (await NodeStatement("n2", facts(), tmp_path).state(bus, wait_s=40)).refusals == ()
    assert len(refused) == 1


async def test_a_second_start_of_a_node_that_runs_is_refused_alone(bus: Bus, tmp_path: Path) -> None:
    """It ended the run, and removed the facts of the node that runs: the next node was compared without them."""
    async with home(bus, tmp_path, ends=True, version="") as refused:
        assert (await NodeStatement("n1", facts("1"), tmp_path).state(bus, wait_s=40)).refusals == ()
        claim = await NodeClaim.take(bus, "n1", tmp_path, incarnation=1)
        second = await NodeStatement("n1", facts("2"), tmp_path / "elsewhere").state(bus, wait_s=40)
        assert len(second.refusals) == 1
        start = await bus.kv.get(HOME_KEY, HomeStart)
        assert start is not None
        assert start.value is not None
        assert start.value.refused == ()
        await eventually(lambda: len(refused) == 1)
        await claim.release()
        other = await NodeStatement("n2", facts("2"), tmp_path).state(bus, wait_s=40)
        assert other.refusals == ('node n2: physarum = "2": node n1 has 1; install one version on all nodes',)


async def test_the_problems_of_home_end_the_nodes_that_wait_and_those_that_run(bus: Bus, tmp_path: Path) -> None:
    running, ended = NodeStatement("n1", facts(), tmp_path), list[Sequence[str]]()
    async with home(bus, tmp_path):
        await running.state(bus, wait_s=40)
    problems = (Problem.of("nodes.n0.gpus", 8, "this machine has 0 GPUs"),)
    acceptance = Acceptance(topology(), "n0", NodeFacts(problems=problems), tmp_path)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run, bus, ended.append)
        await acceptance.open(bus)
        tasks.start_soon(acceptance.refuse_all, bus)
        waiting = await NodeStatement("n2", facts(), tmp_path).state(bus, wait_s=40)
        await eventually(lambda: bool(ended))
        tasks.cancel_scope.cancel()
    assert waiting.refusals == ("node n0: nodes.n0.gpus = 8: this machine has 0 GPUs",)
    assert ended == [waiting.refusals]


async def test_a_node_that_runs_states_its_facts_to_each_later_home_and_learns_that_it_is_refused(
    bus: Bus, tmp_path: Path
) -> None:
    statement, refused = NodeStatement("n1", facts("1"), tmp_path), list[Sequence[str]]()
    async with home(bus, tmp_path):
        assert (await statement.state(bus, wait_s=40)).refusals == ()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(statement.run, bus, refused.append)
        async with home(bus, tmp_path), bus.kv.watch("answer.n1", Answer) as answers:
            with anyio.fail_after(200):
                ours = await announced(bus)
                _ = await anext(entry async for entry in answers if entry.value and entry.value.home == ours)
        assert refused == []
        async with home(bus, tmp_path, version="2"):
            await eventually(lambda: bool(refused))
        tasks.cancel_scope.cancel()
    assert refused == [('node n1: physarum = "1": node n0 has 2; install one version on all nodes',)]


async def announced(bus: Bus) -> str:
    entry = await bus.kv.get(HOME_KEY, HomeStart)
    assert entry is not None
    assert entry.value is not None
    return entry.value.start


def _common_files(run_dir: Path) -> list[Path]:
    return list(run_dir.glob(COMMON_FILE.format("*")))
