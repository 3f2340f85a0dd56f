"""The switch forwards frames to the right cards, in order, and no sooner than it should.

The cables are sockets here.
"""

import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.machines.switch import HEADER, Card, Switch, mac_of

BROADCAST = b"\xff" * 6
STEP_S = 0.01


class Cables:
    """A switch with cards, each the end of a socket."""

    def __init__(self, switch: Switch, stack: ExitStack) -> None:
        self.switch = switch
        self._stack = stack
        self._ends: dict[tuple[str, int], socket.socket] = {}

    def plug(self, machine: str, number: int, network: int = 0) -> None:
        inner, outer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for end in (inner, outer):
            end.setblocking(False)
        self._ends[machine, network] = self._stack.enter_context(outer)
        self.switch.add(Card(inner.detach(), machine, network, mac_of(number, network)))

    def send(self, machine: str, to: bytes, text: str, network: int = 0) -> None:
        self._ends[machine, network].send(bytes(HEADER) + to + text.encode())

    def received(self, machine: str, network: int = 0) -> list[str]:
        """All that has arrived."""
        found: list[str] = []
        while True:
            try:
                found.append(self._ends[machine, network].recv(1 << 16)[HEADER + 6 :].decode())
            except BlockingIOError:
                return found

    def settle(self) -> None:
        """Forward until nothing is ready or on its way."""
        frames = -1
        while self.switch.waiting or frames != self.switch.frames + self.switch.dropped:
            frames = self.switch.frames + self.switch.dropped
            self.switch.step([], STEP_S)


@pytest.fixture
def cables() -> Iterator[Cables]:
    with ExitStack() as stack:
        cables = Cables(Switch(), stack)
        for number, name in enumerate(("n0", "n1", "n2")):
            cables.plug(name, number)
        yield cables
        for name in ("n0", "n1", "n2"):
            cables.switch.remove(name)


def test_a_frame_goes_to_its_card_and_a_broadcast_to_all_others(cables: Cables) -> None:
    cables.send("n0", mac_of(2, 0), "to n2")
    cables.send("n0", mac_of(9, 0), "to a card that is not there")
    cables.send("n1", BROADCAST, "to all")
    cables.settle()
    assert cables.received("n0") == ["to all"]
    assert cables.received("n1") == []
    assert sorted(cables.received("n2")) == ["to all", "to n2"]


def test_no_frame_changes_its_network(cables: Cables) -> None:
    cables.plug("n0", 0, network=1)
    cables.plug("n1", 1, network=1)
    cables.send("n0", BROADCAST, "on the second", network=1)
    cables.send("n0", mac_of(1, 1), "a card of the second, on the first")
    cables.settle()
    assert cables.received("n1", network=1) == ["on the second"]
    assert cables.received("n1") + cables.received("n2") == []


def test_a_delay_is_a_lower_bound(cables: Cables) -> None:
    cables.switch.delay(0.1, 0.0)
    sent = time.monotonic()
    cables.send("n0", mac_of(1, 0), "late")
    while not (received := cables.received("n1")):
        cables.switch.step([], 1.0)
    assert received == ["late"]
    assert time.monotonic() - sent >= 0.1


def test_jitter_keeps_the_order_between_two_cards(cables: Cables) -> None:
    cables.switch.delay(0.01, 0.01)
    texts = [str(number) for number in range(200)]
    for text in texts:
        cables.send("n0", mac_of(1, 0), text)
        cables.switch.step([], 0)
    cables.switch.delay(0.0, 0.0)
    cables.send("n0", mac_of(1, 0), "without a delay")
    cables.settle()
    assert cables.received("n1") == [*texts, "without a delay"]


def test_a_cut_drops_what_is_on_its_way_and_what_comes(cables: Cables) -> None:
    cables.switch.delay(0.05, 0.0)
    cables.send("n0", mac_of(1, 0), "before")
    cables.send("n0", mac_of(2, 0), "to another")
    while cables.switch.waiting < 2:
        cables.switch.step([], STEP_S)
    cables.switch.cut("n1")
    assert cables.switch.waiting == 1
    for source, to in (("n0", 1), ("n1", 0), ("n1", 2)):
        cables.send(source, mac_of(to, 0), "meanwhile")
    cables.settle()
    cables.switch.heal("n1")
    cables.send("n0", mac_of(1, 0), "after")
    cables.settle()
    assert (cables.received("n0"), cables.received("n1"), cables.received("n2")) == ([], ["after"], ["to another"])
    assert cables.switch.dropped == 4


def test_a_share_of_frames_is_lost(cables: Cables) -> None:
    cables.switch.lose(0.25)
    received: list[str] = []
    for number in range(1000):
        cables.send("n0", mac_of(1, 0), str(number))
        cables.switch.step([], STEP_S)
        received += cables.received("n1")
    assert 680 < len(received) < 820  # 5 standard deviations: sqrt(1000 * 0.25 * 0.75) = 13.7
    assert received == sorted(received, key=int)
    assert len(received) + cables.switch.dropped == 1000


def test_a_full_switch_drops_the_newest_frames() -> None:
    with ExitStack() as stack:
        cables = Cables(Switch(max_waiting=1000), stack)
        cables.plug("n0", 0)
        cables.plug("n1", 1)
        cables.switch.delay(0.05, 0.0)
        size = 250 - HEADER - 6
        for letter in "abcdef":
            cables.send("n0", mac_of(1, 0), letter * size)
        while cables.switch.waiting + cables.switch.dropped < 6:
            cables.switch.step([], 0)
        cables.settle()
        assert [text[0] for text in cables.received("n1")] == list("abcd")
        assert cables.switch.dropped == 2
        for name in ("n0", "n1"):
            cables.switch.remove(name)


def test_a_card_that_fails_is_removed(cables: Cables) -> None:
    broken = os.open(os.devnull, os.O_WRONLY)  # always ready, and reading it fails
    cables.switch.add(Card(broken, "broken", 0, mac_of(7, 0)))
    cables.switch.step([], STEP_S)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(broken)
    payload = str(random.Random(3).random())
    cables.send("n0", mac_of(1, 0), payload)
    cables.settle()
    assert cables.received("n1") == [payload]


def test_a_wait_ends_when_another_file_is_ready(cables: Cables) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert cables.switch.step([ours], 0) == []
        theirs.send(b"x")
        assert cables.switch.step([ours], 60) == [ours]
