"""The cut of a batch into steps, replicas and micro-batches: nothing lost, nothing twice, limits kept."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.data.batch import TrainBatch, make_micro_batch
from actors.trainer.data.plan import micro_batch_cost, plan_micro_batches, shared_out, split_steps
from actors.trainer.data.skipped import without
from tests.actors.trainer.tiny import random_batch

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40).map(lambda values: np.array(values, dtype=np.int64))


@given(LENGTHS, st.integers(1, 100), st.integers(1, 4), st.booleans())
def test_every_sample_is_in_one_micro_batch_within_the_limit_and_replicas_have_equally_many(
    lengths: np.ndarray, max_tokens: int, num_replicas: int, packed: bool
) -> None:
    samples = np.arange(len(lengths))
    plan = plan_micro_batches(lengths, samples, max_tokens=max_tokens, num_replicas=num_replicas, packed=packed)
    assert len(plan) == num_replicas
    assert len({len(own) for own in plan}) == 1
    micro_batches = [members for own in plan for members in own]
    assert sorted(np.concatenate(micro_batches).tolist()) == samples.tolist()
    for members in micro_batches:
        if len(members) > 1:
            size = lengths[members].sum() if packed else lengths[members].max() * len(members)
            assert size <= max_tokens


@given(LENGTHS, st.integers(1, 100), st.integers(1, 4), st.booleans())
def test_samples_of_a_rollout_share_a_micro_batch_if_they_must(
    lengths: np.ndarray, max_tokens: int, num_replicas: int, packed: bool
) -> None:
    lengths = np.append(lengths, 1)
    samples, rollouts = np.arange(1, len(lengths)), np.arange(len(lengths)) // 2
    plan = plan_micro_batches(
        lengths, samples, max_tokens=max_tokens, num_replicas=num_replicas, packed=packed, rollouts_B=rollouts
    )
    assert len({len(own) for own in plan}) == 1
    micro_batches = [members for own in plan for members in own]
    assert sorted(np.concatenate(micro_batches).tolist()) == samples.tolist()
    homes = [set(rollouts[members].tolist()) for members in micro_batches]
    assert sum(map(len, homes)) == len(set(rollouts[samples].tolist()))
    for members, home in zip(micro_batches, homes, strict=True):
        if len(home) > 1:
            size = lengths[members].sum() if packed else lengths[members].max() * len(members)
            assert size <= max_tokens


def test_packing_fills_the_limit() -> None:
    """The example of slime's manual: lengths 100, 200, 300 under a limit of 300."""
    lengths = np.array([100, 200, 300])
    (plan,) = plan_micro_batches(lengths, np.arange(3), max_tokens=300, num_replicas=1, packed=True)
    assert sorted(sorted(lengths[members].tolist()) for members in plan) == [[100, 200], [300]]


@given(LENGTHS, st.integers(60, 400), st.integers(0, 100))
def test_padding_and_micro_batches_together_cost_least(lengths: np.ndarray, max_tokens: int, cost: int) -> None:
    """Against all cuts of the sorted samples into stretches, where a stretch of equal lengths may be cut too."""
    ordered = np.sort(lengths)[::-1].tolist()
    best = [0.0]
    for end in range(1, len(ordered) + 1):
        sizes = [(begin, (end - begin) * ordered[begin]) for begin in range(end)]
        best.append(min(best[begin] + cost + size for begin, size in sizes if size <= max_tokens))
    (plan,) = plan_micro_batches(
        lengths, np.arange(len(lengths)), max_tokens=max_tokens, num_replicas=1, packed=False, cost=cost
    )
    found = sum(cost + int(lengths[members].max()) * len(members) for members in plan)
    assert found <= best[-1] + cost * len(set(ordered))  # limits also cut between stretches of equal lengths
    if max_tokens >= sum(ordered[:1]) * len(ordered):
        assert found == best[-1]


def test_a_micro_batch_costs_more_tokens_the_smaller_the_layers_are() -> None:
    lengths = np.array([100, 100, 90, 90])
    arguments = {"max_tokens": 1000, "num_replicas": 1, "packed": False}
    assert len(plan_micro_batches(lengths, np.arange(4), **arguments, cost=micro_batch_cost(1 << 12))[0]) == 1
    assert len(plan_micro_batches(lengths, np.arange(4), **arguments, cost=micro_batch_cost(1 << 22))[0]) == 2


@pytest.mark.parametrize("packed", [False, True])
def test_replicas_have_about_equally_much_to_compute(packed: bool) -> None:
    """Dealt in turn by their tokens, the first replica would have the longer one of each two micro-batches."""
    lengths = np.array([400, 300, 200, 100])
    plan = plan_micro_batches(lengths, np.arange(4), max_tokens=400, num_replicas=2, packed=False)
    assert sorted(sum(int(lengths[members].sum()) for members in own) for own in plan) == [500, 500]
    rows = np.array([1000, *[100] * 10, *[500] * 2])  # a thousand positions see more than ten times a hundred
    plan = plan_micro_batches(rows, np.arange(13), max_tokens=1000, num_replicas=1, packed=packed, attention=1e-3)
    assert sum(len(members) for members in plan[0]) == 13
    two = plan_micro_batches(rows, np.arange(13), max_tokens=1000, num_replicas=2, packed=packed, attention=1e-3)
    costs = [sum(float((rows[members] + 1e-3 * rows[members] ** 2).sum()) for members in own) for own in two]
    assert max(costs) - min(costs) <= 1000  # 2,000 for the long row, 1,500 for two, 1,100 for ten


def test_steps_have_equally_many_rollouts_and_keep_parts_together() -> None:
    batch = random_batch()
    steps = split_steps(batch, 2)
    assert np.concatenate(steps).tolist() == list(range(len(batch.lengths_B)))
    assert [len(set(batch.rollouts_B[step].tolist())) for step in steps] == [8, 8]
    assert not set(batch.rollouts_B[steps[0]].tolist()) & set(batch.rollouts_B[steps[1]].tolist())


def test_fewer_rollouts_than_steps_make_fewer_steps() -> None:
    assert len(split_steps(random_batch(num_groups=1, group_size=2), 5)) == 2


def predictions(batch: TrainBatch, samples: np.ndarray, *, packed: bool, multiple: int) -> set[tuple]:
    """What a micro-batch asks of the model, told by contents: (tokens read before, token predicted, its column)."""
    micro_batch = make_micro_batch(batch, samples, packed=packed, multiple=multiple)
    assert micro_batch.tokens.shape[1] % multiple == 0
    flat, row_length = micro_batch.tokens.reshape(-1), micro_batch.tokens.shape[1]
    found = set()
    for row, target, column in zip(micro_batch.rows_M, micro_batch.targets_M, micro_batch.columns_M, strict=True):
        if packed:
            assert micro_batch.bounds is not None
            begin = micro_batch.bounds[np.searchsorted(micro_batch.bounds, row, side="right") - 1]
        else:
            begin = row // row_length * row_length
        found.add((tuple(flat[begin : row + 1].tolist()), int(target), int(column)))
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("multiple", [1, 4])
def test_each_trained_token_is_predicted_from_exactly_the_tokens_before_it(packed: bool, multiple: int) -> None:
    batch = random_batch()
    expected = set()
    for sample, (start, length) in enumerate(zip(batch.starts_B.tolist(), batch.lengths_B.tolist(), strict=True)):
        tokens = batch.tokens_N[start : start + length].tolist()
        trained = np.flatnonzero(batch.loss_mask_N[start : start + length]).tolist()
        expected |= {(tuple(tokens[:place]), tokens[place], start + place) for place in trained}
        assert batch.mask_sums_B[sample] == len(trained)
    assert predictions(batch, np.arange(len(batch.lengths_B)), packed=packed, multiple=multiple) == expected


@pytest.mark.parametrize("packed", [False, True])
def test_kept_tokens_follow_the_targets_also_without_masked_samples(packed: bool) -> None:
    """Token t of the columns kept t % 3 tokens: 100 t, 100 t + 1."""
    batch = random_batch()
    counts_N = np.arange(len(batch.tokens_N)) % 3
    ids_K = np.concatenate([100 * token + np.arange(count) for token, count in enumerate(counts_N)])
    batch = replace(batch, kept_counts_N=counts_N.astype(np.int32), kept_ids_K=ids_K.astype(np.int32))
    micro_batch = make_micro_batch(batch, np.array([3, 0, 5]), packed=packed)
    masked_B = np.arange(len(batch.lengths_B)) == 0
    for one in (micro_batch, without(batch, micro_batch, masked_B)):
        assert one.kept is not None
        assert one.kept.counts_M.tolist() == counts_N[one.columns_M].tolist()
        expected = [100 * token + more for token in one.columns_M.tolist() for more in range(token % 3)]
        assert one.kept.ids_K.tolist() == expected


@pytest.mark.parametrize("packed", [False, True])
def test_an_empty_micro_batch_has_a_position_and_no_loss(packed: bool) -> None:
    micro_batch = make_micro_batch(random_batch(), np.empty(0, dtype=np.int64), packed=packed, multiple=2)
    assert micro_batch.tokens.shape == (1, 2)
    assert len(micro_batch.rows_M) == 0


def test_columns_that_do_not_fit_are_refused() -> None:
    batch = random_batch()
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    with pytest.raises(ValueError, match="rewards_B"):
        TrainBatch(**(fields | {"rewards_B": batch.rewards_B[:-1]}))


@st.composite
def works(draw: st.DrawFn) -> tuple[list[int], int]:
    """Costs of items that can be shared out, and among how many."""
    shares = draw(st.integers(1, 5))
    number = shares * draw(st.integers(0, 8))
    return draw(st.lists(st.integers(0, 1000), min_size=number, max_size=number)), shares


def spread(costs: list[int], shares: list[list[int]]) -> int:
    sums = [sum(costs[item] for item in items) for items in shares]
    return max(sums) - min(sums)


@given(works())
def test_every_item_is_in_one_share_and_shares_have_equally_many(work: tuple[list[int], int]) -> None:
    costs, number = work
    shares = shared_out(costs, number)
    assert [len(items) for items in shares] == [len(costs) // number] * number
    assert sorted(item for items in shares for item in items) == list(range(len(costs)))


@given(works())
def test_sums_differ_no_more_than_neighbours_do_and_never_more_than_dealt_in_turn(work: tuple[list[int], int]) -> None:
    costs, number = work
    found, ordered = spread(costs, shared_out(costs, number)), sorted(costs, reverse=True)
    stretches = [ordered[begin : begin + number] for begin in range(0, len(ordered), number)]
    assert found <= max((stretch[0] - stretch[-1] for stretch in stretches), default=0)
    dealt = sorted(range(len(costs)), key=lambda item: -costs[item])
    assert found <= spread(costs, [dealt[share::number] for share in range(number)])


@given(st.lists(st.integers(0, 100), min_size=1, max_size=5).map(lambda half: half + half[::-1]))
def test_of_two_shares_the_sums_are_near_the_best(costs: list[int]) -> None:
    best = min(
        abs(sum(costs) - 2 * sum(costs[item] for item in items))
        for items in combinations(range(len(costs)), len(costs) // 2)
    )
    assert best == 0  # each cost is there twice
    assert spread(costs, shared_out(costs, 2)) <= max(costs) - min(costs)


def test_shares_by_hand() -> None:
    """Dealt in turn these are 8 + 6 + 4 and 7 + 5 + 1; pairs that differ by 1, 1 and 3 leave 1 + 1 - 3."""
    assert spread([8, 7, 6, 5, 4, 1], shared_out([8, 7, 6, 5, 4, 1], 2)) == 1


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="3 items cannot be shared out equally among 2"):
        shared_out([1, 2, 3], 2)
