"""The external clients of a run: a file with their logins, and the task that makes the run's server accept them.

Commands only change the file. The node daemon that runs the server reads it again whenever it changes, and when a
credential expires. So a command may run on any machine that has the run directory, and while no daemon runs.
"""

import fcntl
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec
import structlog

from messages.subjects import GRADER_NAME, inbox_prefix
from runtime.bus.errors import BusUnavailable
from runtime.bus.nats.accounts import NODE_USER, Accounts, ClientKind, ExternalClient
from runtime.bus.nats.server import ServerSettings, accepts_login, write_accounts
from runtime.node.display import Show
from runtime.node.join import JOIN_FILE, Join, read_join
from runtime.node.reopen import FoundRun
from runtime.settings.placement import is_loopback
from runtime.settings.topology import SOLE_NODE
from runtime.util.files import write_atomically
from runtime.util.secrets import Login, Secret, make_private, read_private, with_login, without_logins

log = structlog.get_logger()

CLIENTS_FILE: Final = "clients.json"  # in the bus directory of the run directory
LOCK_FILE: Final = "clients.lock"
VALID: Final = "valid"  # status of a client that the server accepts
LOOK_EVERY_S: Final = 0.2
TRY_EVERY_S: Final = 0.05
MAX_FAILURES: Final = 4  # failed connections in a row that mean that no server answers; while it revokes, some fail
RELOAD_S: Final = 5.0  # for the server to take a new file
RETRY_AFTER_S: Final = 1.0


class ClientsUnreadable(Exception):
    """The file of external clients cannot be used; the text says why."""


class NameTaken(Exception):
    """An external client of this name has a valid credential."""


class NotListening(Exception):
    """The server of a run does not listen for external clients; the text says why and what to do."""


class Clients(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file of external clients."""

    graders: tuple[str, ...] = ()  # that the topology names, as of the last start
    clients: tuple[ExternalClient, ...] = ()

    def named(self, name: str) -> ExternalClient | None:
        """Return the client of a name."""
        return next((client for client in self.clients if client.name == name), None)

    def status_of(self, client: ExternalClient, now: datetime) -> str:
        """Return VALID, or why the server does not accept a client."""
        if client.is_revoked:
            return "revoked"
        if now >= client.expires:
            return "expired"
        lost = client.kind is ClientKind.GRADER and client.grader not in self.graders
        return "refused, since the topology no longer names its grader" if lost else VALID

    def accepted(self, now: datetime) -> tuple[ExternalClient, ...]:
        """Return the clients whose credentials are valid at a time."""
        return tuple(client for client in self.clients if self.status_of(client, now) == VALID)

    def with_client(self, client: ExternalClient) -> "Clients":
        """Return the content with a client, in place of an earlier one of its name."""
        others = (each for each in self.clients if each.name != client.name)
        return msgspec.structs.replace(self, clients=(*others, client))


def read_clients(directory: Path) -> Clients:
    """Read the file of external clients in a run's bus directory. Without a file there are none.

    Raises:
        ClientsUnreadable: the file cannot be read, other users may read it, or its content is invalid.
    """
    path = directory / CLIENTS_FILE
    try:
        return msgspec.json.decode(read_private(path), type=Clients)
    except FileNotFoundError:
        return Clients()
    except (OSError, ValueError) as error:  # a decode error is a ValueError
        why = "it is not a file of this version" if isinstance(error, msgspec.MsgspecError) else str(error)
        raise ClientsUnreadable(f"{path} is not used: {why}") from error


def clients_of_grader(directory: Path, grader: str) -> tuple[str, ...]:
    """Names of the external clients that may grade for a grader now; none if the file cannot be used."""
    try:
        accepted = read_clients(directory).accepted(datetime.now(UTC))
    except ClientsUnreadable:
        return ()
    return tuple(client.name for client in accepted if client.grader == grader)


def write_clients(directory: Path, clients: Clients) -> None:
    """Write the file of external clients. The caller holds the lock."""
    write_atomically(directory / CLIENTS_FILE, msgspec.json.format(msgspec.json.encode(clients)) + b"\n")


@contextmanager
def locked(directory: Path) -> Generator[None]:
    """Hold the lock of the file of external clients. One process at a time changes it.

    Raises:
        OSError: the lock file cannot be opened.
    """
    make_private(directory)
    with (directory / LOCK_FILE).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def add_client(directory: Path, name: str, kind: ClientKind, *, grader: str = "", expires: datetime) -> ExternalClient:
    """Add an external client with a new password.

    Args:
        directory: bus directory of the run.
        name: of the client; may be that of a revoked or expired one.
        kind: of the client.
        grader: of a client that grades, as the topology names it.
        expires: when its credential expires.

    Raises:
        NameTaken: the name has a valid credential, or belongs to the nodes.
        ValueError: the name is invalid, or the topology has no such grader.
        ClientsUnreadable: the file cannot be used.
    """
    if GRADER_NAME.fullmatch(name) is None:
        raise ValueError(f"--name {name!r}: allowed are 1 to 64 letters, digits, '-' and '_', not '-' or '_' first")
    if name == NODE_USER:
        raise NameTaken(f"--name {name}: the nodes of the run use this name; choose another one")
    with locked(directory):
        before = read_clients(directory)
        if kind is ClientKind.GRADER and grader not in before.graders:
            allowed = ", ".join(before.graders) or "none"
            raise ValueError(f"--grader {grader}: the topology of the run names no such grader; allowed: {allowed}")
        known = before.named(name)
        if known is not None and before.status_of(known, datetime.now(UTC)) == VALID:
            raise NameTaken(
                f"--name {name}: a {known.kind} has this name until {known.expires:%Y-%m-%d %H:%M} UTC; choose another "
                f"one, or revoke it first (--revoke {name})"
            )
        client = ExternalClient(name=name, kind=kind, grader=grader, password=Secret.random().reveal(), expires=expires)
        write_clients(directory, before.with_client(client))
    return client


def revoke_client(directory: Path, name: str) -> ExternalClient:
    """Revoke the credential of an external client.

    Raises:
        ValueError: there is no such client.
        ClientsUnreadable: the file cannot be used.
    """
    with locked(directory):
        before = read_clients(directory)
        known = before.named(name)
        if known is None:
            names = ", ".join(client.name for client in before.clients) or "none"
            raise ValueError(f"--revoke {name}: no external client has this name; there are: {names}")
        revoked = msgspec.structs.replace(known, is_revoked=True)
        write_clients(directory, before.with_client(revoked))
    return revoked


def join_of(run: FoundRun) -> Join:
    """Return where the server of a run listens, and its certificate, as of its last start.

    Raises:
        NotListening: external clients cannot reach it.
    """
    if run.bus_url is not None:
        raise NotListening(
            f"run {run.name} uses the NATS server at {without_logins(run.bus_url)} (bus.url): its owner gives the "
            "credentials; the accounts that it needs are in docs/run/nats/accounts.conf"
        )
    try:
        return read_join(run.directory / JOIN_FILE)
    except FileNotFoundError:
        if len(run.addresses) <= 1 and all(one is None or is_loopback(one) for one in run.addresses.values()):
            node = next(iter(run.addresses), SOLE_NODE)
            raise NotListening(
                f"run {run.name} accepts no external clients: set nodes.{node}.address to an address that they reach, "
                'or to "auto", or, for graders on this machine, name them in reward.external; then start the run again'
            ) from None
        raise NotListening(
            f"run {run.name} has not started with an address yet ({run.directory / JOIN_FILE} is missing): start it"
        ) from None
    except (OSError, ValueError) as error:
        raise NotListening(str(error)) from error


async def wait_until_taken(
    url: str, run: str, certificate: str | None, changes: Iterable[tuple[ExternalClient, bool]]
) -> None:
    """Wait until a server accepts some clients and refuses others.

    Args:
        url: of the server.
        run: name of the run.
        certificate: PEM certificate of the server.
        changes: clients, and whether the server is to accept them.

    Raises:
        BusUnavailable: no server answers.
    """
    for client, wanted in changes:
        login = Login(user=client.name, password=Secret(client.password))
        failures = 0
        while True:
            try:
                accepted = await accepts_login(with_login(url, login), inbox_prefix(run, client.name), certificate)
            except BusUnavailable:
                failures += 1  # the server may have cut this very connection off, as it revoked the login
                if failures == MAX_FAILURES:
                    raise
            else:
                if accepted == wanted:
                    break
                failures = 0
            await anyio.sleep(TRY_EVERY_S)  # the server does not report that it has read its file again


class ServerAccounts:
    """Keeps the accounts of this node's server as the file of external clients says.

    Args:
        run: name of the run.
        directory: bus directory of the run.
        server: settings of the server.
        graders: that the topology names.
        show: prints a line for the user.
    """

    def __init__(self, run: str, directory: Path, server: ServerSettings, graders: Iterable[str], show: Show) -> None:
        self._run = run
        self._directory = directory
        self._server = server
        self._graders = tuple(graders)
        self._show = show
        self._accepted: tuple[ExternalClient, ...] = ()  # by the running server
        self._problem = ""

    def settings(self) -> ServerSettings:
        """Store the graders of the topology, and return the settings of a server that starts now, with its accounts.

        A server without a login has none.

        Raises:
            ClientsUnreadable: the file cannot be used.
            OSError: it cannot be written.
        """
        if self._server.login is None:
            return self._server
        with locked(self._directory):
            clients = msgspec.structs.replace(read_clients(self._directory), graders=self._graders)
            write_clients(self._directory, clients)
        self._accepted = clients.accepted(datetime.now(UTC))
        return msgspec.structs.replace(self._server, accounts=self._accounts(self._accepted))

    async def run(self, url: str, certificate: str | None, reload: Callable[[], bool]) -> None:
        """Follow the file, and the expiry of credentials, until cancelled.

        Args:
            url: of the server, without a login.
            certificate: PEM certificate of the server.
            reload: makes the server read its files again; returns False if it does not run now.
        """
        while True:
            try:
                clients = await anyio.to_thread.run_sync(read_clients, self._directory)
                accepted = clients.accepted(datetime.now(UTC))
                if accepted != self._accepted:
                    await self._apply(accepted, clients, url, certificate, reload)
                self._problem = ""
            except (ClientsUnreadable, BusUnavailable, TimeoutError, OSError) as error:
                self._report(str(error) or f"the server did not read its accounts within {RELOAD_S:g} s")
                await anyio.sleep(RETRY_AFTER_S)
            await anyio.sleep(LOOK_EVERY_S)  # another machine may write the file: there is no event

    async def _apply(
        self,
        accepted: tuple[ExternalClient, ...],
        clients: Clients,
        url: str,
        certificate: str | None,
        reload: Callable[[], bool],
    ) -> None:
        """Make the server accept these clients alone, and check that it does.

        Raises:
            BusUnavailable: the server does not answer.
            TimeoutError: the server did not take the new file.
        """
        given = [client for client in accepted if client not in self._accepted]
        removed = [client for client in self._accepted if client not in accepted]
        await anyio.to_thread.run_sync(write_accounts, self._directory, self._accounts(accepted), self._server.login)
        if not reload():
            return  # a server that starts reads the new file
        with anyio.fail_after(RELOAD_S):
            changes = [*((client, True) for client in given), *((client, False) for client in removed)]
            await wait_until_taken(url, self._run, certificate, changes)
        self._accepted = accepted
        for client in given:
            self._tell(client, "accepted")
        for client in removed:
            now = clients.named(client.name)
            is_same = now is not None and now.password == client.password
            self._tell(client, clients.status_of(now, datetime.now(UTC)) if is_same and now is not None else "revoked")

    def _tell(self, client: ExternalClient, status: str) -> None:
        log.info("external_client", client=client.name, kind=client.kind, grader=client.grader, status=status)
        self._show(f"credential of {client.kind} {client.name}: {status}")

    def _report(self, problem: str) -> None:
        if problem == self._problem:
            return
        self._problem = problem
        log.warning("accounts_not_changed", reason=problem)
        self._show(f"the external clients of the run are as before: {problem}")

    def _accounts(self, accepted: tuple[ExternalClient, ...]) -> Accounts:
        return Accounts(run=self._run, graders=self._graders, clients=accepted)
