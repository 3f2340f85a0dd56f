"""A run on two machines that share its directory, started with one command on each."""

import json
import re
import stat
from pathlib import Path

import pytest

from tests.nodes.two_machines import RUN_S, check_books, check_learned, finishes, ready_hosts, start, topology
from tests.support.machines.lan import machines
from tests.support.machines.machine import Machine

pytestmark = [pytest.mark.nodes]  # above RUN_S and the starts


def servers(machine: Machine) -> set[str]:
    """Addresses at which a machine listens, beyond itself."""
    return {each.address for each in machine.listening() if not each.address.startswith("127.")}


@pytest.mark.parametrize(
    "six",
    [
        pytest.param(False, id="IPv4", marks=pytest.mark.nightly),  # the other runs of this folder are on it
        pytest.param(True, id="IPv6"),
    ],
)
def test_a_run_on_two_machines_learns_and_its_books_close(tmp_path: Path, six: bool) -> None:
    with machines(shared=[tmp_path]) as lan:
        n0, n1 = lan.add("n0", second_card=True), lan.add("n1", second_card=True, clock=7200.0)
        home, other = (n0.address6, n1.address6) if six else ("eth0", "auto")
        file = topology(tmp_path, home=home, other=other)
        later = start(n1, file, "n1")  # in any order
        later.wait_for("join.toml does not exist yet", 60)
        first = start(n0, file, "local")
        later.wait_for("node n1 joins run two", 90)
        join = tmp_path / "two" / "join.toml"
        assert stat.S_IMODE(join.stat().st_mode) == 0o600
        first.wait_for("node n1 joined: process", 60)
        first.wait_for("step  2/", 120)
        own = (n0.address6, n1.address6) if six else (n0.address, n1.address)
        for machine, address in ((n0, own[0]), (n1, own[1])):
            found = servers(machine)
            assert address in found
            assert found <= {address, machine.address}  # gloo takes the IPv4 address of the interface
        finishes(first, later)
        took = re.search(r"first rollout after (-?[\d.]+) s", later.output())
        assert took is not None, later.output()
        assert 0 <= float(took[1]) < RUN_S, later.output()  # by its own clock
        again = start(n1, file, "n1")  # as a job system does with a job that ended
        assert again.wait(60) == 0, again.output()
        assert "run two is finished" in again.output()
    run_dir = tmp_path / "two"
    assert ready_hosts(run_dir) == {f"local {own[0]}", f"n1 {own[1]}"}
    check_books(run_dir, 20)
    check_learned(run_dir)
    assert sorted(path.name for path in run_dir.glob("incarnation*")) == ["incarnation-local", "incarnation-n1"]
    assert "engine.policy.0.jsonl" in {path.name for path in (run_dir / "logs" / "n1").iterdir()}
    assert "engine.policy.1.jsonl" in {path.name for path in (run_dir / "logs" / "local").iterdir()}
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(21))


@pytest.mark.nightly
def test_addresses_are_dns_names_where_each_machine_resolves_its_own_name_to_loopback(tmp_path: Path) -> None:
    """Debian's /etc/hosts has the machine's own name at 127.0.1.1, which gloo and SGLang would announce."""
    with machines(shared=[tmp_path]) as lan:
        names = ["10.77.0.10 n0.run.test", "10.77.0.11 n1.run.test"]
        n0 = lan.add("n0", hosts=[*names, "127.0.1.1 n0"])
        n1 = lan.add("n1", hosts=[*names, "127.0.1.1 n1"])
        file = topology(tmp_path, home="n0.run.test", other="n1.run.test", steps=5)
        first, later = start(n0, file, "local"), start(n1, file, "n1")
        finishes(first, later)
    assert ready_hosts(tmp_path / "two") == {"local 10.77.0.10", "n1 10.77.0.11"}
