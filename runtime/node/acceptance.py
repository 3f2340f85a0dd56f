"""How nodes state their facts to home, and how home accepts or refuses them, in the run's bucket.

Home writes a file into the run directory and its name to the key `home`. A node that joins reads the file, states its
facts, and starts nothing before home has answered.
"""

import os
import uuid
from collections.abc import Callable, Mapping
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
from runtime.settings.topology import Topology
from runtime.util.files import write_atomically

log = structlog.get_logger()

HOME_KEY: Final = "home"
COMMON_FILE: Final = "home-{}.txt"  # in the run directory; a new name at each start, which no network disk has cached
LOOK_EVERY_S: Final = 0.1
TRY_AGAIN_S: Final = 1.0


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


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Home's answer to a statement."""

    start: str
    home: str
    refusals: tuple[str, ...] = ()  # none: the node is accepted


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

    def close(self) -> None:
        """Delete the file."""
        (self._run_dir / COMMON_FILE.format(self._start)).unlink(missing_ok=True)

    def decide(self, node: str, statement: Statement) -> list[Refusal]:
        """Compare a node with home and with the nodes accepted before; accept it if nothing speaks against it."""
        if node not in self._topology.nodes:
            return []
        before = {name: facts for name, facts in self._facts.items() if name != node}
        refusals = [each for each in compare(self._topology, before | {node: statement.facts}) if each.node == node]
        if not refusals:
            self._facts = before | {node: statement.facts}
        return refusals

    async def run(self, bus: Bus, refused: Callable[[Statement, list[Refusal]], bool]) -> None:
        """Answer every statement, until cancelled.

        Args:
            bus: of the run.
            refused: called with each statement that was refused, after its answer; returns whether that ends the run.
        """
        while True:
            try:
                async with bus.kv.watch(_facts_key("*"), Statement) as statements:
                    async for entry in statements:
                        node, statement = entry.key.removeprefix(_facts_key("")), entry.value
                        if statement is not None and statement.home == self._start and node != self._node:
                            await self._answer(bus, node, statement, refused)
            except BusError as error:
                log.warning("nodes_not_accepted", error=str(error))
                await anyio.sleep(TRY_AGAIN_S)

    async def _answer(
        self, bus: Bus, node: str, statement: Statement, refused: Callable[[Statement, list[Refusal]], bool]
    ) -> None:
        refusals = self.decide(node, statement)
        log.info("node_compared", node=node, facts=_shown(statement.facts), refusals=list(map(str, refusals)))
        await answer(bus, {node: statement}, refusals)
        if refusals and refused(statement, refusals):
            lines = tuple(map(str, refusals))
            await bus.kv.put(HOME_KEY, HomeStart(start=self._start, file="", refused=lines))


async def answer(bus: Bus, statements: Mapping[str, Statement], refusals: list[Refusal]) -> None:
    """Give every node the same answer."""
    lines = tuple(map(str, refusals))
    for node, statement in statements.items():
        own = Answer(start=statement.start, home=statement.home, refusals=lines)
        await bus.kv.put(_answer_key(node), own)


async def state_facts(
    bus: Bus, node: str, facts: NodeFacts, run_dir: Path, *, wait_s: float, only_checks: bool = False
) -> tuple[str, ...]:
    """State the facts of a node, and return home's reasons to refuse it; none: it is accepted.

    Args:
        bus: of the run.
        node: name of the node.
        facts: of the node, without what depends on the bus.
        run_dir: of the run, on this machine.
        wait_s: seconds to wait for home.
        only_checks: the node does not take part, whatever the answer.

    Raises:
        NotAnswered: home did not answer within wait_s.
    """
    start, stated_to, problem = uuid.uuid4().hex, "", "it is not there yet"
    with anyio.move_on_after(wait_s):
        while True:
            try:
                entry = await bus.kv.get(HOME_KEY, HomeStart)
                home = None if entry is None else entry.value
                if home is not None and home.refused and stated_to:
                    return home.refused
                if home is not None and home.start != stated_to and not home.refused:
                    seen = await anyio.to_thread.run_sync(common_file_hash, run_dir / home.file)
                    ahead_s = await bus.kv.clock_ahead_s(f"clock.{node}")
                    own = msgspec.structs.replace(facts, common_file=seen, clock_ahead_s=round(ahead_s, 3))
                    stated = Statement(start=start, home=home.start, only_checks=only_checks, facts=own)
                    await bus.kv.put(_facts_key(node), stated)
                    stated_to, problem = home.start, "it does not answer"
                answered = await bus.kv.get(_answer_key(node), Answer)
            except BusError as error:
                problem = str(error)
            else:
                if answered is not None and answered.value is not None and answered.value.start == start:
                    return answered.value.refusals
            await anyio.sleep(LOOK_EVERY_S)
    raise NotAnswered(f"node {node} was not accepted within {wait_s:g} s by the node with the bus: {problem}")


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
