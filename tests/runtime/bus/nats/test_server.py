"""The embedded nats-server: configuration, readiness, restart on its port."""

import asyncio
import socket
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest

from runtime.bus.bus import Bus
from runtime.bus.errors import BusUnavailable
from runtime.bus.limits import MIB, BusLimits
from runtime.bus.nats import server as module
from runtime.bus.nats.server import (
    NoProgress,
    ServerPorts,
    ServerSettings,
    render_config,
    server_command,
    wait_ready,
    write_config,
)
from runtime.util.secrets import Login, Secret, with_login
from tests.fixtures.nats import TEST_STREAMS, NatsServer, eventually, group_failed
from tests.support.running_server import running_server

pytestmark = pytest.mark.anyio


def test_every_limit_is_in_the_configuration(tmp_path: Path) -> None:
    config = render_config(ServerSettings(store_dir=tmp_path))
    for key in ("host", "port", "max_payload", "max_pending", "max_memory_store", "max_file_store", "sync_interval"):
        assert f"{key}: " in config


def test_listening_beyond_this_machine_takes_a_password(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="requires a user and a password"):
        write_config(tmp_path / "nats.conf", ServerSettings(store_dir=tmp_path, host="0.0.0.0"))


def test_a_store_directory_may_have_any_name(tmp_path: Path) -> None:
    assert '"a \\"b\\" {c}"' in render_config(ServerSettings(store_dir=Path('a "b" {c}')))


def test_the_configuration_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = write_config(tmp_path / "nats.conf", ServerSettings(store_dir=tmp_path / "store"))
    assert path.stat().st_mode & 0o077 == 0


def test_the_port_is_that_of_the_first_url() -> None:
    assert ServerPorts(("nats://127.0.0.1:4333",)).port == 4333


async def test_a_killed_server_comes_back_on_its_port(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        before = server.ports.port
        await server.kill()
        await server.start()
        assert server.ports.port == before


async def test_a_taken_port_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = ServerSettings(store_dir=tmp_path / "store", port=taken.getsockname()[1])
        with anyio.fail_after(200), pytest.raises(BusUnavailable, match="ended before it was ready"):
            async with running_server(tmp_path, settings):
                pass


async def test_a_process_that_is_gone_is_never_ready(tmp_path: Path) -> None:
    with pytest.raises(BusUnavailable, match="ended"):
        await wait_ready(tmp_path, 2**22 + 1, timeout_s=30)


async def store_of(server: NatsServer, num_mib: int) -> None:
    """A log of this size, left by a server that was killed, with nothing that spares reading it."""
    async with Bus.connect(server.url, "large", name="writer") as bus:
        await bus.ensure_streams(msgspec.structs.replace(TEST_STREAMS, event_bytes=256 * MIB))
        async with anyio.create_task_group() as group:
            for number in range(num_mib):
                group.start_soon(bus.publish, group_failed(number, reason="x" * MIB))
    server.kill()
    for index in server.directory.rglob("index.db"):
        index.unlink()


async def test_a_server_is_waited_for_as_long_as_it_reads_its_store(
    own_nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that goes on only while the server is stopped."""
    server, now_s, seen = own_nats_server, 0.0, [0]
    bytes_read = module._bytes_read

    def see(pid: int) -> int:
        seen.append(bytes_read(pid))
        return seen[-1]

    async def stop_now_and_then() -> None:
        nonlocal now_s
        while not server.listens:
            polled = len(seen)
            # wait_ready has seen how far the server has read
            await eventually(lambda polled=polled: len(seen) > polled + 1 or server.listens)
            now_s += 0.6
            read = seen[-1]
            server.resume()
            await eventually(lambda read=read: seen[-1] > read or server.listens)
            if not server.listens:
                server.pause()
        server.resume()

    await store_of(server, 60)
    server.spawn(stopped=True)
    monkeypatch.setattr(module, "_bytes_read", see)
    monkeypatch.setattr(anyio, "current_time", lambda: now_s)
    async with anyio.create_task_group() as group:
        group.start_soon(stop_now_and_then)
        await wait_ready(server.directory, server.pid, timeout_s=0.8)
    assert now_s > 0.8


async def test_a_server_that_reads_no_further_is_not_waited_for(own_nats_server: NatsServer) -> None:
    await store_of(own_nats_server, 1)
    own_nats_server.spawn(stopped=True)
    with pytest.raises(NoProgress, match=r"read nothing of its store for 0\.3 s"):
        await wait_ready(own_nats_server.directory, own_nats_server.pid, timeout_s=0.3)


PASSWORD = "sl@me/:%40"  # whatever has a meaning in a URL
LOGIN = Login(user="physarum", password=Secret(PASSWORD))


async def test_a_wrong_password_is_refused_at_once(tmp_path: Path) -> None:
    settings = ServerSettings(store_dir=tmp_path / "store", login=LOGIN)
    async with running_server(tmp_path, settings) as server:
        async with Bus.connect(server.url, "run", name="test"):
            pass
        for wrong in (Login(user="physarum", password=Secret("mould")), Login(password=Secret("mould"))):
            url = with_login(server.ports.url, wrong)
            with anyio.fail_after(200), pytest.raises(BusUnavailable, match=r"(?i)authorization") as refused:
                async with Bus.connect(url, "run", name="test", limits=BusLimits(connect_timeout_s=300)):
                    pass
            assert "mould" not in str(refused.value)


async def test_a_token_is_a_login(tmp_path: Path) -> None:
    settings = ServerSettings(store_dir=tmp_path / "store", login=Login(password=Secret(PASSWORD)))
    async with running_server(tmp_path, settings) as server, Bus.connect(server.url, "run", name="test") as bus:
        await bus.ensure_streams(TEST_STREAMS)


async def test_no_login_is_shown_where_no_server_answers() -> None:
    url = with_login("nats://127.0.0.1:9,nats://127.0.0.1:11", LOGIN)
    with pytest.raises(BusUnavailable) as unavailable:
        async with Bus.connect(url, "run", name="test", limits=BusLimits(connect_timeout_s=0.2)):
            pass
    assert "nats://127.0.0.1:9,nats://127.0.0.1:11" in str(unavailable.value)
    assert "sl@me" not in str(unavailable.value)
    assert "physarum" not in str(unavailable.value)


def ports_of(pid: int) -> set[int]:
    return {place.laddr.port for place in psutil.Process(pid).net_connections("tcp") if place.status == "LISTEN"}


async def test_nobody_without_the_login_learns_anything(tmp_path: Path) -> None:
    async with running_server(tmp_path, ServerSettings(store_dir=tmp_path / "store", login=LOGIN)) as server:
        assert ports_of(server.pid) == {server.ports.port}
        reader, writer = await asyncio.open_connection("127.0.0.1", server.ports.port)
        with anyio.fail_after(200):
            assert (await reader.readline()).startswith(b"INFO ")
            writer.write(b'CONNECT {"verbose":true}\r\nSUB > 1\r\nPUB phy.run.event.x 1\r\nx\r\n')
            assert b"Authorization Violation" in await reader.readline()
            assert await reader.read() == b""  # closed, nothing more came
        writer.close()


def test_the_command_names_configuration_and_ports_directory(tmp_path: Path) -> None:
    binary, *arguments = server_command(tmp_path / "nats.conf", tmp_path)
    assert Path(binary).name == "nats-server"
    assert arguments == ["--config", str(tmp_path / "nats.conf"), "--ports_file_dir", str(tmp_path)]
