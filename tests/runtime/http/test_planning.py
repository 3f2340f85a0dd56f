"""Which node sends which piece of a fetch: every piece is asked for, and home sends few copies."""

from dataclasses import dataclass, field
from hashlib import sha256
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.http.planning import AT_HOME, HOME, STILL_S, Flags, Plan, Request, owners

SUMS = [sha256(bytes([number])).hexdigest() for number in range(40)]
TICK_S = 0.01


def flags(*pieces: int, size: int) -> Flags:
    has_P = np.zeros(size, dtype=np.bool_)
    has_P[[*pieces]] = True
    return has_P


def plan(size: int, *has: int, node: str = "n1") -> Plan:
    return Plan(SUMS[:size], flags(*has, size=size), node, Random(0))


def all_of(asked: Plan, ready: list[str], now_s: float = 0.0) -> list[Request]:
    """All requests that a node makes before any is answered."""
    able, found = [name for name in ready if name != HOME], list[Request]()
    while (request := asked.choose(now_s, able, ready)) is not None:
        found.append(request)
    return found


def test_a_node_alone_asks_home_for_what_is_missing() -> None:
    assert sorted(all_of(plan(6, 2), [HOME])) == [Request(piece, HOME) for piece in (0, 1, 3, 4, 5)]


def test_nodes_divide_the_pieces_among_them() -> None:
    nodes = ["n1", "n2", "n3", "n4"]
    shares = []
    for node in nodes:
        asked = plan(40, node=node)
        for peer in nodes:
            if peer != node:
                asked.note_held(peer, flags(size=40), 0.0)
        shares.append({each.piece for each in all_of(asked, [HOME, *(peer for peer in nodes if peer != node)])})
    assert sorted(piece for share in shares for piece in share) == list(range(40))


def test_an_owner_that_leaves_moves_its_own_pieces_alone() -> None:
    nodes = ["n1", "n2", "n3", "n4"]
    before = [nodes[owner] for owner in owners(nodes, SUMS)]
    after = [nodes[owner] for owner in owners(nodes[:3], SUMS)]
    assert {"n1", "n2", "n3", "n4"} == {*before}
    assert all(old in (new, "n4") for old, new in zip(before, after, strict=True))


def test_peers_are_asked_for_what_they_have_while_home_answers_two_requests() -> None:
    asked = plan(40)
    asked.note_held("n2", flags(*range(10), size=40), 0.0)
    found = all_of(asked, [HOME, "n2"])
    first, later = found[: AT_HOME + 10], found[AT_HOME + 10 :]
    assert sum(each.peer == HOME for each in first) == AT_HOME
    assert {each.piece for each in first if each.peer == "n2"} == set(range(10))
    own = {piece for piece, owner in enumerate(owners(["n1", "n2"], SUMS)) if owner == 0} - set(range(10))
    assert {each.piece for each in found if each.peer == HOME} == own
    assert all(each.peer == HOME for each in later)


def test_requests_are_spread_over_the_holders() -> None:
    asked = plan(40)
    for peer in ("n2", "n3"):
        asked.note_held(peer, flags(*range(40), size=40), 0.0)
    assert sorted(each.peer for each in all_of(asked, ["n2", "n3"])) == ["n2"] * 20 + ["n3"] * 20


def test_the_pieces_of_a_peer_without_progress_come_from_home() -> None:
    asked = plan(40)
    asked.note_held("n2", flags(size=40), 0.0)
    own = all_of(asked, [HOME, "n2"])
    assert 0 < len(own) < 40
    assert asked.choose(STILL_S, ["n2"], [HOME, "n2"]) is None
    asked.note_held("n2", flags(own[0].piece, size=40), STILL_S)  # it is slow
    assert asked.choose(STILL_S + 1, ["n2"], [HOME, "n2"]) is None
    assert len(own) + len(all_of(asked, [HOME, "n2"], 3 * STILL_S)) == 40


def test_a_slow_home_makes_nodes_patient() -> None:
    asked = plan(40)
    asked.note_held("n2", flags(size=40), 0.0)
    own = all_of(asked, [HOME, "n2"])
    asked.note_got(own[0], took_s=10.0)
    assert asked.choose(29.0, ["n2"], [HOME, "n2"]) is None
    assert asked.choose(31.0, ["n2"], [HOME, "n2"]) is not None


def test_what_a_peer_did_not_send_is_asked_elsewhere_until_it_says_again_that_it_has_it() -> None:
    asked = plan(1)
    asked.note_held("n2", flags(0, size=1), 0.0)
    request = asked.choose(0.0, ["n2"], ["n2"])
    assert request == Request(0, "n2")
    asked.note_failed(request)
    assert asked.choose(0.0, ["n2"], ["n2"]) is None
    asked.note_held("n2", flags(0, size=1), 0.0)
    assert asked.choose(0.0, ["n2"], ["n2"]) == Request(0, "n2")


@dataclass
class Simulated:
    """A node of a simulated network."""

    name: str
    plan: Plan
    fault: str = ""  # "dies", "is stuck": it gets no piece, "denies": it announces all and sends nothing
    left_out: set[str] = field(default_factory=set[str])
    requests: list[Request] = field(default_factory=list[Request])

    @property
    def says(self) -> Flags:
        return np.ones_like(self.plan.has_P) if self.fault == "denies" else self.plan.has_P.copy()


def simulate(nodes: list[Simulated], chance: Random, *, together: bool) -> list[int]:
    """Run fetches to their end; return the pieces that home sent, one entry a copy."""
    sent, now_s = list[int](), 0.0
    dead, begun = set[str](), {each.name for each in nodes} if together else set[str]()
    by_name = {each.name: each for each in nodes}
    sound = [each for each in nodes if not each.fault]
    if together:
        for node in nodes:
            _look(node, nodes, dead, begun, now_s)
    for _ in range(40_000):
        if all(each.plan.is_complete for each in sound):
            return sent
        now_s += TICK_S
        node = chance.choice(nodes)
        begun.add(node.name)
        if node.fault == "dies" and chance.random() < 0.05:
            dead.add(node.name)
        if node.name in dead or node.fault in ("is stuck", "denies"):
            continue
        _look(node, nodes, dead, begun, now_s)
        able = [each.name for each in nodes if each is not node and each.name not in dead | node.left_out]
        if len(node.requests) < 4 and (request := node.plan.choose(now_s, able, [HOME, *able])) is not None:
            node.requests.append(request)
        elif node.requests:
            request = node.requests.pop(chance.randrange(len(node.requests)))
            source = by_name.get(request.peer)
            if source is None:
                sent.append(request.piece)
            if source is None or (source.plan.has_P[request.piece] and source.name not in dead | node.left_out):
                assert not node.plan.has_P[request.piece]
                node.plan.note_got(request, TICK_S)
            else:
                node.plan.note_failed(request)
                node.left_out |= {source.name} if source.fault == "denies" else set()
    raise AssertionError([each.plan.has_P.sum() for each in nodes])


def _look(node: Simulated, nodes: list[Simulated], dead: set[str], begun: set[str], now_s: float) -> None:
    for peer in nodes:
        if peer is not node and peer.name not in dead | node.left_out:
            node.plan.note_held(peer.name, peer.says if peer.name in begun else None, now_s)


@settings(max_examples=25)
@given(st.integers(1, 5), st.integers(1, 20), st.randoms(use_true_random=False))
def test_home_sends_each_piece_once_to_nodes_that_begin_together(num: int, size: int, chance: Random) -> None:
    nodes = [Simulated(name, plan(size, node=name)) for name in "abcde"[:num]]
    assert sorted(simulate(nodes, chance, together=True)) == list(range(size))


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(["", "dies", "is stuck", "denies"]), min_size=1, max_size=5),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_every_piece_comes_whatever_peers_do(faults: list[str], size: int, chance: Random) -> None:
    nodes = [Simulated(name, plan(size, node=name), fault) for name, fault in zip("abcde", faults, strict=False)]
    sent = simulate(nodes, chance, together=False)
    assert max((sent.count(piece) for piece in sent), default=0) <= len(nodes)


@pytest.mark.parametrize("num", [2, 4, 16])
def test_shares_are_about_equal(num: int) -> None:
    sums = [sha256(str(number).encode()).hexdigest() for number in range(200 * num)]
    counts = np.bincount(owners([f"n{number}" for number in range(num)], sums))
    assert counts.min() > 140
    assert counts.max() < 260
