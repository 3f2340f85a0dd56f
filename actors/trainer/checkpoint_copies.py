"""Has each file of a checkpoint lie on several machines before the checkpoint counts (`train.checkpoint_copies`).

The ranks of each node save into a directory of that node. The first rank then calls the node daemons: to sum up what
the ranks of their nodes wrote, to fetch parts of other nodes, and to give the checkpoint its name. A start calls them
for what they have, and has each node of the trainer fetch what it lacks of the newest checkpoint.
"""

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, NamedTuple

import anyio
import structlog

from messages import (
    CheckpointCopiesGiven,
    CheckpointCopiesRequested,
    CheckpointFile,
    CheckpointRecord,
    HeldCheckpoint,
)
from runtime.bus.bus import Bus
from runtime.bus.errors import CallError
from runtime.settings.placement import home_node, trainer_nodes
from runtime.settings.sizes import show_bytes
from runtime.settings.topology import Topology

log = structlog.get_logger()

ANSWER_S: Final = 60.0  # of a daemon, besides the time for the bytes
MIN_BYTES_PER_S: Final = 10e6
TRIES_S: Final = 600.0  # until a daemon has done what is requested; then the trainer ends
LIST_S: Final = 10.0  # for the list of a node without ranks, which may be away
AGAIN_S: Final = 1.0


class NotCopied(RuntimeError):
    """A node did not do its part in copying a checkpoint. The message has the node's reason."""


class Placement(NamedTuple):
    """Which nodes keep which parts of a checkpoint."""

    trainers: tuple[str, ...]
    places: tuple[str, ...]  # nodes that keep parts, those of the trainer first
    copies: int

    @classmethod
    def of(cls, topology: Topology) -> "Placement":
        """Read it from the topology. Other nodes keep copies only if the trainer's are too few."""
        trainers, copies = trainer_nodes(topology), topology.train.checkpoint_copies
        others = [node for node in (home_node(topology), *topology.nodes) if node not in trainers]
        places = trainers if len(trainers) >= copies else (*trainers, *dict.fromkeys(others))
        return cls(trainers, places[: max(copies, len(trainers))], copies)

    def holders(self, node: str) -> tuple[str, ...]:
        """Return the nodes that keep what the ranks of a node wrote, that node first."""
        begin = self.places.index(node)
        return tuple(self.places[(begin + index) % len(self.places)] for index in range(self.copies))

    def parts_on(self, holder: str) -> tuple[str, ...]:
        """Return the nodes whose parts a node keeps."""
        return tuple(node for node in self.trainers if holder in self.holders(node))


class CheckpointCopies:
    """Leads the node daemons in copying checkpoints.

    Args:
        topology: of the run.
        bus: of the trainer's first rank.
    """

    def __init__(self, topology: Topology, bus: Bus) -> None:
        self._bus = bus
        self._placement = Placement.of(topology)
        self._nodes = tuple(topology.nodes)

    async def spread(self, name: str, files: Mapping[str, CheckpointFile]) -> None:
        """Return once each file lies on enough nodes with its sum, and the checkpoint has its name on all of them.

        Args:
            name: of the checkpoint's directory in that of all checkpoints.
            files: of all ranks.

        Raises:
            NotCopied: a node did not do its part for TRIES_S.
        """
        placement, record = self._placement, CheckpointRecord(name=name, files=dict(files))
        size_bytes = sum(each.size_bytes for each in files.values())
        parts: dict[str, str] = {}

        async def sum_up(node: str) -> None:
            request = CheckpointCopiesRequested(act="sum_up", record=record)
            parts[node] = (await self._done(node, request, size_bytes)).digest

        async def hold(node: str) -> None:
            others = tuple(each for each in placement.parts_on(node) if each != node)
            request = CheckpointCopiesRequested(act="hold", record=whole, nodes=others)
            await self._done(node, request, size_bytes)

        async def give_name(node: str) -> None:
            await self._done(node, CheckpointCopiesRequested(act="name", record=whole), size_bytes)

        await _each(placement.trainers, sum_up)
        whole = CheckpointRecord(name=name, files=dict(files), parts=parts)
        await _each(placement.places, hold)
        await _each(placement.places, give_name)
        log.info("checkpoint_copied", name=name, size_bytes=size_bytes, nodes=placement.places)

    async def forget(self, keeps: tuple[str, ...] | None) -> None:
        """Have all nodes delete checkpoints but those of these names, and what a crash left; None: the latter alone."""

        async def forget(node: str) -> None:
            try:
                await self._call(node, CheckpointCopiesRequested(act="forget", keeps=keeps), ANSWER_S)
            except (CallError, NotCopied) as error:  # the next call deletes them
                log.warning("checkpoints_not_forgotten", node=node, error=str(error))

        await _each(self._placement.places, forget)

    async def bring(self) -> None:
        """Have all nodes of the trainer hold all of the newest checkpoint that is complete between all nodes.

        Raises:
            NotCopied: a node of the trainer did not answer, or could not fetch it.
        """
        found: dict[str, tuple[HeldCheckpoint, ...]] = {}

        async def listed(node: str) -> None:
            request = CheckpointCopiesRequested(act="list")
            if node in self._placement.trainers:
                found[node] = (await self._done(node, request)).held
                return
            try:
                found[node] = (await self._call(node, request, LIST_S)).held
            except (CallError, NotCopied) as error:
                log.warning("checkpoints_not_listed", node=node, error=str(error))

        await _each(self._nodes, listed)
        record = newest_complete(each for held in found.values() for each in held)
        if record is None:
            return
        size_bytes = sum(each.size_bytes for each in record.files.values())
        log.info("checkpoint_brought", name=record.name, held={node: _names(held) for node, held in found.items()})

        async def hold(node: str) -> None:
            nodes = tuple(record.parts)
            request = CheckpointCopiesRequested(act="hold", record=record, nodes=nodes, thorough=True)
            await self._done(node, request, size_bytes)
            await self._done(node, CheckpointCopiesRequested(act="name", record=record), size_bytes)

        await _each(self._placement.trainers, hold)

    async def _done(self, node: str, request: CheckpointCopiesRequested, size_bytes: int = 0) -> CheckpointCopiesGiven:
        """Call a node until it has done what is requested."""
        began, limit_s = anyio.current_time(), ANSWER_S + size_bytes / MIN_BYTES_PER_S
        while True:
            try:
                return await self._call(node, request, limit_s)
            except (CallError, NotCopied) as error:
                if anyio.current_time() - began > TRIES_S:
                    about = f"{request.act} {request.record.name}".rstrip()
                    raise NotCopied(f"copies of checkpoints ({about}), node {node}: {error}") from error
                log.warning("checkpoint_not_copied", node=node, act=request.act, error=str(error))
            await anyio.sleep(AGAIN_S)

    async def _call(self, node: str, request: CheckpointCopiesRequested, limit_s: float) -> CheckpointCopiesGiven:
        given = await self._bus.call(f"daemon-{node}", request, CheckpointCopiesGiven, timeout_s=limit_s)
        if given.reason:
            raise NotCopied(given.reason)
        return given


def described(topology: Topology, size_bytes: int) -> str:
    """Say in one line how much disk the copies of checkpoints take on each node.

    Args:
        topology: of the run.
        size_bytes: of a checkpoint.
    """
    placement, kept = Placement.of(topology), topology.train.keep_checkpoints + 1  # and the one that is being written
    each = size_bytes * kept // len(placement.trainers)
    shares = (f"{node} {show_bytes(each * len(placement.parts_on(node)))}" for node in placement.places)
    return (
        f"disk: {kept} checkpoints of about {show_bytes(size_bytes)}, each file on {placement.copies} nodes: "
        f"{', '.join(shares)}; after a start each node of the trainer may have one of them whole"
    )


def copies_of(topology: Topology, bus: Bus) -> CheckpointCopies | None:
    """Return what leads the copying; None if all ranks share one directory."""
    return CheckpointCopies(topology, bus) if topology.train.checkpoint_copies > 1 else None


def newest_complete(held: Iterable[HeldCheckpoint]) -> CheckpointRecord | None:
    """Return the newest checkpoint of which each part lies on some node; None: there is none."""
    records: dict[str, CheckpointRecord] = {}
    there: dict[str, set[str]] = {}
    for each in held:
        records[each.record.name] = each.record
        there.setdefault(each.record.name, set()).update(each.nodes)
    complete = [record for name, record in records.items() if there[name] >= record.parts.keys()]
    return max(complete, key=lambda record: _order(record.name), default=None)


def _order(name: str) -> tuple[int, int]:
    incarnation, _, step = name.partition("/step-")
    return int(step), int(incarnation)


def _names(held: Iterable[HeldCheckpoint]) -> list[str]:
    return [each.record.name for each in held]


async def _each(nodes: Iterable[str], work: Callable[[str], Coroutine[Any, Any, None]]) -> None:
    failed: list[NotCopied] = []

    async def noted(node: str) -> None:
        try:
            await work(node)
        except NotCopied as error:
            failed.append(error)

    async with anyio.create_task_group() as tasks:
        for node in nodes:
            tasks.start_soon(noted, node)
    if failed:
        raise failed[0]
