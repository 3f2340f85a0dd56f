"""bin/credentials on a run with a real daemon and server; as a person calls it where a run goes on."""

import json
import stat
import subprocess
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from bin.credentials import main
from runtime.bus.credential import read_credential
from runtime.bus.nats.server import accepts_login
from runtime.util.secrets import with_login
from tests.runtime.node.test_external_clients import running
from tests.support.commands import called

ROOT = Path(__file__).parents[2]
COMMAND = ROOT / "bin" / "physarum.py"
GRADER = ("grader", "--name", "alice", "--grader", "math")


def credentials(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(COMMAND), "credentials", str(run_dir), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


def describe(run_dir: Path, address: str | None = "10.0.0.1", **bus: str) -> Path:
    """The part of a stored topology that the command reads."""
    run_dir.mkdir(exist_ok=True)
    nodes = {"local": {} if address is None else {"address": address}}
    (run_dir / "topology.json").write_text(json.dumps({"run": {"name": "r"}, "nodes": nodes, "bus": bus}))
    return run_dir


async def accepted(file: Path) -> bool:
    credential = read_credential(file)
    url = with_login(credential.url, credential.login)
    return await accepts_login(url, credential.inbox, credential.certificate)


@pytest.mark.anyio
@pytest.mark.slow
async def test_a_credential_is_given_listed_and_revoked_while_the_run_goes_on(tmp_path: Path) -> None:
    run_dir, file = describe(tmp_path / "r"), tmp_path / "alice.toml"
    call = partial(anyio.to_thread.run_sync, credentials, run_dir)
    async with running(run_dir):
        command = [sys.executable, "-P", str(COMMAND), "credentials", str(run_dir), *GRADER]
        with file.open("w") as output:
            given = await anyio.run_process(command, stdout=output, check=False)
        assert (given.returncode, given.stderr) == (0, b"alice: accepted\n")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert await accepted(file)
        credential = read_credential(file)
        assert (credential.kind, credential.grader, credential.durable) == ("grader", "math", "score-math")
        assert 6.9 < (credential.expires - datetime.now(UTC)).total_seconds() / 86400 <= 7
        viewer = await anyio.to_thread.run_sync(credentials, run_dir, "viewer", "--name", "bob", "--days", "0.5")
        assert viewer.returncode == 0
        assert 'history = "$JS.API.DIRECT.GET.phy-r-event"' in viewer.stdout.splitlines()
        taken = await anyio.to_thread.run_sync(credentials, run_dir, *GRADER)
        assert (taken.returncode, taken.stdout) == (2, "")
        assert taken.stderr.startswith("--name alice: a grader has this name until ")
        revoked = await anyio.to_thread.run_sync(credentials, run_dir, "--revoke", "alice")
        assert (revoked.returncode, revoked.stderr) == (0, "alice: revoked and cut off\n")
        assert not await accepted(file)
        listed = await call("--list")
    until = f", until {credential.expires:%Y-%m-%d %H:%M} UTC"
    assert listed.stdout.splitlines()[-1] == f"alice: grader math, revoked{until}"
    assert listed.stdout.splitlines()[0].startswith("bob: viewer, valid, until ")
    later = await call("viewer", "--name", "carol")
    assert later.stderr.splitlines() == ["carol: no node daemon runs r now; this applies from its next start on"]


@pytest.mark.parametrize(
    ("address", "bus", "arguments", "problem"),
    [
        (None, {}, GRADER, "accepts no external clients: set nodes.local.address"),
        ("127.0.0.1", {}, GRADER, "accepts no external clients: set nodes.local.address"),
        ("10.0.0.1", {}, GRADER, "has not started with an address yet"),
        ("10.0.0.1", {"url": "nats://u:geheim@h:4222"}, GRADER, "uses the NATS server at nats://***@h:4222 (bus.url)"),
        ("10.0.0.1", {}, ("--revoke", "carol"), "no external client has this name; there are: none"),
        ("10.0.0.1", {}, ("grader", "--name", "alice"), "a grader needs --name and --grader"),
        ("10.0.0.1", {}, ("viewer", "--name", "b", "--grader", "math"), "a grader needs --name and --grader"),
        ("10.0.0.1", {}, (), "one of grader, viewer, auditor, --list and --revoke is needed"),
        ("10.0.0.1", {}, (*GRADER, "--days", "0"), "'0' is not a number above 0"),
        ("10.0.0.1", {}, (*GRADER, "--days", "nan"), "'nan' is not a number above 0"),
    ],
)
def test_what_cannot_be_given_is_wrong_input(
    tmp_path: Path, address: str | None, bus: dict[str, str], arguments: tuple[str, ...], problem: str
) -> None:
    done = called(main, describe(tmp_path / "r", address, **bus), *arguments, "--trust")
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr
    assert not (tmp_path / "r" / "bus" / "clients.json").exists()


@pytest.mark.anyio
async def test_a_grader_that_the_topology_does_not_name_is_refused_with_the_list(tmp_path: Path) -> None:
    run_dir = describe(tmp_path / "r")
    async with running(run_dir):
        pass
    done = credentials(run_dir, "grader", "--name", "alice", "--grader", "poems")
    assert done.returncode == 2
    assert done.stderr.endswith("--grader poems: the topology of the run names no such grader; allowed: math, code\n")


def test_a_directory_that_may_be_a_strangers_gets_no_credential(tmp_path: Path) -> None:
    run_dir = describe(tmp_path / "r")
    for arguments in (GRADER, ("--list",), ("--revoke", "alice")):
        done = called(main, run_dir, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"{run_dir} may be a stranger's: ")
        assert "addresses (nodes.local.address)" in done.stderr
    assert not (run_dir / "bus").exists()
