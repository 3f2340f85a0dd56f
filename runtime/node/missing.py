"""What a run cannot do without: trainer ranks, rollout and reward actors, and enough engines of each pool.

Home decides by it.

A node that is away may come back: home waits for it. An engine that was given up does not.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from runtime.settings.placement import home_node
from runtime.settings.processes import ProcessSpec, Tier
from runtime.settings.topology import Topology
from runtime.util.exit_codes import EXIT_INPUT_ERROR, EXIT_NO_SPACE, EXIT_NOT_STARTED

TRAINER: Final = "trainer"
WORKERS: Final = ("rollout", "reward")  # of which a run needs one each
NO_BUDGET_HELPS: Final = (EXIT_INPUT_ERROR, EXIT_NO_SPACE, EXIT_NOT_STARTED)  # such an end is one of the whole run


class Part(NamedTuple):
    """An engine, a trainer rank, a rollout or a reward actor: its processes, with their nodes."""

    name: str
    processes: Mapping[str, str]


class Need(NamedTuple):
    """Parts of which a run needs a number."""

    name: str
    parts: tuple[Part, ...]
    least: int
    key: str = ""  # setting with that number; empty: there is none

    def shortage(self, left: int) -> str:
        """Describe that too few parts are left."""
        if self.key:
            return f"{left} of {len(self.parts)} engines are left, fewer than {self.key} = {self.least}"
        return f"{', '.join(part.name for part in self.parts)} can run on no other node"


def needs_of_run(topology: Topology, specs: Mapping[str, Sequence[ProcessSpec]]) -> tuple[Need, ...]:
    """Return the needs of a run, from the processes of each node."""
    placed = [(spec, node) for node, of_node in specs.items() for spec in of_node]
    ranks = [(spec.name, spec.name, node) for spec, node in placed if spec.name.partition(".")[0] == TRAINER]
    found = [Need(rank.name, (rank,), 1) for rank in _parts(ranks)]
    for role in WORKERS:
        workers = [(spec.name, spec.name, node) for spec, node in placed if role in _actors(spec.name)]
        found += [Need(role, _parts(workers), 1)] if workers else []
    for pool, engine in topology.engines.items():
        prefix = f"engine.{pool}."
        names = [(spec.name, node) for spec, node in placed if spec.name.startswith(prefix)]
        parts = _parts([(prefix + name.removeprefix(prefix).partition(".")[0], name, node) for name, node in names])
        if parts:
            found.append(Need(f"engines.{pool}", parts, engine.min_engines, f"engines.{pool}.min_engines"))
    return tuple(found)


def _actors(process: str) -> list[str]:
    return process.partition(".")[0].split("+")


def _parts(placed: Iterable[tuple[str, str, str]]) -> tuple[Part, ...]:
    """Group processes with their nodes by part."""
    found: dict[str, dict[str, str]] = {}
    for part, process, node in placed:
        found.setdefault(part, {})[process] = node
    return tuple(Part(name, processes) for name, processes in found.items())


class Looked(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one look."""

    lines: tuple[str, ...] = ()  # to show
    failure: str | None = None  # why the run ends


class Missing:
    """Decides whether a run goes on, waits for nodes, or ends. Pure.

    Args:
        needs: of the run.
        waits: seconds to wait for each node.
    """

    def __init__(self, needs: Sequence[Need], waits: Mapping[str, float]) -> None:
        self._needs = needs
        self._waits = waits
        self._given_up: dict[str, str] = {}  # reasons by process
        self._since: dict[str, float] = {}  # when a need began to be short, by name

    def started(self, process: str) -> None:
        """Note that a process was started, perhaps by a new daemon of its node."""
        self._given_up.pop(process, None)

    def give_up(self, process: str, reason: str) -> str | None:
        """Note that an engine's process is not restarted; return why the run ends, if it does."""
        if not any(process in part.processes for need in self._needs if need.key for part in need.parts):
            return None
        self._given_up[process] = reason
        return next((self._spent(need) for need in self._needs if self._spent(need) is not None), None)

    def is_given_up(self, process: str) -> bool:
        """Whether an engine's process is not restarted."""
        return process in self._given_up

    def may_lose(self, spec: ProcessSpec, exit_code: int) -> bool:
        """Whether the run can go on without a process that was given up with this exit code."""
        return spec.tier is Tier.SERVICE and not spec.critical and exit_code not in NO_BUDGET_HELPS

    def look(self, now: float, present: Iterable[str]) -> Looked:
        """Decide.

        Args:
            now: on this machine's monotonic clock, in seconds.
            present: nodes that hold their claims.
        """
        here, lines = set(present), list[str]()
        for need in self._needs:
            left = [part for part in self._usable(need) if here.issuperset(part.processes.values())]
            if len(left) >= need.least:
                self._since.pop(need.name, None)
                continue
            if (spent := self._spent(need)) is not None:
                return Looked(lines=tuple(lines), failure=spent)
            away = sorted({node for part in self._usable(need) for node in part.processes.values()} - here)
            wait_s = max(self._waits[node] for node in away)
            key = ", ".join(f"nodes.{node}.wait_s" for node in away)
            nodes = f"node{'s' if len(away) > 1 else ''} {', '.join(away)}"
            if need.name not in self._since:
                self._since[need.name] = now
                lines.append(f"waiting for {nodes}, up to {wait_s:g} s ({key}): {need.shortage(len(left))}")
            elif now - self._since[need.name] >= wait_s:
                why = f"{nodes} did not come within {wait_s:g} s ({key}): {need.shortage(len(left))}"
                return Looked(lines=tuple(lines), failure=why)
        return Looked(lines=tuple(lines))

    def _usable(self, need: Need) -> list[Part]:
        return [part for part in need.parts if not self._given_up.keys() & part.processes.keys()]

    def _spent(self, need: Need) -> str | None:
        """Return why a need can never be met again, if so."""
        usable = self._usable(need)
        if len(usable) >= need.least:
            return None
        lost = [process for part in need.parts for process in part.processes if process in self._given_up]
        reasons = "; ".join(f"{process}: {self._given_up[process]}" for process in lost)
        return f"{need.name}: {need.shortage(len(usable))}: {reasons}"


def waits_of(topology: Topology) -> dict[str, float]:
    """Return the seconds for which home waits for each other node."""
    return {name: node.wait_s for name, node in topology.nodes.items() if name != home_node(topology)}
