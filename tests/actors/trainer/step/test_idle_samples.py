"""Samples without a term in the loss get no passes, and train nothing else than if they did."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

from actors.trainer.data.batch import TrainBatch
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step import train_step
from actors.trainer.step.objective import Objective
from actors.trainer.step.train_step import TrainStep
from runtime.settings import terms
from runtime.settings.reading.config import type_of
from runtime.settings.rules.algorithm import allows
from runtime.settings.tables.algorithm import AlgorithmConfig
from runtime.settings.tables.losses import PrimeRlLoss
from runtime.settings.terms import terms_of_all
from runtime.settings.topology import Topology
from tests.actors.trainer.hf import whole_weights
from tests.actors.trainer.step.test_combinations import LOSSES
from tests.actors.trainer.tiny import random_batch
from tests.build.losses import inputs
from tests.build.topology import MakeTopology, topology_with

ONE: dict[str, Any] = {"num_steps_per_rollout": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "two steps": {},
    "one step": ONE,
    "four steps": {"num_steps_per_rollout": 4},
    "GSPO": {"loss": {"type": "gspo", "eps_clip": 0.05}},
    "GMPO": {"loss": {"type": "gmpo"}},
    "DPPO": {"loss": {"type": "dppo_tv"}},
    "engine's log-probs": {"use_rollout_logprobs": True},
    "per token": {"reduction": {"type": "token-mean"}},
    "Dr. GRPO": {"reduction": {"type": "seq-mean-token-sum-norm", "scale_factor": 4}},
    "by sample": {"reduction": {"type": "seq-mean-token-mean", "count_masked_rollouts": False}},
    "corrected": {"tis": {"type": "clip"}, "rs": {"type": "ratio"}, "opsm_delta": 1e-4},
}


def flat(step: int, groups: tuple[int, ...] = (1, 2)) -> TrainBatch:
    """A random batch in which some groups have equal rewards."""
    batch = random_batch(step)
    return replace(batch, rewards_B=np.where(np.isin(batch.groups_B, groups), 0.3, batch.rewards_B))


class Trained(NamedTuple):
    """What training came to."""

    metrics: list[dict[str, float]]  # of each train step
    gradients: list[torch.Tensor]  # of each optimizer step, before they are clipped
    weights: dict[str, torch.Tensor]  # at the end


def trained(topology: Topology, batches: list[TrainBatch]) -> Trained:
    replica = Replica(topology, torch.device("cpu"))
    step, gradients, move = TrainStep(topology, replica), list[torch.Tensor](), replica.optimizer_step

    def look(**arguments: float) -> float:
        parameters: list[Any] = list(replica.chunks[0].parameters())
        gradients.append(torch.cat([parameter.main_grad.flatten() for parameter in parameters]))
        return move(**arguments)

    replica.optimizer_step = look  # pyright: ignore[reportAttributeAccessIssue]
    metrics = [step(batch).metrics for batch in batches]
    return Trained(metrics, gradients, dict(whole_weights(replica.complete_chunks(), replica.hf)))


def all_passed(topology: Topology, batches: list[TrainBatch]) -> Trained:
    with mock.patch.object(train_step, "terms_of_all", return_value=("all",)):
        return trained(topology, batches)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["padded", "packed"])
@pytest.mark.parametrize("algorithm", SETTINGS.values(), ids=SETTINGS)
def test_they_train_the_same_without_passes(
    make_topology: MakeTopology, algorithm: dict[str, Any], packed: bool
) -> None:
    optimizer = {"lr": 0.0, "weight_decay": 0.0}  # AdamW makes much of small differences
    topology = make_topology(algorithm=algorithm, trainer={"packed": packed}, optimizer=optimizer)
    batches = [flat(0), flat(1, groups=(0, 3)), flat(2, groups=(0, 1, 2, 3))]
    found, expected = trained(topology, batches), all_passed(topology, batches)
    for one, other in zip(found.metrics, expected.metrics, strict=True):
        for name in ("train/loss", "train/pg_loss", "train/grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-6, abs=1e-7), name  # terms of about 1, both signs
        assert one["train/num_skipped_steps"] == other["train/num_skipped_steps"]
    for one, other in zip(found.gradients, expected.gradients, strict=True):
        assert float((one - other).norm()) <= 1e-6 * float(other.norm())
    counts = [one["train/num_idle_samples"] for one in found.metrics]
    assert counts[0] >= np.isin(batches[0].groups_B, (1, 2)).sum()  # others have no trained token, or the mean reward
    assert counts[0] < len(batches[0].lengths_B)
    assert counts[2] == len(batches[2].lengths_B)
    assert [one["train/num_idle_samples"] for one in expected.metrics] == [0, 0, 0]


def test_weight_decay_and_moments_go_on_as_with_passes(make_topology: MakeTopology) -> None:
    topology = make_topology(optimizer={"lr": 1e-2, "weight_decay": 0.1, "adam_eps": 1e-4})
    batches = [flat(0), flat(1, groups=(0, 1, 2, 3)), flat(2, groups=(0, 3))]
    found, expected = trained(topology, batches).weights, all_passed(topology, batches).weights
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=5e-5)


def test_metrics_of_log_probs_are_those_of_the_other_samples(make_topology: MakeTopology) -> None:
    """By the mean of a batch that has no others. A step without any sample has none of these metrics."""
    topology = make_topology(algorithm=ONE)
    batch = flat(0)
    (found,) = trained(topology, [batch]).metrics
    kept_B = ~np.isin(batch.groups_B, (1, 2))
    with mock.patch.object(train_step, "idle_samples", return_value=~kept_B):
        (again,) = trained(topology, [random_batch(0)]).metrics
    assert found["train/entropy_loss"] == pytest.approx(again["train/entropy_loss"], rel=1e-6)
    (whole,) = all_passed(topology, [batch]).metrics
    assert whole["train/entropy_loss"] != pytest.approx(found["train/entropy_loss"], rel=1e-4)
    (none,) = trained(topology, [flat(0, groups=(0, 1, 2, 3))]).metrics
    assert "train/entropy_loss" not in none
    assert none["train/loss"] == none["train/grad_norm"] == 0


def test_a_rollout_with_a_term_is_passed_whole(make_topology: MakeTopology) -> None:
    """Its parts may have advantages of their own; a metric of one part alone would have the whole share."""
    batch = flat(0, groups=(0, 1, 2, 3))
    parts = np.flatnonzero(batch.rollouts_B == 5)
    assert len(parts) == 2
    rewards = batch.baseline_rewards_B
    assert rewards is not None
    topology = make_topology(algorithm=ONE | {"estimator": {"type": "remax"}})
    even = np.full_like(rewards, 0.3)
    even[parts[1]] = 0.0
    (found,) = trained(topology, [replace(batch, baseline_rewards_B=even)]).metrics
    assert found["train/num_idle_samples"] == len(batch.lengths_B) - 2


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({}, ()),
        ({"algorithm": {"entropy_coef": 0.1}}, ("algorithm.entropy_coef",)),
        ({"algorithm": {"entropy_coef_end": 0.1}}, ("algorithm.entropy_coef_end",)),
        ({"algorithm": {"entropy_coef": 0.1, "entropy_coef_end": 0.0}}, ("algorithm.entropy_coef",)),
        ({"algorithm": {"entropy_coef": 0.0, "entropy_coef_end": 0.0}}, ()),
        ({"algorithm": {"kl": {"type": "k1", "loss_coef": 0.1}}}, ("algorithm.kl.loss_coef",)),
        ({"algorithm": {"kl": {"type": "k1", "reward_coef": 0.1}}}, ("algorithm.kl.reward_coef",)),
        ({"algorithm": {"kl": {"type": "k2", "metric_interval": 2}}}, ()),
        ({"algorithm": {"loss": {"type": "sft"}}}, ("algorithm.loss",)),
        ({"algorithm": {"loss": {"type": "dpo"}}}, ("algorithm.loss",)),
        ({"algorithm": {"loss": {"type": "custom", "function": "a:b"}}}, ("algorithm.loss",)),
        ({"algorithm": {"loss": {"type": "prime_rl", "kl_tau": 0.0}}}, ()),
        ({"algorithm": {"opd": {"type": "megatron"}}}, ("algorithm.opd",)),
        ({"algorithm": {"positive_example_nll_weight": 0.1}}, ("algorithm.positive_example_nll_weight",)),
        ({"algorithm": {"rollout_data_postprocess": "a:b"}}, ("algorithm.rollout_data_postprocess",)),
        ({"algorithm": {"get_mismatch_metrics": True}}, ("algorithm.get_mismatch_metrics",)),
        ({"algorithm": {"tis": {"type": "clip", "batch_normalize": True}}}, ("algorithm.tis.batch_normalize",)),
        ({"algorithm": {"tis": {"type": "custom", "function": "a:b"}}}, ("algorithm.tis.function",)),
        ({"algorithm": {"estimator": {"type": "ppo"}}}, ("algorithm.estimator",)),
        ({"trainer": {"megatron": {"moe_aux_loss_coeff": 0.1}}}, ("trainer.megatron.moe_aux_loss_coeff",)),
        ({"trainer": {"megatron": {"moe_z_loss_coeff": 0.1}}}, ("trainer.megatron.moe_z_loss_coeff",)),
        (
            {"trainer": {"megatron": {"moe_router_bias_update_rate": 0.1}}},
            ("trainer.megatron.moe_router_bias_update_rate",),
        ),
        ({"trainer": {"megatron": {"mtp_num_layers": 1}}}, ("trainer.megatron.mtp_num_layers",)),
    ],
)
def test_a_term_for_all_samples_is_named(tables: dict[str, Any], named: tuple[str, ...]) -> None:
    assert terms_of_all(topology_with(**tables)) == named


def test_a_setting_that_is_not_listed_counts_as_a_term() -> None:
    """Each key of [algorithm] is in one of the lists, or it is one of these, whose default has no term."""
    others = set(AlgorithmConfig.__struct_fields__) - terms.WITHOUT_TERM - terms.LOOKED_INTO
    assert others == {
        "opd",
        "rollout_data_postprocess",
        "positive_example_nll_weight",
        "entropy_coef",
        "get_mismatch_metrics",
    }
    assert terms.WITHOUT_TERM | terms.LOOKED_INTO <= set(AlgorithmConfig.__struct_fields__)


def declared() -> Iterator[Topology]:
    """Every loss with each of its corrections."""
    more: list[dict[str, Any]] = [{}, {"tis": {"type": "clip"}}, {"rs": {"type": "ratio"}}, {"opsm_delta": 1e-4}]
    for table in LOSSES:
        for named in more:
            if all(allows(table, name) for name in named):
                for options in ({}, {"kl_tau": 0.0}) if issubclass(table, PrimeRlLoss) else ({},):
                    yield topology_with(algorithm={"loss": {"type": type_of(table), **options}, **named})


def wrong(topologies: Iterator[Topology]) -> list[str]:
    """Settings that are said to have no term for all samples, and have one; and losses with none that say they have."""
    found: list[str] = []
    draw = np.random.default_rng(7)
    for topology in topologies:
        new, old, rollout = (torch.from_numpy(-np.abs(draw.normal(size=12)) - 0.01) for _ in range(3))
        new.requires_grad_()
        entropy = torch.from_numpy(np.abs(draw.normal(size=12))).requires_grad_()
        columns = inputs(new, old, torch.zeros(12).double(), rollout=rollout, entropy=entropy, lengths=(4, 8))
        loss = Objective(topology.algorithm)(columns, entropy_coef=topology.algorithm.entropy_coef).loss
        loss.sum().backward()
        gradients = [column.grad for column in (new, entropy) if column.grad is not None]
        has_term = bool(loss.any()) or any(bool(gradient.any()) for gradient in gradients)
        if has_term != bool(terms_of_all(topology)):
            found.append(str(topology.algorithm))
    return found


def test_what_is_declared_is_what_the_loss_computes() -> None:
    topologies = list(declared())
    assert wrong(iter(topologies)) == []
    assert {bool(terms_of_all(topology)) for topology in topologies} == {True, False}


def test_a_term_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    entropy = topology_with(algorithm={"entropy_coef": 0.1})
    assert wrong(iter([entropy])) == []
    monkeypatch.setattr(terms, "WITHOUT_TERM", terms.WITHOUT_TERM | {"entropy_coef"})
    assert len(wrong(iter([entropy]))) == 1
    monkeypatch.setattr(PrimeRlLoss, "vanishes", True)
    assert len(wrong(declared())) == 1
    plain = Objective.__call__
    monkeypatch.setattr(
        Objective,
        "__call__",
        lambda self, given, **options: plain(self, given, **options)._replace(loss=given.log_probs * 1e-9),
    )
    assert len(wrong(declared())) > 1
