"""What the home node shows of the others."""

from runtime.node.claims.node_claim import NodeHolder
from runtime.node.other_nodes import NodesSeen


def holder(pid: int = 7) -> NodeHolder:
    return NodeHolder(host="h1", pid=pid, run_dir="/r", incarnation=1, since=0.0)


def test_a_node_joins_falls_silent_comes_back_and_leaves() -> None:
    seen = NodesSeen("n0")
    own = {"n0": (holder(1), 1)}
    assert seen.look(0.0, own) == []
    assert seen.look(1.0, own | {"n1": (holder(), 5)}) == ["node n1 joined: process 7 on h1, in /r"]
    assert seen.look(6.0, own | {"n1": (holder(), 6)}) == []
    assert seen.look(13.0, own | {"n1": (holder(), 6)}) == []
    assert seen.look(15.0, own | {"n1": (holder(), 6)}) == ["node n1 has been silent for 9 s"]
    assert seen.look(17.0, own | {"n1": (holder(), 6)}) == []  # once
    assert seen.look(18.0, own | {"n1": (holder(), 7)}) == ["node n1 is back"]
    assert seen.look(19.0, own) == ["node n1 left"]


def test_a_silent_node_whose_claim_expires_is_away_and_another_daemon_joins_in_its_place() -> None:
    seen = NodesSeen("n0")
    seen.look(0.0, {"n1": (holder(), 5)})
    assert seen.look(9.0, {"n1": (holder(), 5)}) == ["node n1 has been silent for 9 s"]
    assert seen.look(20.0, {}) == ["node n1 is away"]
    assert seen.look(20.5, {}) == []  # once
    assert seen.look(21.0, {"n1": (holder(8), 9)}) == ["node n1 joined: process 8 on h1, in /r"]
    assert seen.look(22.0, {"n1": (holder(9), 11)}) == ["node n1 joined: process 9 on h1, in /r"]


def test_a_node_that_enters_again_after_its_claim_expired_is_back() -> None:
    seen = NodesSeen("n0")
    seen.look(0.0, {"n1": (holder(), 5)})
    seen.look(9.0, {"n1": (holder(), 5)})
    assert seen.look(20.0, {}) == ["node n1 is away"]
    assert seen.look(40.0, {"n1": (holder(), 9)}) == ["node n1 is back"]
    assert seen.look(42.0, {}) == ["node n1 left"]
