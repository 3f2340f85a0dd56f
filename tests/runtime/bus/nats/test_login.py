"""Logins by JWT, and the servers to which a login is sent."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from runtime.bus.bus import Bus
from runtime.bus.errors import BusRefused
from runtime.util.secrets import Login, Secret, read_login, split_login, with_login
from tests.fixtures.nats import TEST_LIMITS, TEST_STREAMS, NatsServer, group_failed
from tests.support.cluster import Cluster
from tests.support.failing_connect import failing_connect
from tests.support.jwt_accounts import JwtAccounts
from tests.support.running_server import configured_server

pytestmark = pytest.mark.anyio
ACCOUNTS = JwtAccounts()


def login_of(directory: Path, text: str) -> Login:
    path = directory / "bus.creds"
    path.touch(0o600)
    path.write_text(text)
    return read_login(path)


@pytest.fixture
async def url(tmp_path: Path) -> AsyncGenerator[str, None]:
    login = login_of(tmp_path, ACCOUNTS.credentials("ready"))
    async with configured_server(tmp_path, ACCOUNTS.config, login) as url:
        yield url


async def test_a_credentials_file_of_nats_logs_in(url: str, tmp_path: Path) -> None:
    login = login_of(tmp_path, ACCOUNTS.credentials("me"))
    secret_url = with_login(url, login)
    assert split_login(secret_url) == (url, login)
    async with Bus.connect(secret_url, "run", name="test") as bus:
        await bus.ensure_streams(TEST_STREAMS)
        assert await bus.publish(group_failed(1)) == 1


async def test_credentials_that_expired_or_are_those_of_another_server_are_refused(url: str, tmp_path: Path) -> None:
    for text in (ACCOUNTS.credentials("me", expires_s=-1.0), JwtAccounts().credentials("me")):
        with pytest.raises(BusRefused, match=r"(?i)authorization|authentication"):
            async with Bus.connect(with_login(url, login_of(tmp_path, text)), "run", name="test", limits=TEST_LIMITS):
                pass


def test_a_damaged_credentials_file_is_named_and_not_shown(tmp_path: Path) -> None:
    text = ACCOUNTS.credentials("me")
    with pytest.raises(ValueError, match=r"bus\.creds: a JWT and the seed of a user") as error:
        login_of(tmp_path, text.replace("\nSU", "\nSA"))
    assert "eyJ" not in str(error.value)


async def test_a_damaged_seed_is_refused_before_anything_is_sent(url: str, tmp_path: Path) -> None:
    login = login_of(tmp_path, ACCOUNTS.credentials("me"))
    seed = login.password.reveal()
    damaged = Login(user=login.user, password=Secret(seed[:20] + ("A" if seed[20] != "A" else "B") + seed[21:]))
    expected = "the seed of the JWT is damaged"
    assert expected in await failing_connect(with_login(url, damaged), expected)


async def test_a_login_is_not_sent_to_a_server_without_tls_if_the_url_asks_for_tls(nats_server: NatsServer) -> None:
    url = nats_server.url.replace("nats://", "tls://me:secret@")
    expected = "the server offers no TLS"
    assert expected in await failing_connect(url, expected)


@pytest.mark.slow
async def test_addresses_that_a_cluster_announces_are_not_used(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    first, *others = cluster.servers.values()
    try:
        cluster.start()
        await cluster.wait_ready()
        async with Bus.connect(first.url, "run", name="test") as bus:
            client = bus._connection._client
            assert [server.netloc for server in client.servers] == [first.url.removeprefix("nats://")]
            assert not client.discovered_servers
            assert len(client._server_info["connect_urls"]) == 1 + len(others)
    finally:
        cluster.kill()
