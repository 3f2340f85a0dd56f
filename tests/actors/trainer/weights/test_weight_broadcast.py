"""A broadcast whose engines do not take it ends when they say so, and not with the group's time."""

from concurrent.futures import Future
from typing import cast

import pytest
import torch

from actors.trainer.weights.broadcast import JOIN_TIMEOUT_S, Broadcast, StageGroup
from messages import BucketSent, Message, UpdateGroup

STEP = BucketSent(session="1.1", stage=0, index=0, names=("a",), dtypes=("float32",), shapes=((1,),))


class Stuck:
    """A group whose broadcast waits for engines that do not come."""

    spec = UpdateGroup(name="g", address="127.0.0.1", port=1, world_size=2, backend="gloo")

    def __init__(self, error: RuntimeError | None = None, *, join_error: RuntimeError | None = None) -> None:
        self._error = error
        self._join_error = join_error
        self.is_joined = False

    def join(self) -> None:
        if self._join_error is not None:
            raise self._join_error
        self.is_joined = True

    def broadcast(self, _: torch.Tensor) -> "Future[None]":
        sent = Future[None]()
        if self._error is not None:
            sent.set_exception(self._error)
        return sent


def said(failed: dict[str, str]) -> "Future[dict[str, str]]":
    answer: Future[dict[str, str]] = Future()
    answer.set_result(failed)
    return answer


def way_with(group: Stuck) -> Broadcast:
    return Broadcast(cast(StageGroup, group), [Stuck.spec], {"a": 1})


def test_it_is_left_when_an_engine_says_that_it_does_not_take_it() -> None:
    done: list[str] = []
    failed = way_with(Stuck()).carry(
        STEP, torch.zeros(4), lambda _step, _s: said({"a": "no"}), 5.0, lambda: done.append("hashed")
    )
    assert failed == {"a": "no"}
    assert done == ["hashed"]


def test_what_engines_say_counts_before_what_the_group_says() -> None:
    asked: list[tuple[BucketSent, float]] = []

    def ask(step: Message, timeout_s: float) -> "Future[dict[str, str]]":
        asked.append((cast(BucketSent, step), timeout_s))
        return said({"a": "it was killed"})

    way = way_with(Stuck(RuntimeError("connection closed by peer")))
    for _ in range(2):  # engines have time to join with the first bucket
        assert way.carry(STEP, torch.zeros(4), ask, 5.0, lambda: None) == {"a": "it was killed"}
    assert [timeout_s for _, timeout_s in asked] == [5.0 + JOIN_TIMEOUT_S, 5.0]
    assert [(step.groups, step.offsets) for step, _ in asked] == [((Stuck.spec,), {"a": 1})] * 2


def test_a_group_that_engines_do_not_join_fails_the_bucket() -> None:
    group = Stuck(join_error=RuntimeError("timed out"))
    silent: Future[dict[str, str]] = Future()
    with pytest.raises(RuntimeError, match="the update groups could not be joined: timed out"):
        way_with(group).carry(STEP, torch.zeros(4), lambda _step, _s: silent, 5.0, lambda: None)
    refused = said({"a": "no such address"})
    assert way_with(group).carry(STEP, torch.zeros(4), lambda _step, _s: refused, 5.0, lambda: None) == {
        "a": "no such address"
    }
