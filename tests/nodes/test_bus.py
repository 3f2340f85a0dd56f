"""A nats-server in one machine serves the bus of another machine."""

import sys
from pathlib import Path

import pytest

from tests.support.machines.bus import PORT, start_nats
from tests.support.machines.lan import ROOT, machines

pytestmark = [pytest.mark.nodes]

CLIENT = [sys.executable, "-P", str(Path(__file__).with_name("programs") / "bus_client.py")]


@pytest.mark.parametrize("six", [False, True], ids=["IPv4", "IPv6"])
def test_a_message_is_published_from_another_machine(six: bool) -> None:
    with machines("n0", "n1") as lan:
        process, url = start_nats(lan["n0"], six=six)
        assert "group 7\n" in lan["n1"].run([*CLIENT, url], env={"PYTHONPATH": str(ROOT)})
        [place] = lan["n0"].listening()
        assert (place.address, place.port) == (lan["n0"].address6 if six else lan["n0"].address, PORT)
        assert "nats-server" in place.process
        assert lan["n1"].listening() == []
        process.kill()
        assert process.wait(60) == -9
        _, again = start_nats(lan["n0"], six=six)  # on its store
        assert again == url
        assert "group 7\n" in lan["n1"].run([*CLIENT, url], env={"PYTHONPATH": str(ROOT)})
