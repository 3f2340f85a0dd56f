"""The certificate of a run's own server: made once, pinned under its fixed name, whatever address leads there."""

import stat
from pathlib import Path

import pytest

from runtime.bus.nats.certificate import own_certificate
from runtime.bus.nats.connection import open_connection
from runtime.bus.nats.server import ServerSettings
from tests.fixtures.nats import TEST_LIMITS, eventually
from tests.support.failing_connect import failing_connect
from tests.support.running_server import running_server

pytestmark = pytest.mark.anyio


def test_it_is_made_once_and_its_key_is_private(tmp_path: Path) -> None:
    first = own_certificate(tmp_path / "bus")
    pem = first.pem()
    assert stat.S_IMODE(first.key.stat().st_mode) == 0o600
    assert own_certificate(tmp_path / "bus").pem() == pem
    first.key.chmod(0o644)
    with pytest.raises(ValueError, match="others may read it"):
        own_certificate(tmp_path / "bus")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_any_address_of_the_server_fits(tmp_path: Path, host: str) -> None:
    certificate = own_certificate(tmp_path / "bus")
    listens = "::1" if host == "::1" else "127.0.0.1"
    settings = ServerSettings(store_dir=tmp_path / "nats", host=listens, certificate=certificate)
    async with running_server(tmp_path / "server", settings) as server:
        pem = certificate.pem()
        in_url = f"[{host}]" if ":" in host else host
        for scheme in ("tls", "nats"):
            url = f"{scheme}://{in_url}:{server.ports.port}"
            async with open_connection(url, name="test", limits=TEST_LIMITS, certificate=pem) as connection:
                assert connection.is_connected


async def test_another_certificate_or_none_is_not_accepted(tmp_path: Path) -> None:
    settings = ServerSettings(store_dir=tmp_path / "nats", certificate=own_certificate(tmp_path / "bus"))
    async with running_server(tmp_path / "server", settings) as server:
        for pem in (own_certificate(tmp_path / "other").pem(), None):
            expected = "certificate verify failed"
            assert expected in await failing_connect(server.ports.url, expected, pem)


async def test_a_client_with_the_certificate_does_not_log_in_to_a_server_without_tls(tmp_path: Path) -> None:
    async with running_server(tmp_path / "server") as server:
        expected, pem = "the server offers no TLS", own_certificate(tmp_path / "bus").pem()
        assert expected in await failing_connect(server.ports.url, expected, pem)


async def test_a_connection_with_unsent_data_closes_after_the_server_is_gone(tmp_path: Path) -> None:
    certificate = own_certificate(tmp_path / "bus")
    settings = ServerSettings(store_dir=tmp_path / "nats", certificate=certificate)
    async with (
        running_server(tmp_path / "server", settings) as server,
        open_connection(server.ports.url, name="test", limits=TEST_LIMITS, certificate=certificate.pem()) as connection,
    ):
        await server.stop()
        await eventually(lambda: not connection.is_connected)
        await connection.send("a.b", b"unsent")
