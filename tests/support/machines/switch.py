"""An Ethernet switch in user space between TAP devices: delay, jitter, loss, and cut cables.

The kernel's netem is missing on many machines. This switch works the same way on all of them.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

TUNSETIFF, TUNSETVNETHDRSZ, TUNSETOFFLOAD = 0x400454CA, 0x400454D8, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
OFFLOADS: Final = 0x0F  # checksums and TCP segmentation: a frame carries up to 64 KiB
HEADER: Final = 10  # bytes of struct virtio_net_hdr, before the Ethernet header
MULTICAST: Final = 0x01  # bit of the first byte of a MAC address; a broadcast has it too
MAX_FRAME: Final = 1 << 17
BURST: Final = 32  # frames of one card before the others have their turn
MAX_WAITING: Final = 256 << 20


def open_tap(name: str) -> int:
    """Make a TAP device in the network namespace of this process. It lives as long as the descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(fd, TUNSETVNETHDRSZ, struct.pack("i", HEADER))
    fcntl.ioctl(fd, TUNSETOFFLOAD, OFFLOADS)
    return fd


def mac_of(number: int, network: int) -> bytes:
    """MAC address of a machine's card in a network."""
    return bytes([2, 0, 0, 0, network, number])


@dataclass(eq=False)
class Card:
    """One end of a cable: the network card of a machine."""

    fd: int
    machine: str
    network: int  # frames stay in their network
    mac: bytes
    free_at: dict["Card", float] = field(default_factory=lambda: {})  # when the last frame to a card arrives


class Switch:
    """Forwards frames between cards of one network.

    Args:
        max_waiting: bytes on their way; what comes on top is dropped, as by a full switch.
    """

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._cards: list[Card] = []
        self._waiting: list[tuple[float, int, Card, Card, bytes]] = []  # heap: due, number, from, to, frame
        self._numbers = count()  # order of frames that are due at once
        self._num_bytes = 0  # in the heap
        self._cut: set[str] = set()
        self._delay_s = self._jitter_s = self._loss = 0.0
        self._random = random.Random(0)  # the same losses in each run
        self.frames = self.bytes = self.dropped = 0

    def add(self, card: Card) -> None:
        """Plug a card in."""
        self._cards.append(card)
        self._set_offloads(card)

    def remove(self, machine: str) -> None:
        """Remove a machine's cards. Frames on their way to and from it are lost."""
        for card in [card for card in self._cards if card.machine == machine]:
            self._unplug(card)

    def cut(self, machine: str) -> None:
        """Drop all frames from and to a machine, those on their way included."""
        self._cut.add(machine)
        self._drop_waiting({card for card in self._cards if card.machine == machine})

    def heal(self, machine: str) -> None:
        """Forward a machine's frames again."""
        self._cut.discard(machine)

    def delay(self, delay_s: float, jitter_s: float) -> None:
        """Delay each frame by delay_s plus or minus up to jitter_s. Frames between two cards keep their order."""
        self._delay_s, self._jitter_s = delay_s, jitter_s

    def lose(self, share: float) -> None:
        """Drop a share of all frames. Turns offloads off, so that a frame is a packet and not 64 KiB of a stream."""
        self._loss = share
        for card in self._cards:
            self._set_offloads(card)

    @property
    def waiting(self) -> int:
        """Number of frames on their way."""
        return len(self._waiting)

    def step(self, also: Iterable[Any], limit_s: float) -> list[Any]:
        """Forward frames that are ready or due, after waiting for one up to limit_s.

        Args:
            also: other files to wait for.
            limit_s: the longest wait.

        Returns:
            Those of `also` that are ready to be read.
        """
        if self._waiting:
            limit_s = min(limit_s, max(0.0, self._waiting[0][0] - time.monotonic()))
        cards = {card.fd: card for card in self._cards}
        others = list(also)
        ready, _, _ = select.select([*cards, *others], [], [], limit_s)  # epoll's timeout is in whole milliseconds
        for fd in ready:
            if fd in cards:
                self._receive(cards[fd])
        self._send_due()
        return [file for file in others if file in ready]

    def _receive(self, card: Card) -> None:
        for _ in range(BURST):
            try:
                frame = os.read(card.fd, MAX_FRAME)
            except BlockingIOError:
                return
            except OSError:  # the machine has ended, and its devices with it
                self._unplug(card)
                return
            self._forward(card, frame)

    def _forward(self, source: Card, frame: bytes) -> None:
        mac = frame[HEADER : HEADER + 6]
        for card in self._cards:
            is_for_it = mac[0] & MULTICAST or mac == card.mac
            if card is source or card.network != source.network or not is_for_it:
                continue
            if self._is_cut(source, card) or (self._loss and self._random.random() < self._loss):
                self.dropped += 1
            elif self._delay_s or self._jitter_s or self._waiting:
                self._enqueue(source, card, frame)
            else:
                self._send(card, frame)

    def _enqueue(self, source: Card, card: Card, frame: bytes) -> None:
        if self._num_bytes + len(frame) > self._max_waiting:
            self.dropped += 1
            return
        delay_s = self._delay_s + self._jitter_s * self._random.uniform(-1, 1)
        due = max(time.monotonic() + max(0.0, delay_s), source.free_at.get(card, 0.0))
        source.free_at[card] = due
        self._num_bytes += len(frame)
        heapq.heappush(self._waiting, (due, next(self._numbers), source, card, frame))

    def _send_due(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, _, card, frame = heapq.heappop(self._waiting)
            self._num_bytes -= len(frame)
            self._send(card, frame)

    def _send(self, card: Card, frame: bytes) -> None:
        try:
            os.write(card.fd, frame)
        except OSError:  # the card is down, or its machine has ended
            self.dropped += 1
        else:
            self.frames += 1
            self.bytes += len(frame) - HEADER

    def _is_cut(self, source: Card, card: Card) -> bool:
        return source.machine in self._cut or card.machine in self._cut

    def _set_offloads(self, card: Card) -> None:
        with suppress(OSError):  # its machine has ended
            fcntl.ioctl(card.fd, TUNSETOFFLOAD, 0 if self._loss else OFFLOADS)

    def _unplug(self, card: Card) -> None:
        if card in self._cards:
            self._cards.remove(card)
            os.close(card.fd)
            self._drop_waiting({card})

    def _drop_waiting(self, cards: set[Card]) -> None:
        kept = [item for item in self._waiting if not cards & {item[2], item[3]}]
        self.dropped += len(self._waiting) - len(kept)
        self._waiting = kept
        heapq.heapify(kept)
        self._num_bytes = sum(len(item[4]) for item in kept)
