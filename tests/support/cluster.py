"""Three nats-servers that form a cluster on loopback, for the duration of a block."""

import os
import signal
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from runtime.bus.errors import BusError
from runtime.bus.limits import BusLimits
from runtime.bus.nats.connection import open_connection
from runtime.bus.nats.server import ServerSettings, server_command, write_config
from runtime.bus.nats.store import api_call
from runtime.node.supervisor.ports import free_port
from runtime.util.secrets import Login, with_login

NAMES = ("s1", "s2", "s3")
READY_S = 60.0  # for an election, on a busy machine
LOOKING = BusLimits(connect_timeout_s=2.0, publish_timeout_s=2.0, attempt_timeout_s=1.0)


class ClusterServer:
    """One server of a cluster. It can be killed, paused and restarted on its ports and store."""

    def __init__(self, name: str, directory: Path, port: int, routes: str, extra: str) -> None:
        self.name = name
        self.url = f"nats://127.0.0.1:{port}"
        self._directory = directory
        self._settings = ServerSettings(store_dir=directory / "store", port=port)
        self._cluster = f"server_name: {name}\n{routes}{extra}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Start the server without waiting."""
        config = write_config(self._directory / "nats.conf", self._settings)
        with config.open("a") as file:
            file.write(self._cluster)
        with (self._directory / "nats.log").open("ab") as output:
            self._process = subprocess.Popen(server_command(config, self._directory), stdout=output, stderr=output)

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Stop the server gracefully: it hands its leaderships over first."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Suspend the server: connections stay open, but it does not answer."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)


class Cluster:
    """A cluster of three servers."""

    def __init__(self, directory: Path, extra: str = "", login: Login | None = None) -> None:
        self._login = login
        ports = _free_ports(2 * len(NAMES))
        listens = dict(zip(NAMES, ports[len(NAMES) :], strict=True))
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in listens.values())
        self.servers = {
            name: ClusterServer(
                name,
                directory / name,
                port,
                f'cluster {{ name: test, listen: "127.0.0.1:{listens[name]}", routes: [{routes}] }}\n',
                extra,
            )
            for name, port in zip(NAMES, ports, strict=False)
        }

    @property
    def url(self) -> str:
        """URLs of all servers, separated by commas."""
        return ",".join(server.url for server in self.servers.values())

    def start(self) -> None:
        """Start all servers without waiting."""
        for server in self.servers.values():
            server.start()

    async def wait_ready(self) -> None:
        """Wait until the servers have elected a leader.

        Raises:
            TimeoutError: they did not within READY_S.
        """
        with anyio.fail_after(READY_S):
            while await self._ask("INFO") is None:  # noqa: ASYNC110 - the servers offer no notification
                await anyio.sleep(0.1)

    async def leader_of(self, stream: str) -> ClusterServer:
        """Return the server that leads a stream, once there is one.

        Raises:
            TimeoutError: there was none within READY_S.
        """
        with anyio.fail_after(READY_S):
            while True:
                info = await self.info(stream)
                leader = None if info is None else self.servers.get(info["cluster"].get("leader", ""))
                if leader is not None and leader.is_alive:
                    return leader
                await anyio.sleep(0.05)

    async def wait_whole(self, stream: str) -> None:
        """Wait until all replicas of a stream are current.

        Raises:
            TimeoutError: they were not within READY_S.
        """
        with anyio.fail_after(READY_S):
            while True:
                info = await self.info(stream)
                peers: list[dict[str, Any]] = [] if info is None else info["cluster"].get("replicas", [])
                if len(peers) == len(NAMES) - 1 and all(peer["current"] and not peer.get("offline") for peer in peers):
                    return
                await anyio.sleep(0.05)

    async def info(self, stream: str) -> dict[str, Any] | None:
        """The state of a stream; None if the servers do not answer."""
        return await self._ask(f"STREAM.INFO.{stream}")

    async def _ask(self, name: str) -> dict[str, Any] | None:
        alive = ",".join(server.url for server in self.servers.values() if server.is_alive)
        try:
            async with open_connection(with_login(alive, self._login), name="cluster", limits=LOOKING) as connection:
                return await api_call(connection, name)
        except BusError:
            return None

    def kill(self) -> None:
        """Kill all servers."""
        for server in self.servers.values():
            server.kill()


@asynccontextmanager
async def running_cluster(
    directory: Path, extra: str = "", *, login: Login | None = None
) -> AsyncGenerator[Cluster, None]:
    """Run three servers for the duration of a block, with their files in `directory`.

    Args:
        directory: holds a directory per server.
        extra: further lines of each configuration file, such as accounts.
        login: of a user who may use JetStream, if the accounts need one.
    """
    cluster = Cluster(directory, extra, login)
    try:
        cluster.start()
        await cluster.wait_ready()
        yield cluster
    finally:
        cluster.kill()


def _free_ports(number: int) -> list[int]:
    """Ports that no outgoing connection takes while a server is away."""
    ports: set[int] = set()
    while len(ports) < number:
        ports.add(free_port())
    return list(ports)
