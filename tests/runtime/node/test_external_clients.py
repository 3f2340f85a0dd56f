"""External clients of a run with a real node daemon and server: given, revoked, expired, and resumed."""

import os
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import msgspec
import psutil
import pytest
from nats.aio.client import Client

from runtime.bus.bus import Bus
from runtime.bus.errors import BusUnavailable
from runtime.bus.nats.accounts import ClientKind, ExternalClient
from runtime.bus.nats.certificate import NAME, client_context, own_certificate
from runtime.bus.nats.server import ServerSettings, accepts_login
from runtime.node import external_clients
from runtime.node.external_clients import (
    CLIENTS_FILE,
    Clients,
    NameTaken,
    ServerAccounts,
    add_client,
    read_clients,
    revoke_client,
    wait_until_taken,
    write_clients,
)
from runtime.node.join import JOIN_FILE, read_join
from runtime.node.network import NodeAddress
from runtime.node.node_plan import NodePlan
from runtime.util.secrets import Login, Secret, with_login
from tests.fixtures.nats import eventually
from tests.runtime.node.test_daemon import Running, plan
from tests.support.running_server import running_server

pytestmark = pytest.mark.anyio

LOGIN = Login(user="physarum", password=Secret("of-nodes"))


OF_ANOTHER_TOPOLOGY = ExternalClient(
    name="poet", kind=ClientKind.GRADER, grader="poems", password="x", expires=datetime(2099, 1, 1, tzinfo=UTC)
)


def later(seconds: float = 3600) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def plan_with_accounts(run_dir: Path) -> NodePlan:
    server = ServerSettings(store_dir=run_dir / "nats", login=LOGIN, certificate=own_certificate(run_dir / "bus"))
    address = NodeAddress(ip="127.0.0.1", interface="lo")
    return msgspec.structs.replace(plan(run_dir), server=server, address=address, graders=("math", "code"))


@asynccontextmanager
async def running(run_dir: Path) -> AsyncGenerator[Running]:
    """A run without processes; its daemon ends with the block."""
    run = Running(plan_with_accounts(run_dir))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run.daemon.run)  # the time limit is that of the test
        await eventually((run_dir / JOIN_FILE).exists)
        yield run
        os.kill(os.getpid(), signal.SIGTERM)


async def until_taken(run_dir: Path, client: ExternalClient, wanted: bool) -> float:
    join, began = read_join(run_dir / JOIN_FILE), time.monotonic()
    with anyio.fail_after(200):
        await wait_until_taken(join.url, "r", join.certificate, [(client, wanted)])
    return time.monotonic() - began


async def test_a_connection_that_the_server_cuts_as_it_revokes_the_login_is_no_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[bool | BusUnavailable] = [True, BusUnavailable("closed for good"), True, BusUnavailable("cut"), False]

    async def accepts(*_: Any) -> bool:
        answer = answers.pop(0)
        if isinstance(answer, BusUnavailable):
            raise answer
        return answer

    monkeypatch.setattr(external_clients, "accepts_login", accepts)
    await wait_until_taken("nats://127.0.0.1:4222", "r", None, [(OF_ANOTHER_TOPOLOGY, False)])
    assert answers == []
    answers += [BusUnavailable("no server")] * external_clients.MAX_FAILURES
    with pytest.raises(BusUnavailable, match="no server"):
        await wait_until_taken("nats://127.0.0.1:4222", "r", None, [(OF_ANOTHER_TOPOLOGY, False)])


class Connected:
    """A connection of an external client, and how often it was lost."""

    def __init__(self) -> None:
        self.client = Client()
        self.lost = anyio.Event()
        self.times_lost = 0

    async def _on_lost(self) -> None:
        self.times_lost += 1
        self.lost.set()


@asynccontextmanager
async def connected(run_dir: Path, client: ExternalClient) -> AsyncGenerator[Connected]:
    join, one = read_join(run_dir / JOIN_FILE), Connected()
    await one.client.connect(
        join.url,
        user=client.name,
        password=client.password,
        tls=client_context(join.certificate),
        tls_hostname=NAME,
        inbox_prefix=f"_INBOX.r.{client.name}".encode(),
        disconnected_cb=one._on_lost,
        max_reconnect_attempts=1,
        reconnect_time_wait=0,
    )
    try:
        yield one
    finally:
        await one.client.close()


async def test_a_revoked_client_is_cut_off_within_a_second_and_no_other_client_notices(tmp_path: Path) -> None:
    bus_dir = tmp_path / "bus"
    async with running(tmp_path) as run:
        join = read_join(tmp_path / JOIN_FILE)
        alice = add_client(bus_dir, "alice", ClientKind.GRADER, grader="math", expires=later())
        bob = add_client(bus_dir, "bob", ClientKind.VIEWER, expires=later())
        for each in (alice, bob):
            await until_taken(tmp_path, each, True)
        await run.shown("credential of grader alice: accepted")
        async with (
            connected(tmp_path, alice) as hers,
            connected(tmp_path, bob) as his,
            Bus.connect(join.url_with_login, "r", name="actor", certificate=join.certificate) as actor,
        ):
            revoke_client(bus_dir, "alice")
            with anyio.fail_after(200):
                await hers.lost.wait()
            await until_taken(tmp_path, alice, False)
            await run.shown("credential of grader alice: revoked")
            await his.client.flush()
            assert (his.times_lost, actor.stats()["bus/reconnects"]) == (0, 0)
        again = add_client(bus_dir, "alice", ClientKind.GRADER, grader="code", expires=later())
        await until_taken(tmp_path, again, True)
        await until_taken(tmp_path, alice, False)  # its password


async def test_a_credential_expires_while_its_client_is_connected(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        client = add_client(tmp_path / "bus", "bob", ClientKind.VIEWER, expires=later(6))
        await until_taken(tmp_path, client, True)
        async with connected(tmp_path, client) as his:
            with anyio.fail_after(200):
                await his.lost.wait()
        await run.shown("credential of viewer bob: expired")
        assert datetime.now(UTC) >= client.expires


async def test_changes_while_no_daemon_runs_apply_at_the_next_start(tmp_path: Path) -> None:
    bus_dir = tmp_path / "bus"
    async with running(tmp_path):
        pass
    kept = add_client(bus_dir, "kept", ClientKind.VIEWER, expires=later())
    revoked = add_client(bus_dir, "revoked", ClientKind.VIEWER, expires=later())
    expired = add_client(bus_dir, "expired", ClientKind.VIEWER, expires=later(-1))
    revoke_client(bus_dir, "revoked")
    write_clients(bus_dir, read_clients(bus_dir).with_client(OF_ANOTHER_TOPOLOGY))
    (tmp_path / JOIN_FILE).unlink()
    async with running(tmp_path):
        join = read_join(tmp_path / JOIN_FILE)
        found: list[bool] = []
        for each in (kept, revoked, expired, OF_ANOTHER_TOPOLOGY):
            url = with_login(join.url, Login(user=each.name, password=Secret(each.password)))
            found.append(await accepts_login(url, f"_INBOX.r.{each.name}", join.certificate))
        assert found == [True, False, False, False]


async def test_a_file_that_cannot_be_read_changes_nothing_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bus" / CLIENTS_FILE
    async with running(tmp_path) as run:
        client = add_client(tmp_path / "bus", "bob", ClientKind.VIEWER, expires=later())
        await until_taken(tmp_path, client, True)
        async with connected(tmp_path, client) as his:
            await anyio.Path(path).write_text("{")
            await run.shown(f"the external clients of the run are as before: {path} is not used: it is not a file of")
            await his.client.flush()
            assert his.times_lost == 0
    outcome = await Running(plan_with_accounts(tmp_path)).run()
    assert (outcome.refused or "").startswith(f"{path} is not used")


async def test_a_server_that_does_not_read_its_accounts_again_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_clients, "RELOAD_S", 0.3)
    lines, signals = list[str](), list[int]()
    base = ServerSettings(store_dir=tmp_path / "nats", login=LOGIN)
    accounts = ServerAccounts("r", tmp_path, base, ["math"], lines.append)
    async with running_server(tmp_path, accounts.settings()) as server, anyio.create_task_group() as tasks:

        def reload() -> bool:
            signals.append(1)
            if len(signals) > 1:
                os.kill(server.pid, signal.SIGHUP)
            return True

        tasks.start_soon(accounts.run, server.ports.url, None, reload)
        add_client(tmp_path, "bob", ClientKind.VIEWER, expires=later())
        await eventually(lambda: len(lines) == 2)
        tasks.cancel_scope.cancel()
    assert lines == [
        "the external clients of the run are as before: the server did not read its accounts within 0.3 s",
        "credential of viewer bob: accepted",
    ]


def servers_here() -> list[int]:
    """Process ids of the servers that this process runs."""
    ours = (each.info for each in psutil.process_iter(["pid", "ppid", "name"]))  # one that ends meanwhile is left out
    return [each["pid"] for each in ours if (each["ppid"], each["name"]) == (os.getpid(), "nats-server")]


async def test_a_server_that_is_killed_comes_back_with_its_external_clients(tmp_path: Path) -> None:
    others = servers_here()  # of fixtures
    async with running(tmp_path) as run:
        client = add_client(tmp_path / "bus", "bob", ClientKind.VIEWER, expires=later())
        await until_taken(tmp_path, client, True)
        (killed,) = set(servers_here()) - set(others)
        os.kill(killed, signal.SIGKILL)
        await eventually(lambda: not set(servers_here()) <= {killed, *others})
        await until_taken(tmp_path, client, True)
        other = add_client(tmp_path / "bus", "carol", ClientKind.VIEWER, expires=later())
        await until_taken(tmp_path, other, True)
        await run.shown("credential of viewer carol: accepted")


def test_a_name_is_taken_while_its_credential_is_valid(tmp_path: Path) -> None:
    for name, problem in (("physarum", "the nodes of the run use this name"), ("-x", "allowed are 1 to 64 letters")):
        with pytest.raises((NameTaken, ValueError), match=problem):
            add_client(tmp_path, name, ClientKind.VIEWER, expires=later())
    with pytest.raises(ValueError, match="names no such grader; allowed: none"):
        add_client(tmp_path, "a", ClientKind.GRADER, grader="math", expires=later())
    first = add_client(tmp_path, "bob", ClientKind.VIEWER, expires=later())
    with pytest.raises(NameTaken, match="a viewer has this name until"):
        add_client(tmp_path, "bob", ClientKind.VIEWER, expires=later())
    with pytest.raises(ValueError, match="no external client has this name; there are: bob"):
        revoke_client(tmp_path, "carol")
    assert revoke_client(tmp_path, "bob").is_revoked
    second = add_client(tmp_path, "bob", ClientKind.VIEWER, expires=later())
    assert read_clients(tmp_path).clients == (second,)
    assert first.password != second.password


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"grader": "math"}, "valid"),
        ({}, "refused, since the topology no longer names its grader"),
        ({"expires": datetime(2020, 1, 1, tzinfo=UTC)}, "expired"),
        ({"expires": datetime(2020, 1, 1, tzinfo=UTC), "is_revoked": True}, "revoked"),
    ],
)
def test_the_status_of_a_client_says_why_it_is_refused(changes: dict[str, Any], status: str) -> None:
    client = msgspec.structs.replace(OF_ANOTHER_TOPOLOGY, **changes)
    clients = Clients(graders=("math",), clients=(client,))
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert clients.status_of(client, now) == status
    assert clients.accepted(now) == ((client,) if status == "valid" else ())
