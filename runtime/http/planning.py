"""Chooses which piece of a fetch to ask of which node. No clock, connection or thread: the caller passes the time.

Nodes that fetch the same files divide the pieces between them without a message: each piece has one owner among the
nodes. A node asks home for the pieces that it owns, and its peers for those that they say they have. It asks home for
other pieces last: for those of nodes that do not fetch, and of nodes whose fetch makes no progress.
"""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Flags = NDArray[np.bool_]

HOME: Final = ""  # in place of a peer's name
AT_HOME: Final = 2  # requests to home at a time, while peers have pieces
STILL_S: Final = 2.0  # a peer whose pieces have not changed for so long owns none
STILL_PIECES: Final = 3.0  # the same, in times that a piece took from home at most
OWNED_KEPT: Final = 4  # sets of nodes; two are in use at a time, and change seldom
GOLDEN: Final = 0x9E3779B97F4A7C15  # constants of the finalizer of SplitMix64
FIRST: Final = 0xBF58476D1CE4E5B9
SECOND: Final = 0x94D049BB133111EB


class Request(NamedTuple):
    """A piece, and the node to ask for it."""

    piece: int
    peer: str  # or HOME


@dataclass
class _Peer:
    """A peer that fetches the same files, or has them."""

    held_P: Flags
    changed_s: float  # when it had another piece last
    num_asked: int = 0  # requests to it on their way


def owners(nodes: Sequence[str], sums: Sequence[str]) -> NDArray[np.int64]:
    """Return the owner of each piece, as an index of `nodes`: the node whose hash with the piece's sum is greatest.

    A node that comes or leaves moves only its own pieces (rendezvous hashing).

    Args:
        nodes: names of nodes.
        sums: sha256 of each piece, in hexadecimal digits.
    """
    seeds_N = np.array([int.from_bytes(hashlib.sha256(each.encode()).digest()[:8]) for each in nodes], dtype=np.uint64)
    sums_P = np.array([int(each[:16], 16) for each in sums], dtype=np.uint64)
    mixed_PN = (sums_P[:, None] ^ seeds_N[None, :]) + np.uint64(GOLDEN)
    mixed_PN = (mixed_PN ^ (mixed_PN >> np.uint64(30))) * np.uint64(FIRST)
    mixed_PN = (mixed_PN ^ (mixed_PN >> np.uint64(27))) * np.uint64(SECOND)
    return (mixed_PN ^ (mixed_PN >> np.uint64(31))).argmax(axis=1)


class Plan:
    """Pieces of one fetch: those that are here, on their way and missing, and what the peers have of them.

    Args:
        sums: sha256 of each piece, in hexadecimal digits.
        has_P: the pieces that are here already.
        node: name of this node.
        random: chooses between pieces.
    """

    def __init__(self, sums: Sequence[str], has_P: Flags, node: str, random: Random) -> None:
        self.has_P = has_P
        self._asked_P = np.zeros_like(has_P)
        self._sums = sums
        self._node = node
        self._random = random
        self._peers: dict[str, _Peer] = {}
        self._at_home = 0
        self._slowest_s = 0.0  # of the pieces that home sent
        self._owned: dict[frozenset[str], Flags] = {}  # the pieces that this node owns, by all nodes

    @property
    def is_complete(self) -> bool:
        """Whether every piece is here."""
        return bool(self.has_P.all())

    @property
    def first_missing(self) -> int:
        """The first piece that is not here."""
        return int(self.has_P.argmin())

    def note_held(self, peer: str, held_P: Flags | None, now_s: float) -> None:
        """Note which pieces a peer says that it has. None: it does not fetch these files."""
        known = self._peers.get(peer)
        if held_P is None:
            self._peers.pop(peer, None)
        elif known is None:
            self._peers[peer] = _Peer(held_P, now_s)
        else:
            known.changed_s = now_s if (held_P & ~known.held_P).any() else known.changed_s
            known.held_P = held_P

    def needs(self, peer: str) -> bool:
        """Whether news of a peer's pieces may help."""
        known = self._peers.get(peer)
        return known is None or not known.held_P.all()

    def choose(self, now_s: float, able: Collection[str], ready: Collection[str]) -> Request | None:
        """Return the next request. None: wait for a piece on its way, or until a peer has another one.

        Args:
            now_s: the time in seconds.
            able: peers that can be reached; one of them may be busy.
            ready: nodes that may be asked now, HOME among them.
        """
        todo_P = ~(self.has_P | self._asked_P)
        if not todo_P.any():
            return None
        peers = {name: self._peers[name] for name in able if name in self._peers}
        elsewhere_P = todo_P & ~_any_of(peers.values(), todo_P)
        at_peers_P = todo_P & _any_of((each for name, each in peers.items() if name in ready), todo_P)
        own_P = elsewhere_P & self._owned_among(able)
        if HOME in ready and own_P.any() and (self._at_home < AT_HOME or not at_peers_P.any()):
            return self._request(own_P, HOME)
        if at_peers_P.any():
            piece = self._one_of(at_peers_P)
            holders = [name for name, each in peers.items() if name in ready and each.held_P[piece]]
            fewest = min(peers[name].num_asked for name in holders)
            return self._ask(piece, self._random.choice([n for n in holders if peers[n].num_asked == fewest]))
        limit_s = max(STILL_S, STILL_PIECES * self._slowest_s)
        moving = [name for name, each in peers.items() if now_s - each.changed_s <= limit_s]
        last_P = elsewhere_P & self._owned_among(moving)
        return self._request(last_P, HOME) if HOME in ready and last_P.any() else None

    def note_got(self, request: Request, took_s: float) -> None:
        """Note that a piece came and is stored."""
        self._end(request)
        self.has_P[request.piece] = True
        if request.peer == HOME:
            self._slowest_s = max(self._slowest_s, took_s)

    def note_failed(self, request: Request) -> None:
        """Note that a piece did not come. What the peer said of it counts no more, until it says so again."""
        self._end(request)
        if (peer := self._peers.get(request.peer)) is not None:
            peer.held_P = peer.held_P.copy()
            peer.held_P[request.piece] = False

    def _owned_among(self, peers: Collection[str]) -> Flags:
        nodes = frozenset((self._node, *peers))
        if nodes not in self._owned:
            if len(self._owned) >= OWNED_KEPT:
                self._owned.clear()
            names = sorted(nodes)
            self._owned[nodes] = owners(names, self._sums) == names.index(self._node)
        return self._owned[nodes]

    def _request(self, pieces_P: Flags, peer: str) -> Request:
        return self._ask(self._one_of(pieces_P), peer)

    def _one_of(self, pieces_P: Flags) -> int:
        return int(self._random.choice(np.flatnonzero(pieces_P)))

    def _ask(self, piece: int, peer: str) -> Request:
        self._asked_P[piece] = True
        if peer == HOME:
            self._at_home += 1
        else:
            self._peers[peer].num_asked += 1
        return Request(piece, peer)

    def _end(self, request: Request) -> None:
        self._asked_P[request.piece] = False
        if request.peer == HOME:
            self._at_home -= 1
        elif (peer := self._peers.get(request.peer)) is not None:
            peer.num_asked = max(0, peer.num_asked - 1)  # it may be known anew since


def _any_of(peers: Iterable[_Peer], like_P: Flags) -> Flags:
    found_P = np.zeros_like(like_P)
    for each in peers:
        found_P |= each.held_P
    return found_P
