"""Issued samples against trained ones, by hand and against every length that the open samples may come to have."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from messages import ActorStarted, BatchTrained, BufferStarted, Message, Outcome, SampleStatus, SampleSummary
from messages import UntrainedSamples as Untrained
from runtime.ledger.bias import Bias, BiasReport, bias_advice, bias_lines, distance
from tests.build.events import aborted, announced, batch, completed, failed, issued, trained, verdict

FAR = 1_000  # beyond all values


def sample(index: int, length: int, *, status: SampleStatus = SampleStatus.COMPLETED, **fields: Any) -> SampleSummary:
    return SampleSummary(index=index, status=status, response_len=length, prompt_len=10, reward=0.5, **fields)


def bias_of(*events: Message) -> Bias:
    report = BiasReport()
    for seq, event in enumerate(events, start=1):
        report.take(event, seq)
    return report.result()


def test_a_filter_that_drops_the_long_group_is_seen_by_its_reason_and_in_the_lengths() -> None:
    bias = bias_of(
        BufferStarted(incarnation=1),
        ActorStarted(actor="rollout", node="n0", pid=1),
        announced(1, 0),
        issued(0, 1, num_samples=2),
        completed(0, samples=(sample(0, 10), sample(1, 20))),
        completed(1, samples=(sample(0, 90), sample(1, 100))),
        verdict(0, 5),
        verdict(1, 6, Outcome.DROP, reason="too long"),
        batch(0, (0, 5)),
        trained(0),
    )
    assert (bias.issued, bias.trained, bias.mean_len) == (4, 2, 15.0)
    assert (bias.response_len.least, bias.response_len.most) == (0.5, 0.5)
    assert (bias.removed["too long"].samples, bias.removed["too long"].mean_len) == (2, 95.0)
    assert bias.places["node"] == {"n0": bias.places["actor"]["rollout"]}
    assert "not trained  2 samples (50.0%, mean 95.0 tokens): too long" in list(bias_lines(bias))


def test_samples_that_never_ended_may_be_of_any_greater_length() -> None:
    """Two samples of length 5 train, one is halted after 3 tokens: it may be 4, 5 or endless."""
    half = sample(0, 3, status=SampleStatus.ABORTED)
    bias = bias_of(
        BufferStarted(incarnation=1, verdicts=False),
        announced(1, 0),
        issued(0, 1, verdicts=False, num_samples=2),
        completed(0, samples=(sample(0, 5), sample(1, 5))),
        aborted(1, samples=(half,)),
        batch(0, (0, 4)),
        trained(0),
    )
    assert (bias.issued, bias.trained) == (4, 2)  # group 1 has a sample that began no token
    assert (bias.response_len.least, bias.response_len.most) == (0.0, 0.5)
    assert bias.removed["not settled: pooled"].unfinished == 2


def test_a_failed_group_and_samples_without_a_gradient_are_not_trained() -> None:
    broken = sample(1, 7, status=SampleStatus.FAILED)
    bias = bias_of(
        BufferStarted(incarnation=1, verdicts=False),
        announced(1, 0),
        issued(0, 1, verdicts=False, num_samples=3),
        completed(0, samples=(sample(0, 5), broken, sample(2, 6))),
        failed(1, "no score"),
        batch(0, (0, 4)),
        without_gradient(0, Untrained(group_id=0, reason="too_long", samples=((2, 0),))),
    )
    assert bias.trained == 1
    assert {reason: removed.samples for reason, removed in bias.removed.items()} == {
        "failed, and the others of its group trained": 1,
        "too_long": 1,
        "no score": 3,
    }


def without_gradient(step: int, untrained: Untrained) -> BatchTrained:
    return trained(step, untrained=(untrained,))


def test_a_difference_is_told_only_where_chance_does_not_explain_it() -> None:
    few = distance({1: 10}, {1: 10, 2: 10})
    assert (few.least, few.is_far) == (0.5, False)
    many = distance({1: 10_000}, {1: 10_000, 2: 10_000})
    assert (many.least, many.is_far) == (0.5, True)
    assert not distance({2: 10_000}, {2: 10_000}, {1: 10_000}).is_far  # the others may be as long
    none = bias_of(BufferStarted(incarnation=1))
    assert "nothing to compare yet" in "".join(bias_lines(none))
    assert list(bias_advice(none)) != []


values = st.lists(st.integers(0, 4), max_size=5)


@example(of_trained=[2], others=[0], so_far=[0])  # between two known values
@given(values.filter(bool), values, st.lists(st.integers(0, 4), max_size=3))
def test_every_length_of_the_open_samples_gives_a_distance_in_the_range(
    of_trained: list[int], others: list[int], so_far: list[int]
) -> None:
    """And the least and the most are reached as far as one moment of the distributions alone decides."""
    found = distance(Counter(of_trained), Counter(of_trained + others), Counter(so_far))
    ends = [[value for value in (*range(begin + 1, 6), FAR)] for begin in so_far]
    for chosen in product(*ends):
        exact = distance(Counter(of_trained), Counter([*of_trained, *others, *chosen]))
        assert exact.least == pytest.approx(exact.most)
        assert found.least - 1e-12 <= exact.least <= found.most + 1e-12
