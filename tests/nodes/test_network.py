"""The network of the machines delays, loses and cuts frames as a test says, and changes none."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machines.lan import Lan, machines
from tests.support.machines.machine import Machine, Process

pytestmark = [pytest.mark.nodes]

TALK = [sys.executable, "-I", "-S", str(Path(__file__).with_name("programs") / "talk.py")]
PORT = 7000
TEN_MB = 10_000_000


@pytest.fixture
def lan() -> Iterator[Lan]:
    with machines("n0", "n1", "n2") as lan:
        yield lan


def serving(machine: Machine, address: str | None = None) -> Process:
    process = machine.start([*TALK, "serve", address or machine.address, str(PORT)])
    process.wait_for("ready", 60)
    return process


def talk(machine: Machine, kind: str, address: str, number: int) -> str:
    return machine.run([*TALK, kind, address, str(PORT), str(number)]).strip()


def round_trips_ms(machine: Machine, address: str, count: int) -> list[float]:
    return json.loads(talk(machine, "round-trips", address, count).splitlines()[-1])


def test_each_frame_is_delayed_by_what_the_test_says(lan: Lan) -> None:
    serving(lan["n1"])
    undelayed = round_trips_ms(lan["n0"], lan["n1"].address, 50)
    lan.delay(25)
    delayed = round_trips_ms(lan["n0"], lan["n1"].address, 10)
    lan.delay(25, jitter_ms=10)
    varying = round_trips_ms(lan["n0"], lan["n1"].address, 30)
    lan.delay(0)
    again = round_trips_ms(lan["n0"], lan["n1"].address, 50)
    assert min(undelayed) < 25
    assert min(delayed) >= 50
    assert min(varying) >= 30
    assert max(varying) - min(varying) > 5
    assert min(again) < 25


def test_a_connection_survives_a_cut_and_nothing_passes_meanwhile(lan: Lan) -> None:
    serving(lan["n1"])
    serving(lan["n2"])
    client = lan["n0"].start([*TALK, "lines", lan["n1"].address, str(PORT), "200"])
    client.wait_for("line 5\n", 60)
    lan.cut("n1")
    at_the_cut = client.output()
    others = round_trips_ms(lan["n0"], lan["n2"].address, 20)
    during = client.output()
    assert len(others) == 20
    assert len(during.splitlines()) - len(at_the_cut.splitlines()) <= 1  # an answer that had arrived
    lan.heal("n1")
    assert client.wait(40) == 0
    assert client.output().splitlines() == [f"line {number}" for number in range(200)]


def test_frames_on_their_way_are_lost_in_a_cut(lan: Lan) -> None:
    serving(lan["n1"])
    round_trips_ms(lan["n0"], lan["n1"].address, 1)  # the neighbours know each other
    lan.delay(60_000)
    client = lan["n0"].start([*TALK, "round-trips", lan["n1"].address, str(PORT), "1"])
    client.wait_for("sent", 60)
    assert lan.stats()["waiting"] > 0  # the switch reads all frames before it answers
    dropped = lan.stats()["dropped"]
    lan.cut("n1")
    lan.heal("n1")
    lan.delay(0)
    assert lan.stats()["dropped"] > dropped
    assert client.output() == "sent\n"
    client.kill()


def test_a_share_of_packets_is_lost_and_streams_get_through(lan: Lan) -> None:
    serving(lan["n1"])
    round_trips_ms(lan["n0"], lan["n1"].address, 1)  # the neighbours know each other
    lan.loss(0.2)
    assert 350 < int(talk(lan["n0"], "send", lan["n1"].address, 500)) < 450
    lan.loss(0.02)
    dropped = lan.stats()["dropped"]
    assert talk(lan["n0"], "stream", lan["n1"].address, 1_000_000) == "True"
    assert lan.stats()["dropped"] - dropped > 2  # of some 1,000 packets: frames are packets, offloads are off
    lan.loss(0)
    assert int(talk(lan["n0"], "send", lan["n1"].address, 500)) == 500


@pytest.mark.parametrize("six", [False, True], ids=["IPv4", "IPv6"])
def test_ten_megabytes_arrive_unchanged(lan: Lan, six: bool) -> None:
    address = lan["n1"].address6 if six else lan["n1"].address
    serving(lan["n1"], address)
    assert talk(lan["n0"], "stream", address, TEN_MB) == "True"
    assert talk(lan["n0"], "datagrams", address, TEN_MB // 8000) == str(TEN_MB // 8000)
    lan.delay(2, jitter_ms=2)  # through the queue of frames
    assert talk(lan["n0"], "stream", address, TEN_MB) == "True"


def test_a_second_card_is_on_a_network_of_its_own() -> None:
    with machines("n0", "n1", "n2", second_card=["n0", "n1"]) as lan:
        first, second = lan["n1"].addresses
        serving(lan["n1"], first)
        assert len(round_trips_ms(lan["n2"], first, 3)) == 3
        assert talk_refused(lan["n0"], second)  # nothing listens on the second card
        serving(lan["n1"], second)
        assert len(round_trips_ms(lan["n0"], second, 3)) == 3
        assert {place.address for place in lan["n1"].listening()} == {first, second}


def talk_refused(machine: Machine, address: str) -> bool:
    process = machine.start([*TALK, "stream", address, str(PORT), "1"])
    return process.wait(60) != 0 and "ConnectionRefusedError" in process.output()


def test_no_frame_leaves_the_machines(lan: Lan) -> None:
    cards = lan["n0"].run(["ip", "-oneline", "link"]).splitlines()
    assert [line.split(": ")[1] for line in cards] == ["lo", "eth0"]
    outside = lan["n0"].start([*TALK, "stream", "192.0.2.1", "80", "1"])
    assert outside.wait(40) != 0
    assert "No route to host" in outside.output()


def test_a_new_machine_takes_over_the_address_of_one_that_is_gone(lan: Lan) -> None:
    serving(lan["n1"])
    before = lan["n1"].address
    assert len(round_trips_ms(lan["n0"], before, 3)) == 3
    lan["n1"].unplug()
    spare = lan.add("spare", address_of="n1", hostname="n1")
    assert spare.address == before
    serving(spare)
    assert len(round_trips_ms(lan["n0"], before, 3)) == 3


def test_an_old_machine_may_come_back_beside_its_replacement(lan: Lan) -> None:
    serving(lan["n1"])
    lan.cut("n1")
    spare = lan.add("spare", address_of="n1")
    serving(spare)
    assert len(round_trips_ms(lan["n0"], spare.address, 3)) == 3
    lan.heal("n1")
    assert lan["n1"].run(["hostname"]).strip() == "n1"
