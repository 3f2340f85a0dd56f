"""A private nats-server for the duration of a block."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec

from runtime.bus.nats.server import ServerPorts, ServerSettings, server_command, wait_ready, write_config
from runtime.util.secrets import Login, with_login

STOP_TIMEOUT_S = 5.0


class RunningServer:
    """A server started by `running_server`. It can be killed and restarted on its port."""

    def __init__(self, settings: ServerSettings, directory: Path) -> None:
        self._settings = settings
        self._directory = directory
        self._process: asyncio.subprocess.Process | None = None
        self.ports = ServerPorts(())

    @property
    def url(self) -> str:
        """URL for clients, with their login."""
        return with_login(self.ports.url, self._settings.login)

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None
        return self._process.pid

    async def start(self, *, timeout_s: float = 40.0) -> None:
        """Start the server, on its previous port if there is one.

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
        certificate = None if settings.certificate is None else settings.certificate.pem()
        self.ports = await wait_ready(
            self._directory, self._process.pid, timeout_s=timeout_s, login=settings.login, certificate=certificate
        )

    async def kill(self) -> None:
        """Kill the server (SIGKILL)."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def stop(self) -> None:
        """Terminate the server (SIGTERM), and kill it after STOP_TIMEOUT_S."""
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
    """Run a private server for the duration of a block, with its files in `directory`.

    Raises:
        BusUnavailable: the server does not start.
    """
    server = RunningServer(settings or ServerSettings(store_dir=directory / "nats"), directory)
    try:
        await server.start()
        yield server
    finally:
        with anyio.CancelScope(shield=True):
            await server.stop()


@asynccontextmanager
async def configured_server(directory: Path, extra: str, login: Login) -> AsyncGenerator[str, None]:
    """Run a private server with further lines of configuration for the duration of a block; yield its URL.

    Args:
        directory: holds its files.
        extra: lines such as accounts.
        login: of a user who may use JetStream and any inbox.
    """
    config = write_config(directory / "nats.conf", ServerSettings(store_dir=directory / "store"))
    with config.open("a") as file:
        file.write(extra)
    with (directory / "nats.log").open("ab") as output:
        process = await asyncio.create_subprocess_exec(*server_command(config, directory), stdout=output, stderr=output)
    try:
        yield (await wait_ready(directory, process.pid, timeout_s=40.0, login=login)).url
    finally:
        process.kill()
        await process.wait()
