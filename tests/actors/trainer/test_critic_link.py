"""The link to a critic with ranks of its own: payloads, answers, and errors that name the rank."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from actors.trainer.critic_link import PART_BYTES, CriticEnd, CriticLink, CriticRankFailed
from actors.trainer.megatron.groups import Ranks
from actors.trainer.ranks import RankCalls, on_all_ranks
from runtime.process.actor import InputError
from runtime.util.disk import NoSpace

CPU = torch.device("cpu")
Ends = tuple[CriticLink, CriticEnd, RankCalls, dist.Store]


class Answering:
    """A rank of the critic that answers with the payload of a call."""

    def __init__(self, end: CriticEnd, calls: RankCalls) -> None:
        self.calls = calls
        self.num_calls = 0
        self._end = end
        calls.serve(self)

    @on_all_ranks
    def _echo(self, size_bytes: int) -> None:
        self._end.answer(self._end.payload(size_bytes))
        self.num_calls += 1


@pytest.fixture
def ends() -> Ends:
    """Both ends, on one store as the ranks of a run have it."""
    server = dist.TCPStore("127.0.0.1", 0, 2, True, timeout=timedelta(seconds=40), wait_for_workers=False)
    store = dist.PrefixStore("link", server)
    link = CriticLink(store, RankCalls(Ranks(world_size=2, store=store), CPU), timeout_s=40.0)
    calls = RankCalls(Ranks(store=store), CPU)
    return link, CriticEnd(store, calls, is_first=True), calls, server


def test_payloads_and_answers_of_any_size_arrive_in_order_and_leave_nothing_behind(ends: Ends) -> None:
    link, end, calls, server = ends
    rank = Answering(end, calls)
    large, small = bytes(range(256)) * (2 * PART_BYTES // 256) + b"more", b""
    for payload in (large, small, b"x"):
        link.tell("echo", payload)
    link.stop()
    stored = server.num_keys()
    calls.follow()
    assert [link.answer(bytes) for _ in range(3)] == [large, small, b"x"]
    assert server.num_keys() == stored - 4  # the calls are left
    assert rank.num_calls == 3


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (InputError("the loss is not finite"), InputError, "rank 1 of the critic: the loss is not finite"),
        (NoSpace("no space left"), NoSpace, "rank 1 of the critic: no space left"),
        (RuntimeError("lost"), CriticRankFailed, r"rank 1 of the critic: RuntimeError\('lost'\)"),
    ],
)
def test_an_error_of_the_critic_becomes_one_of_the_actor_that_names_the_rank(
    ends: Ends, error: Exception, kind: type[Exception], text: str
) -> None:
    link, end, _, _ = ends
    end.fail(error, "rank 1 of the critic")
    end.fail(RuntimeError("connection closed by peer"), "rank 0 of the critic")
    with pytest.raises(kind, match=text):
        link.answer(bytes)


def test_the_wait_for_an_answer_is_bounded(ends: Ends) -> None:
    store = dist.PrefixStore("link", ends[3])
    link = CriticLink(store, RankCalls(Ranks(world_size=2, store=store), CPU), timeout_s=0.1)
    with pytest.raises(CriticRankFailed, match=r"did not answer within 0\.1 s"):
        link.answer(bytes)
