"""The claim on a node of a run: one agent runs it, wherever its run directory is. Kept in the run's bucket."""

import os
import socket
import time
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog

from runtime.bus.bus import Bus
from runtime.bus.errors import BusError, SequenceMismatch

log = structlog.get_logger()

LIFETIME_S: Final = 20  # of a claim that is not renewed: whole seconds, as the bucket counts them
RENEW_EVERY_S: Final = 5.0
PATIENCE: Final = 2  # lifetimes in which a dead agent's claim must have expired
LOOK_EVERY_S: Final = 0.25  # whether another agent renews its claim


class NodeHolder(msgspec.Struct, frozen=True, kw_only=True):
    """Who runs a node."""

    host: str
    pid: int
    run_dir: str
    incarnation: int  # higher for each later agent of the node
    since: float  # Unix time in seconds


class NodeClaimed(Exception):
    """Another agent runs the node."""

    def __init__(self, run: str, node: str, holder: NodeHolder) -> None:
        super().__init__(f"node {node} of run {run} is run by another agent: {place_of(holder)}; stop that first")
        self.holder = holder


class NodeClaim:
    """A held claim."""

    def __init__(self, bus: Bus, node: str, holder: NodeHolder, revision: int) -> None:
        self.holder = holder
        self._bus = bus
        self._node = node
        self._revision = revision

    @classmethod
    async def take(cls, bus: Bus, node: str, run_dir: Path, *, incarnation: int) -> "NodeClaim":
        """Claim a node. That of an agent which died elsewhere is taken over once it has expired.

        Args:
            run_dir: is claimed already, so that a claim from this very directory is that of a dead agent.
            incarnation: counted in the run directory; raised above that of every earlier agent.

        Raises:
            NodeClaimed: another agent renews its claim.
            BusError: the bucket cannot be read or written.
        """
        place = str(await anyio.Path(run_dir).resolve())
        last = await bus.kv.get(_count_key(node), int)
        incarnation = max(incarnation, ((last.value or 0) if last is not None else 0) + 1)
        holder = NodeHolder(
            host=socket.gethostname(), pid=os.getpid(), run_dir=place, incarnation=incarnation, since=time.time()
        )
        revision = await _enter(bus, node, holder)
        await bus.kv.put(_count_key(node), incarnation)
        log.info("node_claimed", node=node, incarnation=incarnation)
        return cls(bus, node, holder, revision)

    async def keep(self) -> None:
        """Renew it until cancelled.

        Raises:
            NodeClaimed: it expired while the bus was out of reach, and another agent took it.
        """
        while True:
            await anyio.sleep(RENEW_EVERY_S)
            try:
                self._revision = await self._renewed()
            except BusError as error:
                log.warning("claim_not_renewed", node=self._node, error=str(error))

    async def release(self) -> None:
        """Give it up, so that the next agent need not wait."""
        await self._bus.kv.delete(_key(self._node), revision=self._revision)

    async def _renewed(self) -> int:
        key = _key(self._node)
        try:
            return await self._bus.kv.update(key, self.holder, self._revision, ttl_s=LIFETIME_S)
        except SequenceMismatch:
            entry = await self._bus.kv.get(key, NodeHolder)
        if entry is None or entry.value is None:
            return await self._bus.kv.create(key, self.holder, ttl_s=LIFETIME_S)
        if entry.value != self.holder:
            raise NodeClaimed(self._bus.run, self._node, entry.value)
        return entry.revision  # ours: its answer was lost


def place_of(holder: NodeHolder) -> str:
    """Who and where that is, for people."""
    return f"process {holder.pid} on {holder.host}, in {holder.run_dir}"


async def holders(bus: Bus) -> list[tuple[str, NodeHolder]]:
    """Which nodes are claimed and by whom; the claim of an agent that died stays for a while."""
    entries = await bus.kv.entries(_key("*"), NodeHolder)
    return [(entry.key.removeprefix(_key("")), entry.value) for entry in entries if entry.value is not None]


async def _enter(bus: Bus, node: str, holder: NodeHolder) -> int:
    """The revision of the claim, once it is ours."""
    first_seen, other = 0, holder
    ends = anyio.current_time() + PATIENCE * LIFETIME_S
    while anyio.current_time() < ends:
        entry = await bus.kv.get(_key(node), NodeHolder)
        try:
            if entry is None or entry.value is None:
                return await bus.kv.create(_key(node), holder, ttl_s=LIFETIME_S)
            other = entry.value
            if (other.host, other.run_dir) == (holder.host, holder.run_dir):
                return await bus.kv.update(_key(node), holder, entry.revision, ttl_s=LIFETIME_S)
        except SequenceMismatch:
            continue  # somebody was quicker
        if first_seen and entry.revision != first_seen:
            raise NodeClaimed(bus.run, node, other)  # it lives: it has renewed its claim
        first_seen = entry.revision
        await anyio.sleep(LOOK_EVERY_S)
    raise NodeClaimed(bus.run, node, other)


def _key(node: str) -> str:
    return f"agent.{node}"


def _count_key(node: str) -> str:
    return f"agent_incarnation.{node}"
