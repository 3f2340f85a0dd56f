"""Train steps with a teacher: in the trainer, and in an engine pool whose log-probs are columns of the batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.trainer.data.batch import make_micro_batch
from tests.actors.trainer.hf import whole_weights, write_model
from tests.actors.trainer.step.test_train_step import compared, trainer
from tests.actors.trainer.tiny import random_batch, with_topk
from tests.build.topology import MakeTopology, joined


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("use_rollout_logprobs", [False, True])
def test_distillation_from_a_teacher_in_the_trainer_equals_an_independent_loop(
    make_topology: MakeTopology, tmp_path: Path, steps: int, use_rollout_logprobs: bool
) -> None:
    directories = [tmp_path / "weights", tmp_path / "teacher"]
    model, teacher = write_model(directories[0]), write_model(directories[1], initializer_range=0.1)
    topology = make_topology(
        model={"hf_checkpoint": str(directories[0]), "random_init": False, "opd_teacher_load": str(directories[1])},
        algorithm={"num_steps_per_rollout": steps, "opd": {"type": "megatron", "kl_coef": 0.5}}
        | {"use_rollout_logprobs": use_rollout_logprobs},
        rollout={"temperature": 0.8},
    )
    compared(topology, model, [random_batch(step) for step in range(2)], teacher=teacher)


@pytest.mark.parametrize(
    "settings",
    [
        {"opd": {"distillation": {"type": "forward"}}},
        {
            "num_steps_per_rollout": 4,
            "entropy_coef": 0.1,
            "opd": {"distillation": {"type": "reverse"}},
        },
        {"opd": {"distillation": {"type": "reverse", "zero_outside_topk": True, "coef": 0.01}}},
        {
            "num_steps_per_rollout": 1,
            "opd": {"distillation": {"type": "mixed", "mixed_kl_weight": 0.3}},
        },
    ],
    ids=lambda settings: f"{settings['opd']['distillation']['type']}, {len(settings)}",
)
def test_distillation_from_likeliest_tokens_equals_an_independent_loop(
    make_topology: MakeTopology, tmp_path: Path, settings: dict[str, Any]
) -> None:
    model = write_model(tmp_path / "weights")
    topology = make_topology(
        model={"hf_checkpoint": str(tmp_path / "weights"), "random_init": False},
        algorithm=joined({"opd": {"type": "sglang", "kl_coef": 0.0, "distillation": {"coef": 0.5}}}, settings),
    )
    compared(topology, model, [with_topk(random_batch(step)) for step in range(2)])


def test_without_rewards_the_teacher_alone_is_followed(make_topology: MakeTopology) -> None:
    """All rewards equal: the loss is the divergence, whose gradient moves the weights, and which falls."""
    algorithm = {"opd": {"type": "sglang", "kl_coef": 0.0, "distillation": {"type": "forward", "coef": 1.0}}}
    topology = make_topology(algorithm=algorithm, optimizer={"lr": 1e-2})
    step, _ = trainer(topology)
    batch = with_topk(random_batch(0))
    batch = replace(batch, rewards_B=np.zeros_like(batch.rewards_B), raw_rewards_B=np.zeros_like(batch.rewards_B))
    metrics = [step(replace(batch, step=number)).metrics for number in range(4)]
    assert all(one["train/loss"] == pytest.approx(one["train/distillation_kl"]) for one in metrics)
    assert metrics[0]["train/grad_norm"] > 0
    assert metrics[3]["train/distillation_kl"] < metrics[0]["train/distillation_kl"] - 0.1
    assert "train/opd_reverse_kl" not in metrics[0]
    with pytest.raises(ValueError, match="samples have no top-k log-probs of a teacher"):
        step(replace(batch, step=4, teacher_topk_ids_N=None, teacher_topk_log_probs_N=None))


@pytest.mark.parametrize("divergence", ["loss_coef", "reward_coef"])
def test_columns_of_engines_train_as_the_same_log_probs_of_the_trainer(
    make_topology: MakeTopology, tmp_path: Path, divergence: str
) -> None:
    """A teacher and a reference in engine pools: the batch has their columns, and the trainer keeps no weights."""
    write_model(tmp_path / "teacher", initializer_range=0.1)
    algorithm = {"kl": {"type": "k1", divergence: 0.2}}
    model = {"ref_load": str(tmp_path / "teacher"), "opd_teacher_load": str(tmp_path / "teacher")}
    step, _ = trainer(make_topology(model=model, algorithm=algorithm | {"opd": {"type": "megatron"}}))
    batch = random_batch(0)
    micro_batches = [make_micro_batch(batch, np.arange(len(batch.lengths_B)), packed=False)]
    assert step._log_probs.teacher is not None
    column_N = step._log_probs.teacher.log_probs(batch, micro_batches)
    expected = step(batch).metrics
    topology = make_topology(
        algorithm=algorithm | {"opd": {"type": "sglang"}},
        engines={"ref": {"kind": "tiny", "hf_checkpoint": "none"}},
    )
    other, _ = trainer(topology)
    assert (other._log_probs.teacher, other._log_probs.reference) == (None, None)
    found = other(replace(batch, teacher_log_probs_N=column_N, ref_log_probs_N=column_N)).metrics
    for name in ("train/loss", "train/opd_reverse_kl", "train/grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)
    without, _ = trainer(make_topology(algorithm={"opd": {"type": "sglang"}}))
    assert without(replace(batch, teacher_log_probs_N=column_N)).metrics["train/loss"] != pytest.approx(
        expected["train/loss"], rel=1e-5
    )
    with pytest.raises(ValueError, match="samples have no log-probs of a teacher"):
        other(batch)
    with pytest.raises(ValueError, match=r"samples have no log-probs of the reference, as of engines\.ref"):
        other(replace(batch, teacher_log_probs_N=column_N))


def test_the_policy_is_bit_equal_before_and_after_a_pass_of_the_teacher(
    make_topology: MakeTopology, tmp_path: Path
) -> None:
    write_model(tmp_path / "teacher", initializer_range=0.1)
    model = {"opd_teacher_load": str(tmp_path / "teacher")}
    step, replica = trainer(make_topology(model=model, algorithm={"opd": {"type": "megatron"}}))
    batch = random_batch(0)
    micro_batches = [make_micro_batch(batch, np.arange(len(batch.lengths_B)), packed=False)]
    before = {name: weight.clone() for name, weight in whole_weights(replica.complete_chunks(), replica.hf).items()}
    assert step._log_probs.teacher is not None
    first, second = (step._log_probs.teacher.log_probs(batch, micro_batches) for _ in range(2))
    own = np.zeros_like(first)
    replica.fill_log_probs(micro_batches, own)
    assert np.array_equal(first, second)
    assert np.abs(first - own).max() > 0.1
    for name, weight in whole_weights(replica.complete_chunks(), replica.hf).items():
        assert torch.equal(weight, before[name]), name
