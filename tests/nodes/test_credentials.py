"""A run on one node that listens for external clients of other machines."""

import stat
import sys
from pathlib import Path

import pytest

from runtime.bus.credential import read_credential
from tests.support.machines.lan import ROOT, machines
from tests.support.machines.machine import Machine

pytestmark = [pytest.mark.nodes]

ALONE = """
include = "{laptop}"
run = {{ name = "alone", dir = "{directory}" }}
train.num_steps = 1000
nodes.local = {{ address = "eth0", gpus = 0 }}
"""


def credentials(machine: Machine, *arguments: str) -> str:
    """Call bin/credentials on a machine that runs no process of the run, so that the directory needs trust."""
    command = [sys.executable, "-P", str(ROOT / "bin" / "physarum.py"), "credentials", *arguments, "--trust"]
    lines = machine.run(command, timeout_s=60).splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("--trust: "))


def test_credentials_are_given_and_revoked_on_another_machine_than_the_server(tmp_path: Path) -> None:
    with machines(shared=[tmp_path]) as lan:
        home, other = lan.add("n0"), lan.add("n1", clock=7200.0)
        file = tmp_path / "alone.toml"
        file.write_text(ALONE.format(directory=tmp_path, laptop=ROOT / "topologies" / "laptop.toml"))
        daemon = home.start(
            [sys.executable, "-P", str(ROOT / "bin" / "physarum.py"), "start-topology", str(file)], cwd=tmp_path
        )
        daemon.wait_for("| weights v1 ", 120)
        run_dir = tmp_path / "alone"
        text = credentials(other, str(run_dir), "viewer", "--name", "bob")
        credential_file = tmp_path / "bob.toml"
        credential_file.touch(stat.S_IRUSR | stat.S_IWUSR)
        credential_file.write_text("".join(line for line in text.splitlines(keepends=True) if " = " in line))
        assert read_credential(credential_file).url == f"tls://{home.address}:4222"
        daemon.wait_for("credential of viewer bob: accepted", 60)
        assert "bob: viewer, valid" in credentials(other, str(run_dir), "--list")
        assert "revoked and cut off" in credentials(other, str(run_dir), "--revoke", "bob")
        daemon.wait_for("credential of viewer bob: revoked", 60)
        places = {(each.address, each.port) for each in home.listening() if "nats-server" in each.process}
        assert places == {(home.address, 4222)}
