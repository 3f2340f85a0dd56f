"""Log-probs of a group are the same to the bit, in its batch and before there is one, and close to those by batch."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.trainer.data.batch import TrainBatch
from actors.trainer.data.precomputed import PrecomputedLogProbs
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.layout import group_by_group
from actors.trainer.step.train_step import TrainStep
from runtime.settings.topology import Topology
from tests.actors.trainer.hf import whole_weights, write_model
from tests.actors.trainer.tiny import groups_of, random_batch
from tests.build.topology import MakeTopology

WITH_REFERENCE = {"kl": {"type": "k3", "loss_coef": 0.3}}
Results = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def trained(topology: Topology, ahead: Callable[[int], bool] = lambda group: False) -> Results:
    """Metrics and weights after two steps, of which some groups' log-probs were computed ahead."""
    replica = Replica(topology, torch.device("cpu"))
    step = TrainStep(topology, replica)
    metrics: list[dict[str, float]] = []
    for number in range(2):
        batch, precomputed = random_batch(number), PrecomputedLogProbs()
        for group, alone in groups_of(batch):
            if ahead(group):
                precomputed.add(group, step.precompute(alone))
        batch, _ = precomputed.put_into(masked_by_age(batch), {group: group for group in range(4)})
        told = step(batch).metrics
        metrics.append({name: value for name, value in told.items() if not name.startswith("perf/")})
    return metrics, whole_weights(replica.complete_chunks(), replica.hf)


def assert_same_bits(one: Results, other: Results) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(weight, other[1][name]) for name, weight in one[1].items())


CASES: dict[str, dict[str, Any]] = {
    "reference and old": {"algorithm": WITH_REFERENCE},
    "three steps, which cut groups": {"algorithm": {"num_steps_per_rollout": 3}},
    "packed, small micro-batches": {
        "algorithm": WITH_REFERENCE,
        "trainer": {"packed": True},
        "train": {"max_tokens_per_gpu": 30},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("tables", CASES.values(), ids=CASES.keys())
def test_a_step_is_the_same_to_the_bit_whatever_was_computed_ahead(
    make_topology: MakeTopology, tables: dict[str, Any]
) -> None:
    topology = make_topology(**tables | {"trainer": {"log_probs_ahead": True} | tables.get("trainer", {})})
    nothing = trained(topology)
    assert_same_bits(trained(topology, lambda group: group % 2 == 0), nothing)
    assert_same_bits(trained(topology, lambda group: True), nothing)


def masked_by_age(batch: TrainBatch) -> TrainBatch:
    """As a step masks tokens that whoever computes ahead knows nothing of."""
    return replace(batch, loss_mask_N=batch.loss_mask_N * (np.arange(len(batch.tokens_N)) % 3 > 0))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_group_is_laid_out_by_itself_whatever_else_is_in_its_batch(make_topology: MakeTopology, packed: bool) -> None:
    """The sizes of products decide about the last bits."""
    replica, batch = Replica(make_topology(trainer={"packed": packed}), torch.device("cpu")), random_batch()
    limit = 30
    of_batch = group_by_group(replica, masked_by_age(batch), np.unique(batch.groups_B), max_tokens=limit)
    alone = [
        micro_batch
        for group, one in groups_of(batch)
        for micro_batch in group_by_group(replica, one, np.array([group]), max_tokens=limit)
    ]
    assert len(of_batch) > 6
    for one, other in zip(of_batch, alone, strict=True):
        for name in ("tokens", "rows_M", "targets_M", "bounds"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.slow
@pytest.mark.parametrize("tables", CASES.values(), ids=CASES.keys())
def test_a_step_by_group_is_that_by_batch_up_to_rounding(make_topology: MakeTopology, tables: dict[str, Any]) -> None:
    by_group = make_topology(**tables | {"trainer": {"log_probs_ahead": True} | tables.get("trainer", {})})
    one, other = trained(by_group), trained(make_topology(**tables))
    for first, second in zip(one[0], other[0], strict=True):
        assert first == pytest.approx(second, abs=1e-5)
    for name, weight in one[1].items():
        torch.testing.assert_close(weight, other[1][name], rtol=0, atol=1e-4)


def test_with_everything_ahead_a_step_computes_no_further_log_probs(
    make_topology: MakeTopology, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = make_topology(algorithm=WITH_REFERENCE, trainer={"log_probs_ahead": True})
    step = TrainStep(topology, Replica(topology, torch.device("cpu")))
    precomputed = PrecomputedLogProbs()
    for group, alone in groups_of(random_batch()):
        precomputed.add(group, step.precompute(alone))
    batch, share = precomputed.put_into(random_batch(), {group: group for group in range(4)})
    monkeypatch.setattr(step._replica, "fill_log_probs", lambda *_: pytest.fail("a forward pass more"))
    assert (step(batch).metrics["train/global_batch_size"], share) == (16.0, 1.0)


def test_replayed_experts_leave_the_old_log_probs_to_the_step(make_topology: MakeTopology, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", "qwen3_moe", initializer_range=0.1)
    topology = make_topology(
        model={"hf_checkpoint": str(tmp_path / "hf"), "random_init": False},
        algorithm=WITH_REFERENCE | {"use_routing_replay": True},
        trainer={"log_probs_ahead": True},
    )
    step = TrainStep(topology, Replica(topology, torch.device("cpu")))
    (_, alone), *_ = groups_of(random_batch())
    columns = step.precompute(alone)
    assert (columns.ref_N is None, columns.old_N is None) == (False, True)
    assert_same_bits(trained(topology, lambda group: True), trained(topology))


def test_old_log_probs_are_those_of_the_weights_and_the_reference_stays(make_topology: MakeTopology) -> None:
    topology = make_topology(algorithm=WITH_REFERENCE, trainer={"log_probs_ahead": True})
    replica = Replica(topology, torch.device("cpu"))
    step, (_, alone) = TrainStep(topology, replica), next(groups_of(random_batch()))
    before = step.precompute(alone)
    assert before.ref_N is not None
    assert before.old_N is not None
    assert np.array_equal(before.ref_N, before.old_N)
    step(random_batch(1))
    after = step.precompute(alone)
    assert after.ref_N is not None
    assert after.old_N is not None
    assert np.array_equal(after.ref_N, before.ref_N)
    assert not np.allclose(after.old_N, before.old_N, atol=1e-4)
