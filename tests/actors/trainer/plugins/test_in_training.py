"""Train steps with functions of the user: equal to the named ones; later faults end the run, or mask samples."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.trainer.commands import TrainerRank
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.metrics import StepTimer
from actors.trainer.step.train_step import TrainStep
from runtime.functions.load import load_plugin
from runtime.process.actor import InputError
from tests.actors.trainer.hf import whole_weights
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology

FUNCTIONS = """
from dataclasses import replace
import random
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


def same(data):
    return data


def halved(data):
    return replace(data, advantages=data.advantages / 2)


def draws(data):
    kept = np.array([random.random() < 0.5 for _ in data.tokens]) & (torch.rand(len(data.tokens)) < 0.9).numpy()
    return replace(data, loss_mask=data.loss_mask & kept)


def without_mismatch(data):
    assert data.old_log_probs[data.loss_mask].all()
    far = np.abs(data.old_log_probs - data.rollout_log_probs) > 2.0
    return replace(data, loss_mask=data.loss_mask & ~far)


def wrong_later(data):
    return replace(data, tokens=data.tokens + 1) if data.step else data


calls = []


def began(topology):
    calls.append(("init", topology.run.name))


def before_log_probs(topology, model, store_prefix):
    calls.append(("log_probs", len(model), store_prefix))


def before_step(topology, rollout_id, step_id, model, optimizer):
    calls.append(("step", rollout_id, step_id, len(model), len(optimizer.param_groups) > 0))


def fails(topology, rollout_id, step_id, model, optimizer):
    raise RuntimeError(f"at {rollout_id}")


def short(inputs):  # right for two samples of eight tokens
    terms = loss(inputs)
    return (terms.loss[:-1] if len(terms.loss) > 8 else terms.loss), terms.metrics


def nan(inputs):  # for one sample
    terms = loss(inputs)
    wrong = (inputs.sequences.lengths == 5) & (len(terms.loss) > 8)
    return torch.where(wrong, torch.nan, terms.loss), {}
"""
NAMED = {
    "estimator": {"type": "rloo"},
    "tis": {"type": "clip", "upper_bound": 1.5, "lower_bound": 0.5},
    "reduction": {"type": "seq-mean-token-mean"},
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
    every: dict[str, Any] = {"get_mismatch_metrics": True}  # with a loss of the user's, each sample is passed
    own = every | {
        "estimator": {"type": "custom", "function": f"{file}:advantages"},
        "loss": {"type": "custom", "function": f"{file}:loss"},
        "tis": {"type": "custom", "function": f"{file}:weights"},
        "reduction": {"type": "custom", "function": f"{file}:reduce"},
    }
    weights, metrics = trained(make_topology, **every, **NAMED)
    torch.manual_seed(3)
    own_weights, own_metrics = trained(make_topology, **own)
    assert own_metrics == metrics
    assert all(torch.equal(own_weights[name], weight) for name, weight in weights.items())


def test_a_wrong_shape_later_ends_the_run_by_name(make_topology: MakeTopology, file: Path) -> None:
    said = r"algorithm.loss.function = '.*mine.py:short': the loss is a float32 tensor \[\d+\]; expected one number per"
    with pytest.raises(InputError, match=said):
        trained(make_topology, loss={"type": "custom", "function": f"{file}:short"})


def test_a_nan_later_masks_its_samples(make_topology: MakeTopology, file: Path) -> None:
    topology = make_topology(algorithm={"loss": {"type": "custom", "function": f"{file}:nan"}})
    step = TrainStep(topology, Replica(topology, torch.device("cpu")))
    batch = random_batch(1)
    done = step(batch)
    assert done.masked.tolist() == [sample for sample, count in enumerate(batch.mask_sums_B) if count == 5]
    assert 0 < len(done.masked) < len(batch.mask_sums_B)
    assert done.metrics["train/num_skipped_steps"] == 0


def test_data_returned_as_it_is_trains_the_same(make_topology: MakeTopology, file: Path) -> None:
    named: dict[str, Any] = {"get_mismatch_metrics": True, "tis": {"type": "clip", "batch_normalize": True}}
    weights, metrics = trained(make_topology, **named)
    own, own_metrics = trained(make_topology, rollout_data_postprocess=f"{file}:same", **named)
    assert own_metrics == metrics
    assert all(torch.equal(own[name], weight) for name, weight in weights.items())


def test_masked_tokens_train_as_if_they_were_masked_in_the_batch(make_topology: MakeTopology, file: Path) -> None:
    """Denominators too; the masked tokens are found with the log-probs of both."""
    named: dict[str, Any] = {"num_steps_per_rollout": 1, "reduction": {"type": "token-mean"}, "loss": {"type": "gspo"}}
    topology = make_topology(algorithm=named | {"rollout_data_postprocess": f"{file}:without_mismatch"})
    own, batch = Replica(topology, torch.device("cpu")), random_batch()
    old_N = np.zeros_like(batch.rollout_log_probs_N)
    topology_of_log_probs = make_topology(algorithm=named | {"tis": {"type": "clip", "batch_normalize": True}})
    other = TrainStep(topology_of_log_probs, Replica(topology_of_log_probs, torch.device("cpu")))
    columns = other._prepare(batch, other._planner.steps(batch), None, StepTimer())
    old_N = columns.trainer_log_probs_N.numpy()
    far_N = np.abs(old_N - batch.rollout_log_probs_N) > 2.0
    masked = replace(batch, loss_mask_N=batch.loss_mask_N * ~far_N)
    assert 0 < masked.loss_mask_N.sum() < batch.loss_mask_N.sum()
    metrics = TrainStep(topology, own)(batch).metrics
    plain = make_topology(algorithm=named)
    expected = Replica(plain, torch.device("cpu"))
    expected_metrics = TrainStep(plain, expected)(masked).metrics
    for name in ("train/loss", "train/grad_norm", "train/pg_clipfrac"):
        assert metrics[name] == pytest.approx(expected_metrics[name], abs=1e-6), name
    weights = dict(whole_weights(expected.complete_chunks(), expected.hf))
    for name, weight in whole_weights(own.complete_chunks(), own.hf).items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-6)


def test_changed_advantages_train(make_topology: MakeTopology, file: Path) -> None:
    _, metrics = trained(make_topology, num_steps_per_rollout=1)
    _, halved = trained(make_topology, num_steps_per_rollout=1, rollout_data_postprocess=f"{file}:halved")
    assert halved[0]["train/loss"] == pytest.approx(metrics[0]["train/loss"] / 2, abs=1e-6)


def test_random_numbers_of_a_function_are_those_of_the_seed(make_topology: MakeTopology, file: Path) -> None:
    torch.manual_seed(1)
    first, metrics = trained(make_topology, rollout_data_postprocess=f"{file}:draws")
    torch.manual_seed(2)
    second, again = trained(make_topology, rollout_data_postprocess=f"{file}:draws")
    assert again == metrics
    assert all(torch.equal(second[name], weight) for name, weight in first.items())


def test_other_changed_data_ends_the_run_by_name(make_topology: MakeTopology, file: Path) -> None:
    said = "wrong_later': changed tokens; it may change loss_mask and advantages alone"
    with pytest.raises(InputError, match=said):
        trained(make_topology, rollout_data_postprocess=f"{file}:wrong_later")


def test_hooks_are_called_around_steps_in_order(make_topology: MakeTopology, file: Path, tmp_path: Path) -> None:
    names = {"init": "began", "before_log_prob_hook": "before_log_probs", "before_train_step_hook": "before_step"}
    topology = make_topology(
        train={f"custom_megatron_{key}": f"{file}:{name}" for key, name in names.items()},
        algorithm={"num_steps_per_rollout": 2, "kl": {"type": "k1", "loss_coef": 0.1}},
    )
    rank = TrainerRank(topology, tmp_path / "run")
    rank.train(random_batch(0))
    plugin = load_plugin("train.custom_megatron_init", f"{file}:began", parameters=("topology",))
    log_probs = [("log_probs", 1, ""), ("log_probs", 1, "ref_")]
    steps = [("step", 0, number, 1, True) for number in range(2)]
    assert plugin.function.__globals__["calls"] == [("init", "test"), *log_probs, *steps]


def test_a_hook_that_raises_ends_the_run_by_name(make_topology: MakeTopology, file: Path) -> None:
    topology = make_topology(train={"custom_megatron_before_train_step_hook": f"{file}:fails"})
    step = TrainStep(topology, Replica(topology, torch.device("cpu")))
    with pytest.raises(InputError, match=r"before_train_step_hook = '.*mine.py:fails': raised RuntimeError in line"):
        step(random_batch())
