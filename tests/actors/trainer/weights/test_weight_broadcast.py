"""A broadcast whose engines do not take it ends when they say so, and not with the group's time."""

from concurrent.futures import Future
from typing import cast

import torch

from actors.trainer.weights.broadcast import Broadcast, StageGroup
from messages import BucketSent, Message, UpdateGroup

STEP = BucketSent(session="1.1", stage=0, index=0, names=("a",), dtypes=("float32",), shapes=((1,),))


class Stuck:
    """A group whose broadcast waits for engines that do not come."""

    spec = UpdateGroup(name="g", address="127.0.0.1", port=1, world_size=2, backend="gloo")

    def __init__(self, error: RuntimeError | None = None) -> None:
        self._error = error

    def broadcast(self, _: torch.Tensor) -> "Future[None]":
        sent = Future[None]()
        if self._error is not None:
            sent.set_exception(self._error)
        return sent


def said(failed: dict[str, str]) -> "Future[dict[str, str]]":
    answer: Future[dict[str, str]] = Future()
    answer.set_result(failed)
    return answer


def test_it_is_left_when_an_engine_says_that_it_does_not_take_it() -> None:
    group = Stuck()
    way = Broadcast(cast(StageGroup, group))
    done: list[str] = []
    failed = way.carry(STEP, torch.zeros(4), lambda _step, _s: said({"a": "no"}), 5.0, lambda: done.append("hashed"))
    assert failed == {"a": "no"}
    assert done == ["hashed"]


def test_what_engines_say_counts_before_what_the_group_says() -> None:
    way = Broadcast(cast(StageGroup, Stuck(RuntimeError("connection closed by peer"))))
    asked: list[Message] = []

    def ask(step: Message, _: float) -> "Future[dict[str, str]]":
        asked.append(step)
        return said({"a": "it was killed"})

    assert way.carry(STEP, torch.zeros(4), ask, 5.0, lambda: None) == {"a": "it was killed"}
    assert [cast(BucketSent, step).group for step in asked] == ["g"]
