"""Train steps with functions of the user: equal to the named ones; later faults end the run, or mask samples."""

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.train_step import TrainStep
from runtime.process.actor import InputError
from tests.actors.trainer.hf import whole_weights
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology

FUNCTIONS = """
import numpy as np
import torch

from actors.trainer.algorithms.group_baselines import rloo_advantages
from actors.trainer.algorithms.corrections import importance_weights
from actors.trainer.algorithms.policy_losses import ppo_loss
from actors.trainer.algorithms.reductions import reduction


def advantages(inputs):
    return rloo_advantages(inputs.rewards, inputs.groups, inputs.rollouts, group_of_one="zero")


def loss(inputs):
    return ppo_loss(inputs, eps_clip=0.2, eps_clip_high=None, eps_clip_c=None, max_log_ratio=20.0)


def weights(inputs):
    return importance_weights(inputs, level="token", mode="clip", low=0.5, high=1.5)


def reduce(inputs):
    return reduction(inputs.mask_sums, inputs.rollouts, mode="seq-mean-token-mean")


def short(inputs):  # right for two samples of eight tokens
    terms = loss(inputs)
    return (terms.loss[:-1] if len(terms.loss) > 8 else terms.loss), terms.metrics


def nan(inputs):  # for one sample
    terms = loss(inputs)
    wrong = (inputs.sequences.lengths == 5) & (len(terms.loss) > 8)
    return torch.where(wrong, torch.nan, terms.loss), {}
"""
NAMED = {
    "advantage_estimator": "rloo",
    "use_tis": True,
    "tis_clip": 1.5,
    "tis_clip_low": 0.5,
    "loss_agg_mode": "seq-mean-token-mean",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def trained(make_topology: MakeTopology, **algorithm: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """The weights after two train steps, and the metrics of each but times."""
    topology = make_topology(algorithm=algorithm)
    replica = Replica(topology, torch.device("cpu"))
    step = TrainStep(topology, replica)
    metrics = [step(random_batch(number)).metrics for number in range(2)]
    timed = [{name: value for name, value in one.items() if not name.startswith("perf/")} for one in metrics]
    return dict(whole_weights(replica.complete_chunks(), replica.hf)), timed


def test_functions_of_the_user_train_what_the_named_ones_train(make_topology: MakeTopology, file: Path) -> None:
    own = {
        "custom_advantage": f"{file}:advantages",
        "custom_loss": f"{file}:loss",
        "custom_tis": f"{file}:weights",
        "custom_pg_loss_reducer": f"{file}:reduce",
    }
    weights, metrics = trained(make_topology, **NAMED)
    torch.manual_seed(3)
    own_weights, own_metrics = trained(make_topology, use_tis=True, **own)
    assert own_metrics == metrics
    assert all(torch.equal(own_weights[name], weight) for name, weight in weights.items())


def test_a_wrong_shape_later_ends_the_run_by_name(make_topology: MakeTopology, file: Path) -> None:
    said = r"algorithm.custom_loss = '.*mine.py:short': the loss is a float32 tensor \[\d+\]; expected one number per"
    with pytest.raises(InputError, match=said):
        trained(make_topology, custom_loss=f"{file}:short")


def test_a_nan_later_masks_its_samples(make_topology: MakeTopology, file: Path) -> None:
    topology = make_topology(algorithm={"custom_loss": f"{file}:nan"})
    step = TrainStep(topology, Replica(topology, torch.device("cpu")))
    batch = random_batch(1)
    done = step(batch)
    assert done.masked.tolist() == [sample for sample, count in enumerate(batch.mask_sums_B) if count == 5]
    assert 0 < len(done.masked) < len(batch.mask_sums_B)
    assert done.metrics["train/num_skipped_steps"] == 0
