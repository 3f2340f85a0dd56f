"""The lease on being home, a file of the run directory: one daemon at a time runs the bus on the run's store.

Home may move to another machine that has the directory. The lock of the directory excludes a second home on one
machine; network file systems do not always share locks, so the lease excludes one on another machine.
"""

import os
import socket
import uuid
from enum import Enum, auto
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec
import structlog

from runtime.node.claims.node_claim import place_in_kernel
from runtime.util.files import write_atomically

log = structlog.get_logger()

LEASE_FILE: Final = "home.json"
LIFETIME_S: Final = 10.0  # of a lease without renewal, on the clock of the daemon that waits for it
RENEW_EVERY_S: Final = 2.0
LOOK_EVERY_S: Final = 0.25


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the lease file."""

    node: str
    host: str
    pid: int
    daemon: str  # unique to one daemon
    place: str  # run directory as the kernel of its machine knows it; "": unknown
    incarnation: int  # higher for each later home
    renewals: int = 0  # a change shows that the holder is alive
    is_released: bool = False


class Decision(Enum):
    """What a daemon that wants to be home does next."""

    TAKE = auto()
    WAIT = auto()
    REFUSE = auto()  # the holder is alive


class HomeClaimed(Exception):
    """Another daemon is home."""

    def __init__(self, run_dir: Path, holder: Lease) -> None:
        super().__init__(
            f"{run_dir}: the bus of this run is run by process {holder.pid} on {holder.host}, as node {holder.node}; "
            "stop that first, or start with --take-over if that machine is gone for certain"
        )
        self.holder = holder


class LeaseUnreadable(Exception):
    """The file holds no lease, so it is unknown whether another daemon is home."""

    def __init__(self, path: Path, error: Exception) -> None:
        super().__init__(
            f"{path} cannot be read as the lease of a home node: {error}; delete it if no other machine runs the bus "
            "of this run"
        )


class HomeMoved(Exception):
    """Another daemon became home after this one."""

    def __init__(self, holder: Lease) -> None:
        super().__init__(f"node {holder.node}, process {holder.pid} on {holder.host}, is home now")


def decide(
    first: Lease | None,
    seen: Lease | None,
    *,
    unchanged_s: float,
    place: str,
    take_over: bool,
    lifetime_s: float = LIFETIME_S,
) -> Decision:
    """Decide whether to become home. Pure.

    Args:
        first: lease at the first look; None: there was no file.
        seen: lease now.
        unchanged_s: seconds between both looks on this process's clock. Clocks of two machines are not compared.
        place: of this daemon, which holds the lock of the directory there.
        take_over: the user vouches for the end of the holder.
        lifetime_s: seconds without a renewal after which a lease has expired.
    """
    if seen is None or seen.is_released or take_over:
        return Decision.TAKE
    if seen.place and seen.place == place:
        return Decision.TAKE  # this machine's lock shows that the holder is dead
    if seen != first:
        return Decision.REFUSE
    return Decision.TAKE if unchanged_s >= lifetime_s else Decision.WAIT


def is_superseded(own: Lease, found: Lease | None) -> bool:
    """Return whether the file belongs to a later home."""
    return found is not None and found.daemon != own.daemon and found.incarnation >= own.incarnation


class HomeLease:
    """A held lease."""

    def __init__(self, path: Path, lease: Lease) -> None:
        self.lease = lease
        self._path = path

    @classmethod
    async def take(
        cls,
        run_dir: Path,
        node: str,
        *,
        take_over: bool = False,
        place: str | None = None,
        lifetime_s: float = LIFETIME_S,
    ) -> "HomeLease":
        """Become home. Waits until the lease of a dead daemon on another machine has expired.

        Args:
            run_dir: its lock is held.
            node: name of this node.
            take_over: do not wait, and do not refuse.
            place: of the run directory; by default as this kernel knows it.
            lifetime_s: seconds without a renewal after which a lease has expired.

        Raises:
            HomeClaimed: another daemon renews the lease.
            LeaseUnreadable: the file holds no lease.
            OSError: the file cannot be read or written.
        """
        path = run_dir / LEASE_FILE
        place = place_in_kernel(run_dir) if place is None else place
        first = seen = await _read(path)
        begun = anyio.current_time()
        while True:
            unchanged_s = anyio.current_time() - begun
            match decide(first, seen, unchanged_s=unchanged_s, place=place, take_over=take_over, lifetime_s=lifetime_s):
                case Decision.REFUSE if seen is not None:
                    raise HomeClaimed(run_dir, seen)
                case Decision.TAKE:
                    break
                case _:
                    await anyio.sleep(LOOK_EVERY_S)
                    seen = await _read(path)
        lease = Lease(
            node=node,
            host=socket.gethostname(),
            pid=os.getpid(),
            daemon=uuid.uuid4().hex,
            place=place,
            incarnation=(0 if seen is None else seen.incarnation) + 1,
        )
        await _write(path, lease)
        log.info("home_taken", node=node, incarnation=lease.incarnation)
        return cls(path, lease)

    async def keep(self, renew_every_s: float = RENEW_EVERY_S) -> None:
        """Renew the lease until cancelled.

        Raises:
            HomeMoved: a later daemon is home.
        """
        while True:
            await anyio.sleep(renew_every_s)
            try:
                found = await _read(self._path)
                if found is not None and is_superseded(self.lease, found):
                    raise HomeMoved(found)
                self.lease = msgspec.structs.replace(self.lease, renewals=self.lease.renewals + 1)
                await _write(self._path, self.lease)
            except LeaseUnreadable as error:  # the next start refuses until the file is readable or gone
                log.warning("home_lease_unreadable", error=str(error))
            except OSError as error:
                log.warning("home_not_renewed", error=str(error))

    async def release(self) -> None:
        """Free the lease, so that the next home does not have to wait."""
        try:
            if not is_superseded(self.lease, await _read(self._path)):
                await _write(self._path, msgspec.structs.replace(self.lease, is_released=True))
        except (OSError, LeaseUnreadable) as error:
            log.warning("home_not_released", error=str(error))


async def _read(path: Path) -> Lease | None:
    """Read the lease; None if there is none.

    Raises:
        LeaseUnreadable: the file holds something else.
        OSError: the file cannot be read.
    """

    def read() -> Lease | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=Lease)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise LeaseUnreadable(path, error) from error

    return await anyio.to_thread.run_sync(read, abandon_on_cancel=True)


async def _write(path: Path, lease: Lease) -> None:
    await anyio.to_thread.run_sync(write_atomically, path, msgspec.json.encode(lease) + b"\n", abandon_on_cancel=True)
