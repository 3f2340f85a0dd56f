"""The claim on a node of a run, in the run's KV bucket: one daemon runs a node, whatever its run directory."""

import os
import socket
import time
import uuid
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog

from runtime.bus.bus import Bus
from runtime.bus.errors import BusError, SequenceMismatch

log = structlog.get_logger()

LIFETIME_S: Final = 20  # of a claim without renewal, in whole seconds as the bucket needs
RENEW_EVERY_S: Final = 5.0
PATIENCE: Final = 2  # lifetimes after which a dead daemon's claim must have expired
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
LOOK_EVERY_S: Final = 0.25  # interval of checks whether another daemon renews its claim


class NodeHolder(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of a node's claim."""

    host: str
    pid: int
    run_dir: str
    incarnation: int  # higher for each later daemon of the node
    since: float  # Unix time in seconds, for people
    place: str = ""  # run directory as the kernel of its machine knows it; "": unknown
    daemon: str = ""  # unique to one daemon


class NodeClaimed(Exception):
    """Another daemon runs the node."""

    def __init__(self, run: str, node: str, holder: NodeHolder) -> None:
        super().__init__(f"node {node} of run {run} is run by another node daemon: {place_of(holder)}; stop that first")
        self.holder = holder


class NodeClaim:
    """A held claim."""

    def __init__(
        self, bus: Bus, node: str, holder: NodeHolder, revision: int, *, lifetime_s: int, renew_every_s: float
    ) -> None:
        self.holder = holder
        self._bus = bus
        self._node = node
        self._revision = revision
        self._lifetime_s = lifetime_s
        self._renew_every_s = renew_every_s

    @classmethod
    async def take(
        cls,
        bus: Bus,
        node: str,
        run_dir: Path,
        *,
        incarnation: int,
        lifetime_s: int = LIFETIME_S,
        renew_every_s: float = RENEW_EVERY_S,
    ) -> "NodeClaim":
        """Claim a node. The claim of a dead daemon in another directory is taken over after it expires.

        Args:
            run_dir: already locked, so a node claim from this directory belongs to a dead daemon. Host name and path
                do not tell: two containers may share both.
            incarnation: counted in the run directory; raised above that of every earlier daemon.
            lifetime_s: seconds without a renewal after which a claim expires.
            renew_every_s: seconds between renewals.

        Raises:
            NodeClaimed: another daemon renews its claim.
            BusError: the bucket cannot be read or written.
        """
        path = str(await anyio.Path(run_dir).resolve())
        last = await bus.kv.get(_count_key(node), int)
        incarnation = max(incarnation, ((last.value or 0) if last is not None else 0) + 1)
        holder = NodeHolder(
            host=socket.gethostname(),
            pid=os.getpid(),
            run_dir=path,
            incarnation=incarnation,
            since=time.time(),
            place=place_in_kernel(Path(path)),
            daemon=uuid.uuid4().hex,
        )
        revision = await _enter(bus, node, holder, lifetime_s, silent_after_s=lifetime_s + renew_every_s)
        await bus.kv.put(_count_key(node), incarnation)
        log.info("node_claimed", node=node, incarnation=incarnation)
        return cls(bus, node, holder, revision, lifetime_s=lifetime_s, renew_every_s=renew_every_s)

    async def keep(self) -> None:
        """Renew the claim until cancelled.

        Raises:
            NodeClaimed: the claim expired during a bus outage, and another daemon took it.
        """
        while True:
            await anyio.sleep(self._renew_every_s)
            try:
                self._revision = await self._renewed()
            except BusError as error:
                log.warning("claim_not_renewed", node=self._node, error=str(error))

    async def release(self) -> None:
        """Delete the claim, so that the next daemon does not have to wait."""
        await self._bus.kv.delete(_key(self._node), revision=self._revision)

    async def _renewed(self) -> int:
        key = _key(self._node)
        try:
            return await self._bus.kv.update(key, self.holder, self._revision, ttl_s=self._lifetime_s)
        except SequenceMismatch:
            entry = await self._bus.kv.get(key, NodeHolder)
        if entry is None or entry.value is None:
            return await self._bus.kv.create(key, self.holder, ttl_s=self._lifetime_s)
        if entry.value != self.holder:
            raise NodeClaimed(self._bus.run, self._node, entry.value)
        return entry.revision  # our own update, whose answer was lost


def place_of(holder: NodeHolder) -> str:
    """Format a holder and its place."""
    return f"process {holder.pid} on {holder.host}, in {holder.run_dir}"


async def holders(bus: Bus) -> list[tuple[str, NodeHolder]]:
    """Return the claimed nodes with their holders. The claim of a dead daemon remains until it expires."""
    entries = await bus.kv.entries(_key("*"), NodeHolder)
    return [(entry.key.removeprefix(_key("")), entry.value) for entry in entries if entry.value is not None]


async def claims(bus: Bus) -> dict[str, tuple[NodeHolder, int]]:
    """Return the claimed nodes with their holders and revisions. A renewal raises the revision."""
    entries = await bus.kv.latest(_key("*"), NodeHolder)
    return {
        entry.key.removeprefix(_key("")): (entry.value, entry.revision) for entry in entries if entry.value is not None
    }


def place_in_kernel(run_dir: Path) -> str:
    """Identify a directory by boot id, device and inode: a file lock there excludes all processes of the machine."""
    try:
        boot, stat = _BOOT_ID.read_text().strip(), run_dir.stat()
    except OSError:
        return ""
    return f"{boot}:{stat.st_dev}:{stat.st_ino}"


async def _enter(bus: Bus, node: str, holder: NodeHolder, lifetime_s: int, *, silent_after_s: float) -> int:
    """Wait until the claim is ours, and return its revision.

    The server ends a claim that is not renewed, by its clock. The wait also ends by this process's clock: a server that
    moved to a machine whose clock is behind ends claims late.
    """
    first_seen, since, other = 0, 0.0, holder
    ends = anyio.current_time() + PATIENCE * lifetime_s
    while anyio.current_time() < ends:
        entry = await bus.kv.get(_key(node), NodeHolder)
        try:
            if entry is None or entry.value is None:
                return await bus.kv.create(_key(node), holder, ttl_s=lifetime_s)
            other = entry.value
            is_silent = entry.revision == first_seen and anyio.current_time() - since > silent_after_s
            if is_silent or (other.place and other.place == holder.place):
                return await bus.kv.update(_key(node), holder, entry.revision, ttl_s=lifetime_s)
        except SequenceMismatch:
            continue  # another daemon was faster
        if first_seen and entry.revision != first_seen:
            raise NodeClaimed(bus.run, node, other)  # it is alive: it renewed its claim
        if not first_seen:
            first_seen, since = entry.revision, anyio.current_time()
        await anyio.sleep(LOOK_EVERY_S)
    raise NodeClaimed(bus.run, node, other)


def _key(node: str) -> str:
    return f"agent.{node}"


def _count_key(node: str) -> str:
    return f"agent_incarnation.{node}"
