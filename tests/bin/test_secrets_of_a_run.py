"""Secrets of a run: who may read them, and that nothing that is shown or stored holds one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import psutil
import pytest

from actors.rollout.sglang.processes import METRICS_HOST
from bin.start_topology import main
from runtime.bus.addresses import engine_key
from runtime.bus.nats.server import ServerSettings
from runtime.util.secrets import Login, Secret, split_login, with_login
from tests.bin.test_start_topology import TOPOLOGY, arguments_of, environment, started
from tests.chaos.harness import Run
from tests.support.other_user import files_with, listening, open_directory, seen_by_nobody
from tests.support.running_server import running_server

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
MARK = "sw0rdf1sh"
HOLDERS = ["bus.url", "bus/accounts.conf", "bus/password"]  # in the run directory, each for its owner alone


def password_of(run_dir: Path) -> str:
    login = split_login((run_dir / "bus.url").read_text().strip())[1]
    assert login is not None
    assert login.user == "physarum"
    return login.password.reveal()


def tree_of(pid: int) -> list[int]:
    daemon = psutil.Process(pid)
    return [process.pid for process in (daemon, *daemon.children(recursive=True))]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_finds_no_secret_and_no_message() -> None:
    with open_directory() as place:
        run_dir, go_on = place / "runs" / "r", place / "go_on"
        with started(run_dir, ["3", "--wait", str(go_on)]) as command:
            command.until("step   3/")
            pids = tree_of(command.process.pid)
            holders = [run_dir / name for name in HOLDERS]
            seen = seen_by_nobody(run_dir, pids, [*holders, run_dir / "metrics.jsonl"], listening(pids))
            password = password_of(run_dir)
            go_on.touch()
            assert command.end() == 0
        assert len(seen.ports) == 1  # of the bus, and no other
        for said in seen.ports.values():
            assert "Authorization Violation" in said
            assert "MSG" not in said
        assert seen.files == seen.readable == seen.environments == []
        assert len(seen.command_lines) >= 3  # daemon, nats-server, player
        assert password not in str(seen)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_gets_nothing_of_a_whole_run_with_its_engine_and_router() -> None:
    with open_directory() as place:
        dumps = place / "dumps"
        run = Run(
            place,
            num_steps=400,
            eval_interval=None,
            overrides=(f"run.dump_details={dumps}", "engines.policy.router=sglang-router"),
        )
        async with run.started() as command:
            await command.log.until_trained(1)
            password = password_of(run.directory)
            key = (await engine_key(command.bus.kv)).reveal()
            pids = [process.pid for process in command.family()]
            torch_ports = listening([command.log.pids["trainer"]])  # of torch.distributed: a known gap
            ports = [place for place in listening(pids) if place not in torch_ports]
            seen = seen_by_nobody(run.directory, pids, [run.directory / name for name in HOLDERS], ports)
            command.send(signal.SIGINT)
            assert await command.end() == 130
        refused = [said for said in seen.ports.values() if "Authorization Violation" in said or " 401 " in said]
        others = {place: said for place, said in seen.ports.items() if said not in refused}
        assert len(refused) == 3  # bus, engine, router
        assert [place.partition(":")[0] for place in others] == [METRICS_HOST]  # numbers of the router: a known gap
        assert all("smg_router_" in said for said in others.values())
        assert seen.files == seen.readable == seen.environments == []
        for secret in (password, key):
            assert secret not in str(seen)
            assert secret not in run.output.read_text()
            assert files_with(secret, dumps) == []
        assert files_with(password, run.directory) == HOLDERS
        holders = files_with(key, run.directory)  # the store of the KV
        assert all(name.startswith("nats/jetstream/") for name in holders), holders


@pytest.mark.slow
def test_the_password_of_a_run_stands_in_files_of_its_owner_alone_and_stays(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    with started(run_dir, ["1"]) as command:
        assert command.end() == 0
    password = password_of(run_dir)
    assert len(password) >= 32
    assert files_with(password, run_dir) == HOLDERS
    for name in HOLDERS:
        assert (run_dir / name).stat().st_mode & 0o777 == 0o600
    assert run_dir.stat().st_mode & 0o777 == 0o700
    assert password not in "\n".join(command.lines)
    with started(run_dir, ["2"], more=("--set", "train.num_steps=400")) as again:
        assert again.end() == 0
    assert password_of(run_dir) == password
    with started(run_dir, ["1"], more=("--fresh", "r")) as fresh:
        assert fresh.end() == 0
    assert password_of(run_dir) != password


@pytest.mark.slow
def test_commands_find_the_bus_by_the_runs_name(tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"
    with started(tmp_path / "r", ["2", "--wait", str(go_on)]) as command:
        command.until("step   2/")
        ledger = [sys.executable, str(ROOT / "bin" / "physarum.py"), "ledger", str(tmp_path / "r")]
        done = subprocess.run(ledger, capture_output=True, text=True, timeout=200, check=False)
        go_on.touch()
        assert command.end() == 0
    assert done.returncode == 0, done.stderr
    assert "2 trained" in done.stdout or "trained" in done.stdout
    assert password_of(tmp_path / "r") not in done.stdout + done.stderr


def login_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def overriding(tmp_path: Path, **bus: str) -> list[str]:
    """Settings of the bus in a file that includes the laptop topology, as a person would write them."""
    lines = "\n".join(f'{key} = "{value}"' for key, value in bus.items())
    if not (tmp_path / "demo").exists():
        (tmp_path / "demo").symlink_to(TOPOLOGY.parent / "demo")  # which the recipe names relative to the topology
    file = login_file(tmp_path / "mine.toml", f'include = "{TOPOLOGY}"\n[bus]\n{lines}\n')
    return [str(file), *arguments_of(tmp_path / "runs" / "r")[1:]]


async def outcome_of(arguments: list[str], *players: list[str]) -> tuple[int, str]:
    """A start with players: exit code and everything that was said."""
    driver = [sys.executable, str(ROOT / "tests" / "bin" / "driver.py"), *arguments]
    with anyio.fail_after(200):
        done = await anyio.run_process(
            driver, check=False, cwd=ROOT, env=environment(*players), stderr=subprocess.STDOUT
        )
    return done.returncode, done.stdout.decode()


SLOW = [pytest.param(how, marks=pytest.mark.slow) for how in ("url on the command line", "token")]
SLOW += [pytest.param("url in a file", marks=pytest.mark.nightly)]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["credentials", *SLOW])
async def test_no_login_of_a_bus_is_shown_or_stored(tmp_path: Path, how: str) -> None:
    user = None if how == "token" else "me"
    login = Login(user=user, password=Secret(MARK))
    async with running_server(tmp_path / "server", ServerSettings(store_dir=tmp_path / "store", login=login)) as server:
        full, bare = server.url, server.ports.url
        if how == "credentials":
            login_file(tmp_path / "login.toml", f'user = "me"\npassword = "{MARK}"\n')
            arguments = overriding(tmp_path, url=bare, credentials="login.toml")
        elif how == "token":
            login_file(tmp_path / "login.toml", f'token = "{MARK}"\n')
            arguments = overriding(tmp_path, url=bare, credentials="login.toml")
        elif how == "url in a file":
            arguments = overriding(tmp_path, url=full)
        else:
            arguments = [*arguments_of(tmp_path / "runs" / "r"), "--set", f"bus.url={full}"]
        told = [await outcome_of([*arguments, *more], ["3"]) for more in (["--plan"], ["--check"], [])]
        told.append(await outcome_of([*arguments, "--fresh", "r"], ["0", "--then", "crash"]))
    told.append(await outcome_of(arguments, ["1"]))  # there is no server any more
    assert [code for code, _ in told] == [0, 0, 0, 1, 2], told
    text = "\n".join(text for _, text in told)
    assert MARK not in text
    assert bare.removeprefix("nats://") in text
    assert "again     " in text
    assert "continue  " in text
    assert files_with(MARK, tmp_path / "runs") == ["r/bus.url"]
    assert (tmp_path / "runs" / "r" / "bus.url").stat().st_mode & 0o777 == 0o600


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What --check says of wrong input."""
    assert main([*arguments, "--check"]) == 2
    said = capsys.readouterr()
    return said.out + said.err


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        (f'user = "me"\npassword = "{MARK}"\n', 0o640, "others may read it (mode 640): chmod 600"),
        (f'user = "me"\npasword = "{MARK}"\n', 0o600, 'expected user = "..." and password = "..."'),
        (f"{MARK}\n", 0o600, 'expected user = "..." and password = "..."'),
        (f"-----BEGIN NATS USER JWT-----\n{MARK}", 0o600, "or a NATS credentials file"),
    ],
)
def test_a_credentials_file_that_cannot_be_used_is_an_error_that_shows_nothing_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, mode: int, why: str
) -> None:
    login_file(tmp_path / "login.toml", text, mode)
    said = refused(capsys, *overriding(tmp_path, url="nats://a:1", credentials="login.toml"))
    assert "bus.credentials = " in said
    assert why in said
    assert MARK not in said


@pytest.mark.parametrize(
    ("bus", "why"),
    [
        ({"url": f"nats://me:{MARK}@a:1", "credentials": "login.toml"}, "give only one of them"),
        ({"url": f"http://me:{MARK}@a:1"}, "allowed: "),
        ({"url": f"me:{MARK}@a:1"}, "allowed: "),
        ({"url": f"nats://me:{MARK}@a:1,nats://you:{MARK}@b:1"}, "different logins: nats://a:1,nats://b:1"),
        ({"url": f"nats://me:{MARK}@a:1", "port": "1"}, "bus.port"),
        ({"credentials": "login.toml"}, "has no effect without bus.url"),
    ],
)
def test_errors_about_the_bus_show_no_login(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bus: dict[str, str], why: str
) -> None:
    login_file(tmp_path / "login.toml", f'token = "{MARK}"\n')
    said = refused(capsys, *overriding(tmp_path, **bus))
    assert why in said
    assert MARK not in said


def test_an_override_that_fits_nowhere_shows_no_login(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = with_login("nats://a:1", Login(user="me", password=Secret(MARK)))
    said = refused(capsys, *arguments_of(tmp_path / "r"), "--set", f"bus.urls={url}")
    assert "bus.urls=nats://***@a:1" in said
    assert MARK not in said
