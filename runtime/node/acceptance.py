"""How nodes state their facts to home, and how home accepts or refuses them, in the run's bucket.

Home writes a file into the run directory and its name to the key `home`. A node that joins reads the file, states its
facts, and starts nothing before home has answered.
"""

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec
import structlog

from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.node.checks.comparison import Refusal, compare
from runtime.node.checks.facts import NodeFacts, common_file_hash
from runtime.node.claims.node_claim import claims
from runtime.settings.reading.config import Problem
from runtime.settings.topology import Topology
from runtime.util.files import write_atomically
from runtime.util.formatting import count_of

log = structlog.get_logger()

HOME_KEY: Final = "home"
COMMON_FILE: Final = "home-{}.txt"  # in the run directory; a new name at each start, which no network disk has cached
LOOK_EVERY_S: Final = 0.1
TRY_AGAIN_S: Final = 1.0
ANSWER_WITHIN_S: Final = 60.0  # to a node that runs, before it states its facts again
READ_WITHIN_S: Final = 10.0  # by other nodes, an answer after which the bus ends


class HomeStart(msgspec.Struct, frozen=True, kw_only=True):
    """The start of home that nodes state their facts to."""

    start: str  # unique
    file: str  # in the run directory
    refused: tuple[str, ...] = ()  # why the run has ended before it began; then no statement is answered


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a node."""

    start: str  # of the node's command, unique
    home: str  # start of home that they are for
    only_checks: bool = False  # the node does not take part, whatever the answer
    facts: NodeFacts = NodeFacts()
    given_up: dict[str, str] = {}  # reasons by process, of those that the node does not start again


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Home's answer to a statement."""

    start: str
    home: str
    refusals: tuple[str, ...] = ()  # none: the node is accepted
    missing: tuple[str, ...] = ()  # in a check: one line for each node that did not come
    seen: tuple[str, ...] = ()  # in a check: one line for each node that came


class NotAnswered(Exception):
    """Home did not answer in time."""


class Acceptance:
    """Home's side: accepts nodes and refuses them.

    Args:
        topology: the topology.
        node: home.
        facts: of home.
        run_dir: of the run.
    """

    def __init__(self, topology: Topology, node: str, facts: NodeFacts, run_dir: Path) -> None:
        self._topology = topology
        self._node = node
        self._run_dir = run_dir
        self._start = uuid.uuid4().hex
        self._facts = {node: facts}  # by node: home, then the accepted ones in order

    async def open(self, bus: Bus) -> None:
        """Write the file that other nodes look for, and announce it.

        Raises:
            BusError: the bucket cannot be written.
            OSError: the run directory cannot be written.
        """
        name = COMMON_FILE.format(self._start)
        hashed = await anyio.to_thread.run_sync(_write_common_file, self._run_dir, name)
        self._facts[self._node] = msgspec.structs.replace(self._facts[self._node], common_file=hashed)
        own = Statement(start=self._start, home=self._start, facts=self._facts[self._node])
        await bus.kv.put(_facts_key(self._node), own)
        await bus.kv.put(HOME_KEY, HomeStart(start=self._start, file=name))

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Problems of home, which refuse every node."""
        return self._facts[self._node].problems

    def close(self) -> None:
        """Delete the file."""
        (self._run_dir / COMMON_FILE.format(self._start)).unlink(missing_ok=True)

    def decide(self, node: str, statement: Statement, *, runs: bool = False) -> list[Refusal]:
        """Compare a node with home and with the nodes accepted before; accept it if nothing speaks against it.

        Args:
            node: its name.
            statement: of the node.
            runs: another daemon runs the node, and stays accepted if this one is refused.
        """
        if self.problems:
            return [Refusal(self._node, problem) for problem in self.problems]
        if node not in self._topology.nodes:
            message = f"the topology of node {self._node} has no such node; it has: {', '.join(self._topology.nodes)}"
            return [Refusal(node, Problem.of(f"nodes.{node}", node, message))]
        before = {name: facts for name, facts in self._facts.items() if name != node}
        refusals = [each for each in compare(self._topology, before | {node: statement.facts}) if each.node == node]
        if not statement.only_checks and not (refusals and runs):
            self._facts = before if refusals else before | {node: statement.facts}
        return refusals

    async def run(
        self,
        bus: Bus,
        ends: Callable[[Statement], bool],
        refused: Callable[[list[Refusal], bool], None],
        lost: Callable[[str, str], None] = lambda process, reason: None,
    ) -> None:
        """Answer every statement, until cancelled.

        Args:
            bus: of the run.
            ends: returns whether the refusal of a statement ends the run.
            refused: called after a refusal, with whether it ends the run. If so, the nodes have read their answers.
            lost: called for each process that an accepted node does not start again, with the reason: the event may
                be of an earlier start of home.
        """
        while True:
            try:
                async with bus.kv.watch(_facts_key("*"), Statement) as statements:
                    async for entry in statements:
                        node, statement = entry.key.removeprefix(_facts_key("")), entry.value
                        if statement is None or statement.home != self._start or node == self._node:
                            continue
                        runs = node in self._facts and node in await claims(bus)
                        if refusals := await self._answer(bus, node, statement, runs=runs):
                            is_end = not runs and ends(statement)
                            if is_end:
                                await self._wait_until_read(bus, refusals)
                            refused(refusals, is_end)
                            continue
                        for process, reason in statement.given_up.items():
                            lost(process, reason)
            except BusError as error:
                log.warning("nodes_not_accepted", error=str(error))
                await anyio.sleep(TRY_AGAIN_S)

    async def refuse_all(self, bus: Bus) -> None:
        """Report the problems of home to every other node that comes soon, before the bus ends."""
        waits, refused = set(self._topology.nodes) - {self._node}, set[str]()
        with anyio.move_on_after(READ_WITHIN_S):
            async with bus.kv.watch(_facts_key("*"), Statement) as statements:
                async for entry in statements:
                    node, statement = entry.key.removeprefix(_facts_key("")), entry.value
                    if statement is not None and statement.home == self._start and node != self._node:
                        await self._answer(bus, node, statement, runs=False)
                        refused.add(node)
                    elif statement is None and node in refused:  # it has read its answer
                        waits.discard(node)
                    if not waits:
                        return

    async def collect(self, bus: Bus, show: Callable[[str], None]) -> Answer:
        """Wait for the facts of all other nodes, compare them, and give every node the same answer.

        Args:
            bus: of the check.
            show: prints a line for the user.
        """
        statements: dict[str, Statement] = {}
        nodes = {name: node.wait_s for name, node in self._topology.nodes.items() if name != self._node}
        began = anyio.current_time()
        async with bus.kv.watch(_facts_key("*"), Statement) as changes:
            while absent := nodes.keys() - statements.keys():
                left_s = began + max(nodes[name] for name in absent) - anyio.current_time()
                entry = await changes.next(left_s) if left_s > 0 else None
                if entry is None:
                    break
                node, statement = entry.key.removeprefix(_facts_key("")), entry.value
                if statement is not None and statement.home == self._start and node in nodes:
                    show(f"node {node} has stated its facts")
                    statements[node] = statement
        facts = self._facts | {node: statements[node].facts for node in nodes if node in statements}
        answer = Answer(
            start="",
            home=self._start,
            refusals=tuple(map(str, compare(self._topology, facts))),
            missing=tuple(_missing(node, wait_s) for node, wait_s in nodes.items() if node not in statements),
            seen=tuple(_line(node, each, facts[self._node].gives) for node, each in facts.items()),
        )
        for node, statement in statements.items():
            await bus.kv.put(_answer_key(node), msgspec.structs.replace(answer, start=statement.start))
        with anyio.move_on_after(READ_WITHIN_S):
            while len(await bus.kv.entries(_facts_key("*"), Statement)) > 1:  # noqa: ASYNC110 - other machines delete them
                await anyio.sleep(LOOK_EVERY_S)
        return answer

    async def _answer(self, bus: Bus, node: str, statement: Statement, *, runs: bool) -> list[Refusal]:
        refusals = self.decide(node, statement, runs=runs)
        log.info("node_compared", node=node, facts=_shown(statement.facts), refusals=list(map(str, refusals)))
        lines = tuple(map(str, refusals))
        await bus.kv.put(_answer_key(node), Answer(start=statement.start, home=self._start, refusals=lines))
        return refusals

    async def _wait_until_read(self, bus: Bus, refusals: list[Refusal]) -> None:
        """Wait, before the run ends, until all nodes that wait for an answer have read why it ends."""
        lines = tuple(map(str, refusals))
        await bus.kv.put(HOME_KEY, HomeStart(start=self._start, file="", refused=lines))
        with anyio.move_on_after(READ_WITHIN_S):
            while True:
                stated = await bus.kv.entries(_facts_key("*"), Statement)
                of_this_start = (entry for entry in stated if entry.value and entry.value.home == self._start)
                if not {entry.key.removeprefix(_facts_key("")) for entry in of_this_start} - self._facts.keys():
                    return
                await anyio.sleep(LOOK_EVERY_S)


class NodeStatement:
    """The side of another node: states its facts, and again to each later start of home.

    Args:
        node: name of the node.
        facts: of the node, without what depends on the bus.
        run_dir: of the run, on this machine.
    """

    def __init__(self, node: str, facts: NodeFacts, run_dir: Path) -> None:
        self._node = node
        self._facts = facts
        self._run_dir = run_dir
        self._home = ""  # start of home that has answered
        self._given_up: dict[str, str] = {}

    def give_up(self, process: str, reason: str) -> None:
        """Note that this node does not start a process again, for later starts of home."""
        self._given_up[process] = reason

    async def state(
        self, bus: Bus, *, wait_s: float, only_checks: bool = False, is_over: Callable[[], bool] = lambda: False
    ) -> Answer:
        """State the facts, and return home's answer.

        Args:
            bus: of the run.
            wait_s: seconds to wait for home.
            only_checks: the node does not take part, whatever the answer.
            is_over: returns whether the run has finished; called while the bus does not answer.

        Raises:
            NotAnswered: home did not answer within wait_s, or the run is over.
        """
        start, stated_to, problem = uuid.uuid4().hex, "", "it is not there yet"
        with anyio.move_on_after(wait_s):
            while True:
                try:
                    entry = await bus.kv.get(HOME_KEY, HomeStart)
                    home = None if entry is None else entry.value
                    if home is not None and home.refused and stated_to:
                        await bus.kv.delete(_facts_key(self._node))
                        return Answer(start=start, home=home.start, refusals=home.refused)
                    if home is not None and home.start != stated_to and not home.refused:
                        await self._put(bus, home, start, only_checks=only_checks)
                        stated_to, problem = home.start, "it does not answer"
                    answered = await bus.kv.get(_answer_key(self._node), Answer)
                except BusError as error:
                    problem = str(error)
                    if await anyio.to_thread.run_sync(is_over):
                        break
                else:
                    answer = None if answered is None else answered.value
                    if answer is not None and (answer.start, answer.home) == (start, stated_to):
                        if only_checks or answer.refusals:
                            await bus.kv.delete(_facts_key(self._node))  # home waits until it is read
                        self._home = answer.home
                        return answer
                await anyio.sleep(LOOK_EVERY_S)
        raise NotAnswered(f"node {self._node} was not accepted within {wait_s:g} s by the node with the bus: {problem}")

    async def run(self, bus: Bus, refused: Callable[[Sequence[str]], None]) -> None:
        """State the facts again whenever home has started again, until cancelled: home may have changed.

        Args:
            bus: of the run.
            refused: called with home's reasons if it refuses the node.
        """
        while True:
            try:
                async with bus.kv.watch(HOME_KEY, HomeStart) as starts:
                    async for entry in starts:
                        if entry.value is not None and entry.value.start != self._home and not entry.value.refused:
                            answer = await self.state(bus, wait_s=ANSWER_WITHIN_S)
                            if answer.refusals:
                                refused(answer.refusals)
            except (BusError, NotAnswered) as error:
                log.warning("facts_not_stated", error=str(error))
                await anyio.sleep(TRY_AGAIN_S)

    async def _put(self, bus: Bus, home: HomeStart, start: str, *, only_checks: bool) -> None:
        seen = await anyio.to_thread.run_sync(common_file_hash, self._run_dir / home.file)
        ahead_s = await bus.kv.clock_ahead_s(f"clock.{self._node}")
        own = msgspec.structs.replace(self._facts, common_file=seen, clock_ahead_s=round(ahead_s, 3))
        stated = Statement(
            start=start, home=home.start, only_checks=only_checks, facts=own, given_up=dict(self._given_up)
        )
        await bus.kv.put(_facts_key(self._node), stated)


def _missing(node: str, wait_s: float) -> str:
    return f"node {node} did not come within {wait_s:g} s (nodes.{node}.wait_s)"


def _line(node: str, facts: NodeFacts, gives: Mapping[str, str]) -> str:
    """Format the facts of a node for people."""
    named = ", ".join(f"{key} ({gives[key]})" for key in facts.lacks if key in gives)
    fetches = f"fetches {named}" if named else ""
    versions = (f"{name} {version}" for name, version in facts.versions.items())
    clock = "" if facts.clock_ahead_s is None else f"clock {facts.clock_ahead_s:+.1f} s"
    parts = [f"host {facts.host}", facts.address, count_of(facts.gpus, "GPU"), *versions, clock, fetches]
    return f"node {node}: {'; '.join(filter(None, parts))}"


def _shown(facts: NodeFacts) -> dict[str, object]:
    """Return the facts for the log, without the settings."""
    return {key: value for key, value in msgspec.to_builtins(facts).items() if key != "settings"}


def _write_common_file(run_dir: Path, name: str) -> str:
    for old in run_dir.glob(COMMON_FILE.format("*")):  # of earlier starts
        old.unlink(missing_ok=True)
    write_atomically(run_dir / name, os.urandom(32).hex().encode() + b"\n")
    return common_file_hash(run_dir / name)


def _facts_key(node: str) -> str:
    return f"facts.{node}"


def _answer_key(node: str) -> str:
    return f"answer.{node}"
