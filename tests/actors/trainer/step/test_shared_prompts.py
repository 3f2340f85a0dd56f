"""Samples behind one copy of their prompt train what they train alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.data.batch import TrainBatch
from actors.trainer.data.context import Context
from actors.trainer.data.prompts import make_shared_micro_batch, units_of
from actors.trainer.megatron.layers import blockwise, rows
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.train_step import TrainStep
from runtime.settings.prompts import in_the_way, shares_prompts
from runtime.settings.rules.topology import topology_problems
from runtime.settings.topology import Topology
from tests.actors.trainer.step.test_idle_samples import Trained, trained
from tests.actors.trainer.tiny import random_batch, with_prompts
from tests.build.topology import MakeTopology, topology_with


def both(make_topology: MakeTopology, batches: list[TrainBatch], **tables: Any) -> tuple[Trained, Trained]:
    """What training with shared prompts comes to, and without."""
    found: list[Trained] = []
    for shares in (True, False):
        topology: Topology = make_topology(
            **{"optimizer": {"lr": 0.0, "weight_decay": 0.0}} | tables,
            trainer={"device": "cpu", "share_prompts": shares},
        )
        found.append(trained(topology, batches))
    return found[0], found[1]


def close(one: Trained, other: Trained) -> None:
    for shared, alone in zip(one.metrics, other.metrics, strict=True):
        assert shared.keys() == alone.keys()
        for name in shared:
            if not name.startswith("perf/"):
                assert shared[name] == pytest.approx(alone[name], rel=1e-5, abs=2e-6), name
    for shared, alone in zip(one.gradients, other.gradients, strict=True):
        assert float((shared - alone).norm()) <= 1e-5 * float(alone.norm())


ALGORITHMS: dict[str, dict[str, Any]] = {
    "two steps": {},
    "GSPO": {"loss": {"type": "gspo", "eps_clip": 0.05}, "num_steps_per_rollout": 1},
    "entropy and divergence": {"entropy_coef": 0.1, "kl": {"type": "k3", "loss_coef": 0.1}},
    "corrected by sample": {
        "tis": {"type": "clip", "level": "geometric"},
        "rs": {"type": "ratio", "level": "sequence"},
    },
    "normalized": {"tis": {"type": "clip", "batch_normalize": True}, "reduction": {"type": "token-mean"}},
}


@pytest.mark.parametrize("short_unit", [0, rows.SHORT_UNIT], ids=["in blocks", "by unit"])
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_loss_and_gradients_are_those_of_samples_alone(
    make_topology: MakeTopology, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any], short_unit: int
) -> None:
    monkeypatch.setattr(rows, "SHORT_UNIT", short_unit)
    batches = [with_prompts(random_batch(step)) for step in range(2)]
    close(*both(make_topology, batches, algorithm=algorithm, train={"max_tokens_per_gpu": 60}))


def test_a_step_of_adamw_is_that_of_samples_alone(make_topology: MakeTopology) -> None:
    tables: dict[str, Any] = {"optimizer": {"lr": 1e-3, "adam_eps": 1e-4}, "algorithm": {"num_steps_per_rollout": 1}}
    shared, alone = both(make_topology, [with_prompts(random_batch(0))], **tables)
    for name, weight in shared.weights.items():
        torch.testing.assert_close(weight, alone.weights[name], rtol=0, atol=1e-5)


def test_a_sample_without_a_finite_loss_leaves_the_others_of_its_prompt(make_topology: MakeTopology) -> None:
    batch = with_prompts(random_batch(0))
    one = replace(batch, rewards_B=np.where(np.arange(len(batch.rewards_B)) == 1, np.nan, batch.rewards_B))
    whole = replace(batch, rewards_B=np.where(batch.groups_B == 2, np.nan, batch.rewards_B))
    shared, alone = both(make_topology, [one, whole])
    close(shared, alone)
    assert torch.equal(torch.stack(shared.gradients).isfinite().all(), torch.tensor(True))


def test_prompts_are_computed_once(make_topology: MakeTopology) -> None:
    """Each with the responses of its samples; small savings are not worth the mask."""
    batch = with_prompts(random_batch(0), longest=30)
    topology = make_topology(
        trainer={"share_prompts": True}, algorithm={"num_steps_per_rollout": 1, "entropy_coef": 0.1}
    )
    step = TrainStep(topology, Replica(topology, torch.device("cpu")))
    (planned,) = step._planner.steps(batch)
    shared = [micro_batch for micro_batch in planned.micro_batches if micro_batch.shared is not None]
    assert shared == planned.micro_batches
    units = [unit for micro_batch in shared for unit in micro_batch.shared.units if micro_batch.shared]
    assert sorted(np.concatenate(units).tolist()) == list(range(len(batch.lengths_B)))
    assert 4 <= len(units) < len(batch.lengths_B) / 2
    assert sum(micro_batch.num_tokens for micro_batch in shared) == planned.num_tokens
    positions = sum(int((micro_batch.sources >= 0).sum()) for micro_batch in shared)
    assert positions < 0.7 * planned.num_tokens
    default = TrainStep(make_topology(), Replica(topology, torch.device("cpu")))
    assert not any(one.shared for each in default._planner.steps(batch) for one in each.micro_batches)


@pytest.mark.parametrize(("short", "short_unit"), [(0, 0), (blockwise.SHORT_ROW, 0), (0, rows.SHORT_UNIT)])
def test_a_response_that_saw_another_would_be_found(
    make_topology: MakeTopology, monkeypatch: pytest.MonkeyPatch, short: int, short_unit: int
) -> None:
    monkeypatch.setattr(rows, "SHORT_UNIT", short_unit)
    batches = [with_prompts(random_batch(0))]
    _, alone = both(make_topology, batches)
    right = blockwise.Row.of

    def all_seen(*args: Any) -> blockwise.Row:
        row = right(*args)
        return row._replace(owners=np.zeros_like(row.owners))

    monkeypatch.setattr(blockwise.Row, "of", all_seen)
    monkeypatch.setattr(blockwise, "SHORT_ROW", short)
    shared, _ = both(make_topology, batches)
    with pytest.raises(AssertionError):
        close(shared, alone)


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({}, ()),
        ({"device": "cuda"}, ('trainer.device = "cuda"',)),
        ({"packed": True}, ("trainer.packed",)),
        ({"megatron": {"moe_z_loss_coeff": 0.1}}, ("trainer.megatron.moe_z_loss_coeff",)),
        ({"megatron": {"mtp_num_layers": 1}}, ("trainer.megatron.mtp_num_layers",)),
    ],
)
def test_what_is_in_the_way_is_named_and_refused(tables: dict[str, Any], named: tuple[str, ...]) -> None:
    trainer = {"device": "cpu"} | tables
    assert in_the_way(topology_with(trainer=trainer)) == named
    assert shares_prompts(topology_with(trainer=trainer)) == (not named)
    wanted = topology_with(trainer=trainer | {"share_prompts": True})
    refused = [problem.message for problem in topology_problems(wanted) if problem.key == "trainer.share_prompts"]
    assert refused == [f"cannot be combined with {name}" for name in named if name != "trainer.packed"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=12), st.sampled_from([1, 2]))
def test_a_position_of_a_unit_sees_what_it_sees_in_its_sample(drawn: list[tuple[int, int]], size: int) -> None:
    """Whatever shares a prompt: the columns that each row of a sample sees are those before it in the sample."""
    prompts = [list(range(10 * number, 10 * number + number)) for number in range(4)]  # of 0 to 3 tokens
    lengths = np.array([number + own for number, own in drawn])
    mask_N = np.concatenate([[0] * number + [1] * own for number, own in drawn]).astype(np.uint8)
    batch = replace(
        random_batch(0, num_groups=1, group_size=1),
        **dict.fromkeys(["baseline_lens_B", "baseline_rewards_B", "named_rewards_B", "response_lens_B"]),
        **dict.fromkeys(["output_lens_B", "input_lens_B", "num_turns_B"]),
        **{name: np.zeros(len(drawn), dtype=int) for name in ("groups_B", "indices_B", "parts_B", "left_out_B")},
        **{name: np.zeros(len(drawn)) for name in ("rewards_B", "raw_rewards_B", "truncated_B")},
        rollouts_B=np.arange(len(drawn)),
        lengths_B=lengths,
        tokens_N=np.concatenate([[*prompts[number], *range(50, 50 + own)] for number, own in drawn]).astype(np.int32),
        loss_mask_N=mask_N,
        rollout_log_probs_N=np.zeros(len(mask_N), dtype=np.float32),
        staleness_N=np.where(mask_N, 0, -1).astype(np.int32),
    )
    units = units_of(batch, np.arange(len(drawn)), max_tokens=1000, attention=0.0)
    assert sorted(np.concatenate(units).tolist()) == list(range(len(drawn)))
    assert len(units) == sum(1 for number, _ in drawn if not number) + len({number for number, _ in drawn if number})
    found: list[int] = []
    for rank in range(size):
        context = Context(rank, size)
        micro_batch = make_shared_micro_batch(batch, units, multiple=context.multiple, context=context)
        assert micro_batch.bounds is not None
        assert micro_batch.shared is not None
        sizes = np.diff(micro_batch.bounds).astype(np.int64)
        row = rows.PackedRow(sizes, context, torch.device("cpu"), micro_batch.shared)
        everywhere = np.full(int(sizes.sum()), -1)
        for other in (Context(other, size) for other in range(size)):
            part = make_shared_micro_batch(batch, units, multiple=context.multiple, context=other)
            everywhere[other.kept(sizes)] = part.sources.ravel()
        for place, column in zip(micro_batch.rows_M.tolist(), micro_batch.columns_M.tolist(), strict=True):
            sample = int(np.searchsorted(batch.starts_B, column, side="right")) - 1
            start = int(batch.starts_B[sample])
            seen = batch.tokens_N[everywhere[row.mask(None)[place].numpy()]]
            assert seen.tolist() == batch.tokens_N[start:column].tolist()
            found.append(column)
    assert sorted(found) == [
        int(start) + place
        for start, length, (number, _) in zip(batch.starts_B, lengths, drawn, strict=True)
        for place in range(max(number, 1), int(length))
    ]
