"""Calls of rank 0: every rank has all of them, gets their arguments as they were, and ends at one that it has not."""

import ast
import queue
import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from actors.trainer import ranks
from actors.trainer.commands import TrainerRank
from actors.trainer.critic_rank import CriticRank
from actors.trainer.data.batch import TrainBatch
from actors.trainer.megatron.groups import Ranks
from actors.trainer.ranks import RankCalls, UnknownCall, decode_batch, encode_batch, methods_of, on_all_ranks
from actors.trainer.weights.members import Membership
from messages import WeightSyncAnswered, WeightSyncMember
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
MEMBERS = Membership.of(
    {"rollout": WeightSyncAnswered(members=(WeightSyncMember(engine="e", key="e.1", num_ranks=2),))}, part=1
)


class Rank:
    """Notes what it carries out."""

    def __init__(self, rank: int, store: Any) -> None:
        self.calls = RankCalls(Ranks(rank=rank, world_size=2, store=store), CPU)
        self.calls.serve(self)
        self.done: list[Any] = []
        self.taken: list[weakref.ref[TrainBatch]] = []

    @on_all_ranks
    def note(self, what: str, members: Membership, *, factor: float = 0.5, by_name: Mapping[str, int]) -> int:
        self.done.append((what, members, factor, by_name))
        return len(self.done)

    @on_all_ranks
    def take(self, number: int, batch: TrainBatch) -> None:
        self.done.append((number, batch))

    @on_all_ranks
    def glance(self, batch: TrainBatch) -> None:
        self.taken.append(weakref.ref(batch))

    @on_all_ranks
    def _again(self) -> None:
        self.note("inner", MEMBERS, by_name={})

    def again(self) -> None:
        self._again()


def decorated() -> dict[str, set[str]]:
    """The names of all methods that are calls, by module."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "actors" / "trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "on_all_ranks" in map(ast.unparse, node.decorator_list):
                found.setdefault(path.name, set()).add(node.name.lstrip("_"))
    return found


def told_to_the_critic() -> dict[str, set[str]]:
    """The names and arguments of all calls of a critic on ranks of its own."""
    found: dict[str, set[str]] = {}
    for name in ("commands.py", "step/remote_critic.py"):
        for node in ast.walk(ast.parse((ROOT / "actors" / "trainer" / name).read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("self._tell_critic", "self._link.tell"):
                if not isinstance(node.args[0], ast.Constant):
                    continue  # passes on what it was given
                payload = {"size_bytes"} if len(node.args) > 1 else set[str]()
                found[str(node.args[0].value)] = payload | {str(key.arg) for key in node.keywords}
    return found


def test_every_rank_has_every_call(make_topology: MakeTopology, tmp_path: Path) -> None:
    rank = TrainerRank(make_topology(), tmp_path / "run")
    names = decorated()
    of_critic = names.pop("critic_rank.py")
    assert rank.calls.names == set.union(*names.values())
    assert of_critic == set(methods_of(CriticRank))
    assert {"train", "begin_export", "open_groups", "finish_send"} <= rank.calls.names


def test_a_critic_has_every_call_that_it_gets_with_its_arguments() -> None:
    assert told_to_the_critic() == {
        name: set(method.signature.parameters) for name, method in methods_of(CriticRank).items()
    }


def test_another_rank_carries_out_what_rank_0_calls_with_the_same_arguments() -> None:
    store = HashStore()
    first, other = Rank(0, store), Rank(1, store)
    assert first.note("a", MEMBERS, by_name={"e": 2}) == 1
    assert first.note("b", MEMBERS, factor=2.0, by_name={}) == 2
    first.calls.stop_others()
    other.calls.follow()
    assert other.done == first.done == [("a", MEMBERS, 0.5, {"e": 2}), ("b", MEMBERS, 2.0, {})]


def test_a_call_that_a_rank_has_not_ends_it() -> None:
    store = HashStore()
    store.set("call/1", msgspec.msgpack.encode(("nothing_like_it", b"")))
    with pytest.raises(UnknownCall, match="rank 1 has no call 'nothing_like_it'; it has again, glance, note, take"):
        Rank(1, store).calls.follow()


def test_a_call_inside_of_a_call_is_an_error_of_ours() -> None:
    with pytest.raises(AssertionError, match="note is called inside of another call"):
        Rank(0, HashStore()).again()


def test_a_rank_that_waits_for_a_call_stops_when_it_is_told_to() -> None:
    rank = Rank(1, HashStore())
    following = threading.Thread(target=rank.calls.follow)
    following.start()
    rank.calls.stop()
    following.join(40)
    assert not following.is_alive()


@pytest.mark.parametrize("large_bytes", [0, 300, 1 << 20])
def test_a_batch_comes_to_other_ranks_as_it_is(monkeypatch: pytest.MonkeyPatch, large_bytes: int) -> None:
    """All its columns are broadcast on their own, some are, or none."""
    sent = queue.Queue[torch.Tensor]()

    def broadcast(tensor: torch.Tensor, src: int) -> None:
        assert src == 0
        if threading.current_thread() is following:
            tensor.copy_(sent.get(timeout=200))
        else:
            sent.put(tensor.clone())

    monkeypatch.setattr(ranks, "LARGE_BYTES", large_bytes)
    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    store, batches = HashStore(), [random_batch(step) for step in range(2)]
    experts_N = np.ones((len(batches[1].tokens_N), 4), dtype=np.uint8)
    batches[1] = replace(batches[1], routed_experts_N=experts_N, temperatures_N=batches[1].rollout_log_probs_N)
    batches[0].tokens_N.flags.writeable = False  # as in a batch that was decoded
    first, other = Rank(0, store), Rank(1, store)
    following = threading.Thread(target=other.calls.follow)
    following.start()
    for number, batch in enumerate(batches):
        first.take(number, batch)
    first.calls.stop_others()
    following.join(40)
    assert sent.empty()
    assert [number for number, _ in other.done] == [0, 1]
    for batch, (_, found) in zip(batches, other.done, strict=True):
        assert encode_batch(found) == encode_batch(replace(batch, routed_experts_N=None))
    assert first.done[1][1] is batches[1]  # rank 0 keeps the expert ids, of which each replica gets its share later


def test_a_rank_frees_a_batch_before_the_next_one_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had the old batch while it received the new one."""
    store, alive = HashStore(), list[bool]()
    first, other = Rank(0, store), Rank(1, store)

    def broadcast(tensor: torch.Tensor, src: int) -> None:
        if threading.current_thread() is following:
            alive.append(bool(other.taken and other.taken[-1]()))
            tensor.copy_(sent.get(timeout=200))
        else:
            sent.put(tensor.clone())

    sent = queue.Queue[torch.Tensor]()
    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    following = threading.Thread(target=other.calls.follow)
    following.start()
    for step in range(2):
        first.glance(random_batch(step))
    first.calls.stop_others()
    following.join(40)
    assert alive == [False, False]
    assert len(other.taken) == 2


def test_a_batch_comes_back_from_its_broadcast() -> None:
    batch = random_batch()
    again = decode_batch(encode_batch(batch))
    assert again.step == batch.step
    assert (again.tokens_N == batch.tokens_N).all()
    assert encode_batch(again) == encode_batch(batch)
