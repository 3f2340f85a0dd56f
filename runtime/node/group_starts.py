"""Restart groups over several nodes: their daemons agree on each start, by one key per node in the run's bucket.

Starts of a group are numbered. A key holds the start that its node wants or has made, and only that node's daemon
writes it. A node whose process ended wants the next start. A node that sees a later start than its own kills its
processes and wants that start. Processes start when all nodes are ready for one start: each has ended its processes of
earlier starts. So no process meets one of another start, and one death costs one restart, however many nodes see it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import anyio
import msgspec
import structlog

from runtime.bus.background import in_background
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.node.display import Show
from runtime.settings.processes import ProcessSpec, RestartGroupSpec
from runtime.util.retrying import FOR_EVER, retried

log = structlog.get_logger()

SHOW_AFTER_S: Final = 10.0  # of a start that waits for another node


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part in the starts of a restart group: the value of its key."""

    start: int = 0  # that the node wants, or has made; 0: none yet
    is_ready: bool = False  # its processes of earlier starts have ended, and those of this one may start
    address: str = ""  # for the rendezvous of this start
    ended_first: str = ""  # process whose end led to this start, if it is of this node


class Starts:
    """The starts of one restart group, as one node sees them. Pure.

    Args:
        nodes: of the group's processes. The rendezvous is on the first one.
        own: this node.
    """

    def __init__(self, nodes: tuple[str, ...], own: str) -> None:
        self._standings = {node: Standing() for node in nodes}
        self._nodes = nodes
        self._own = own
        self._is_known = False  # the keys that there were when this daemon started
        self._runs = False

    @property
    def own(self) -> Standing | None:
        """This node's standing; None before it is known."""
        return self._standings[self._own] if self._is_known else None

    def hear(self, node: str, standing: Standing) -> str | None:
        """Note the key of a node. Return the process that ended first, if processes of this node must end for it."""
        if node not in self._standings or (node == self._own and self._is_known):
            return None
        self._standings[node] = standing
        if not self._is_known or standing.start <= self._standings[self._own].start:
            return None
        self._want(Standing(start=standing.start))
        if not self._runs:
            return None
        self._runs = False
        return standing.ended_first or f"a process on node {node}"

    def heard_all(self) -> None:
        """Note that every key has been heard. An earlier daemon's processes ended with it, so a new start is needed."""
        if not self._is_known:
            self._is_known = True
            self._want(Standing(start=self._latest() + 1))

    def end(self, process: str) -> None:
        """Note that a process of this node ended: all nodes need another start."""
        if self._runs:
            self._runs = False
            self._want(Standing(start=max(self._standings[self._own].start + 1, self._latest()), ended_first=process))

    def be_ready(self, address: str) -> None:
        """Note that the processes of this node may start, and an address on this node for their rendezvous."""
        own = self._standings[self._own]
        self._want(Standing(start=own.start, is_ready=True, address=address, ended_first=own.ended_first))

    def begin(self) -> str | None:
        """Return the address of the rendezvous, if all nodes are ready for one start; the processes then run."""
        standings = self._standings.values()
        if not self._is_known or len({each.start for each in standings}) > 1 or not all(s.is_ready for s in standings):
            return None
        self._runs = True
        return self._standings[self._nodes[0]].address

    def missing(self) -> list[str]:
        """Return the nodes that are not ready for this node's start."""
        own = self._standings[self._own].start
        return [node for node, each in self._standings.items() if each.start != own or not each.is_ready]

    def _latest(self) -> int:
        return max(each.start for each in self._standings.values())

    def _want(self, standing: Standing) -> None:
        self._standings[self._own] = standing


class GroupStarts:
    """Agrees with the other nodes of one restart group on its starts. An `Agreement`."""

    def __init__(self, bus: Bus, spec: RestartGroupSpec, node: str, show: Show) -> None:
        self._bus = bus
        self._show = show
        self._name = spec.name
        self._node = node
        self._starts = Starts(spec.nodes, node)
        self._address = ""  # while the processes of this node wait for their start
        self._changed = anyio.Event()
        self._kill: Callable[[str], None] = lambda first: None

    def watch(self, kill: Callable[[str], None]) -> None:
        """Set what kills the processes of this node. Its argument is the name of the process that ended first."""
        self._kill = kill

    def ended(self, process: str) -> None:
        """Have the processes of the other nodes killed, because one of this node ended."""
        self._starts.end(process)
        self._change()

    async def agree(self, address: str) -> str:
        """Wait until the processes of all nodes may start, and return the address of their rendezvous."""
        self._address = address
        try:
            self._change()
            async with in_background(self._show_what_is_missing):
                while (found := self._starts.begin()) is None:
                    changed = self._changed
                    await changed.wait()
        finally:
            self._address = ""
        log.info("group_started", group=self._name, start=self._starts.own and self._starts.own.start)
        return found

    async def run(self) -> None:
        """Read the keys of all nodes, and write this node's, until cancelled."""
        async with in_background(self._write):
            await retried(self._listen, on=BusError, times=FOR_EVER, failed=self._log_failure)

    async def _show_what_is_missing(self) -> None:
        await anyio.sleep(SHOW_AFTER_S)
        nodes = ", ".join(self._starts.missing())
        self._show(f"{self._name} waits for node {nodes}: its processes on all nodes start together")

    def _change(self) -> None:
        """Wake what waits for a change. A node that waits for its start is ready for any later one, too."""
        own = self._starts.own
        if own is not None and self._address and not own.is_ready:
            self._starts.be_ready(self._address)
        self._changed.set()
        self._changed = anyio.Event()

    async def _listen(self) -> None:
        async with self._bus.kv.watch(_key(self._name, "*"), Standing) as watch:
            while True:
                if watch.num_pending == 0:
                    self._starts.heard_all()
                    self._change()
                entry = await watch.next()
                if entry is None or entry.value is None:
                    continue
                first = self._starts.hear(entry.key.removeprefix(_key(self._name, "")), entry.value)
                if first is not None:
                    self._kill(first)
                self._change()

    async def _write(self) -> None:
        written: Standing | None = None
        while True:
            changed, own = self._changed, self._starts.own
            if own is None or own == written:
                await changed.wait()
                continue
            put = partial(self._bus.kv.put, _key(self._name, self._node), own)
            await retried(put, on=BusError, times=FOR_EVER, failed=self._log_failure)
            written = own

    def _log_failure(self, error: Exception, failures: int) -> None:
        log.warning("group_not_reached", group=self._name, error=str(error), in_a_row=failures)


def group_starts(bus: Bus, node: str, processes: Sequence[ProcessSpec], show: Show) -> dict[str, GroupStarts]:
    """Return the agreements of a node by restart group, of those that have processes on several nodes."""
    groups = {spec.restart_group.name: spec.restart_group for spec in processes if spec.restart_group is not None}
    return {name: GroupStarts(bus, group, node, show) for name, group in groups.items() if group.nodes}


def _key(group: str, node: str) -> str:
    return f"restart_group.{group}.{node}"
