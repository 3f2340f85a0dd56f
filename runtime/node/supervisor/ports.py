"""Ports for the processes of a node, and the addresses of its ready servers."""

import errno
import os
import secrets
import socket
from pathlib import Path
from typing import Final

from runtime.bus.addresses import host_port
from runtime.settings.processes import ProcessSpec
from runtime.util.proc import BEGUN, stat_of

LOWEST: Final = 20_000  # well-known services use ports below it
TRIES: Final = 50
LISTENERS: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
STATE_LISTENING: Final = "0A"
CONNECTIONS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortInUse(Exception):
    """A port that the topology sets is in use. The text names the program that holds it, if it can be seen."""

    def __init__(self, host: str, port: int, key: str | None = None) -> None:
        setting = f" ({key})" if key else ""
        super().__init__(f"port {port}{setting} on {host} is in use by {holder_of(port) or 'another program'}")
        self.host = host
        self.port = port


def holder_of(port: int) -> str | None:
    """Describe the process of this machine that listens on a port; None if it is invisible to this user."""
    sockets = {f"socket:[{inode}]" for table in LISTENERS for inode in _listening(table, port)}
    holders: list[tuple[int, str]] = []
    for directory in Path("/proc").glob("[0-9]*") if sockets else ():
        try:
            if any(os.readlink(fd) in sockets for fd in (directory / "fd").iterdir()):
                started = int(stat_of(directory.name)[BEGUN])
                holders.append((started, f"process {directory.name} ({(directory / 'comm').read_text().strip()})"))
        except OSError:  # it ended, or is another user's
            continue
    return min(holders)[1] if holders else None  # forks of the holder started later


def _listening(table: Path, port: int) -> list[str]:
    """Return the inodes of the sockets that listen on a port, from a table of the kernel."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if row[3] == STATE_LISTENING and int(row[1].rpartition(":")[2], 16) == port]


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen on a port now."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT do not block a server
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def free_port(host: str = "127.0.0.1", *, connections: Path = CONNECTIONS) -> int:
    """Return a port that was free a moment ago. Another program may take it first, so be ready to retry.

    It is outside of the kernel's range for outgoing connections, so no connection takes it while a server starts.

    Args:
        host: address to listen on.
        connections: file with that range.
    """
    lowest = _lowest_of_connections(connections)
    for _ in range(TRIES if lowest > LOWEST else 0):
        port = LOWEST + secrets.randbelow(lowest - LOWEST)
        if is_free(host, port):
            return port
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _lowest_of_connections(connections: Path) -> int:
    """Return the lowest port that the kernel uses for outgoing connections; 0 if unknown."""
    try:
        return int(connections.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def choose_port(host: str, *, fixed: int | None = None, previous: int | None = None, key: str | None = None) -> int:
    """Choose the fixed port, else the previous one if it is free, else another free port.

    Args:
        host: address at which the server listens.
        fixed: port that the topology sets.
        previous: port of an earlier start.
        key: setting of the fixed port, for the error.

    Raises:
        PortInUse: the fixed port is in use.
    """
    if fixed is not None:
        if not is_free(host, fixed):
            raise PortInUse(host, fixed, key)
        return fixed
    if previous is not None and is_free(host, previous):
        return previous
    return free_port(host)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class ReadyServers:
    """Addresses of a node's ready servers."""

    def __init__(self) -> None:
        self._addresses: dict[str, str] = {}  # HOST:PORT by KV key

    def add(self, spec: ProcessSpec, host: str, port: int) -> None:
        """Add a ready process, if it is a server."""
        if spec.address_key is not None:
            self._addresses[spec.address_key] = host_port(host, port)

    def remove(self, spec: ProcessSpec) -> None:
        """Remove a process that ended."""
        self._addresses.pop(spec.address_key or "", None)

    def others(self, spec: ProcessSpec) -> str:
        """Return the addresses of its peer engines, as HOST:PORT,... Keys of one pool differ in the last part."""
        key = spec.address_key or ""
        pool = key.rpartition(".")[0]
        found = {each: at for each, at in self._addresses.items() if each.rpartition(".")[0] == pool}
        return ",".join(at for each, at in sorted(found.items()) if pool and each != key)
