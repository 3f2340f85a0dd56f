"""The join file: written, read, waited for, and ignored if it is of another run."""

import stat
import tempfile
from functools import partial
from pathlib import Path

import anyio
import msgspec
import pytest

from runtime.bus.bus import Bus
from runtime.bus.limits import MIB, StreamLimits
from runtime.bus.nats.certificate import own_certificate
from runtime.bus.nats.server import ServerSettings
from runtime.node.claims.run_id import settle_run_id
from runtime.node.join import Join, NotJoined, joined, read_join, write_join
from runtime.util.secrets import Login, Secret
from tests.fixtures.nats import eventually
from tests.support.running_server import RunningServer, running_server

pytestmark = pytest.mark.anyio

SMALL = StreamLimits(event_bytes=MIB, work_bytes=MIB, data_bytes=MIB, dead_bytes=MIB, kv_bytes=MIB)


def _pem() -> str:
    with tempfile.TemporaryDirectory() as directory:
        return own_certificate(Path(directory)).pem()


JOIN = Join(
    run="r",
    run_id="an-id",
    incarnation=2,
    url="tls://[fd77::10]:4222",
    user="physarum",
    password='a"b\\c',
    certificate=_pem(),
)


def settings(directory: Path) -> ServerSettings:
    login = Login(user=JOIN.user, password=Secret(JOIN.password))
    return ServerSettings(
        store_dir=directory / "nats", login=login, certificate=own_certificate(directory / "certificate")
    )


async def of_server(server: RunningServer, directory: Path) -> Join:
    """Make the run `r` on a server, and return how it is joined."""
    pem = own_certificate(directory / "certificate").pem()
    home = directory / "home"
    home.mkdir(exist_ok=True)
    async with Bus.connect(server.url, "r", name="home", certificate=pem) as bus:
        await bus.ensure_streams(SMALL)
        run_id = await settle_run_id(bus, home, owns=True)
    return msgspec.structs.replace(JOIN, url=server.ports.url, certificate=pem, run_id=run_id)


def test_it_is_read_as_it_was_written_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "join.toml"
    write_join(path, JOIN)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_join(path) == JOIN
    path.chmod(0o640)
    with pytest.raises(ValueError, match="others may read it"):
        read_join(path)


def test_another_content_is_refused_without_showing_it(tmp_path: Path) -> None:
    path = tmp_path / "join.toml"
    path.write_text('password = "geheim"\n')
    path.chmod(0o600)
    with pytest.raises(ValueError, match="is not a join file of this version") as caught:
        read_join(path)
    assert "geheim" not in str(caught.value)


async def test_a_node_waits_for_the_file_and_joins_when_the_bus_answers(tmp_path: Path) -> None:
    own, path, lines = tmp_path / "own", tmp_path / "join.toml", list[str]()
    own.mkdir()
    async with running_server(tmp_path / "bus", settings(tmp_path)) as server, anyio.create_task_group() as tasks:
        right = await of_server(server, tmp_path)

        async def write_later() -> None:
            wrong = [msgspec.structs.replace(right, run="other"), msgspec.structs.replace(right, run_id="x")]
            for number, join in enumerate([*wrong, right], 1):
                await eventually(partial(has_shown, number))
                write_join(path, join)

        def has_shown(number: int) -> bool:
            return len(lines) == number

        tasks.start_soon(write_later)
        assert await joined(path, "r", own, wait_s=50, show=lines.append, is_finished=lambda: False) == right
    assert [line.partition(": ")[2] for line in lines] == [
        f"{path} does not exist yet",
        f"{path} is ignored: it is of run other",
        f"{path} is ignored: the bus at {right.url} has another run",
    ]


async def test_the_file_of_another_run_in_this_directory_is_ignored(tmp_path: Path) -> None:
    own, path = tmp_path / "own", tmp_path / "join.toml"
    own.mkdir()
    (own / "run-id.json").write_text('{"id": "mine", "joined": true}')
    write_join(path, JOIN)
    with pytest.raises(NotJoined, match="of another run r than the one in"):
        await joined(path, "r", own, wait_s=0.2, show=print, is_finished=lambda: False)


@pytest.mark.parametrize("wrong", ["password", "certificate", "nothing there"])
async def test_a_bus_that_does_not_take_the_node_is_waited_for_and_named(tmp_path: Path, wrong: str) -> None:
    own, path = tmp_path / "own", tmp_path / "join.toml"
    own.mkdir()
    async with running_server(tmp_path / "bus", settings(tmp_path)) as server:
        right = await of_server(server, tmp_path)
        other = own_certificate(tmp_path / "other").pem()
        changes = {"password": "x"} if wrong == "password" else {"certificate": other} if wrong == "certificate" else {}
        write_join(path, msgspec.structs.replace(right, **changes))
        if wrong == "nothing there":
            await server.stop()
        with pytest.raises(NotJoined, match="does not accept this node"):
            await joined(path, "r", own, wait_s=5, show=lambda _: None, is_finished=lambda: False)


async def test_a_finished_run_is_not_waited_for(tmp_path: Path) -> None:
    seen: list[str] = []
    assert (
        await joined(tmp_path / "join.toml", "r", tmp_path, wait_s=20, show=seen.append, is_finished=lambda: True)
        is None
    )
    assert seen == []
