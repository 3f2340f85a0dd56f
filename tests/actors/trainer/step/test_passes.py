"""How many passes a train step runs: a term with weight 0 runs none, and loads no model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from actors.trainer.algorithms import log_probs
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.train_step import TrainStep
from runtime.settings.topology import Topology
from tests.actors.trainer.hf import write_model, write_mtp_model
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology

TEACHER = {"opd": {"type": "megatron"}}


class Counting(Replica):
    """Counts its passes over micro-batches, and the copies of weights that it makes."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology, torch.device("cpu"))
        self.forward_only = self.training = self.copies = 0

    def _run(self, *args: Any, forward_only: bool = False, **options: Any) -> None:
        self.forward_only += forward_only
        self.training += not forward_only
        super()._run(*args, forward_only=forward_only, **options)

    def weights_copy(self) -> list[torch.Tensor]:
        self.copies += 1
        return super().weights_copy()


def passes(topology: Topology) -> tuple[int, int, int]:
    """Passes for log-probs alone, optimizer steps' passes, and copies of weights, of one train step."""
    replica = Counting(topology)
    step = TrainStep(topology, replica)
    step(random_batch(0))
    return replica.forward_only, replica.training, replica.copies


@pytest.mark.parametrize(
    ("zero", "above"),
    [
        ({"kl": {"type": "k3", "loss_coef": 0.0}}, {"kl": {"type": "k3", "loss_coef": 0.1}}),
        (
            {"kl": {"type": "low_var_kl", "loss_coef": 0.0}, "loss": {"type": "ppo", "eps_clip_high": 0.28}},
            {"kl": {"type": "low_var_kl", "loss_coef": 1e-3}},
        ),
        ({"opd": {"type": "megatron", "kl_coef": 0.0}}, TEACHER),
    ],
    ids=["divergence", "divergence as in slime's recipes", "teacher"],
)
def test_a_term_with_weight_0_runs_no_pass_and_loads_no_model(
    make_topology: MakeTopology, tmp_path: Path, zero: dict[str, Any], above: dict[str, Any]
) -> None:
    write_model(tmp_path / "other")
    model = {"opd_teacher_load": str(tmp_path / "other"), "ref_load": str(tmp_path / "other")}
    plain = {"num_steps_per_rollout": 1}
    assert passes(make_topology(model=model, algorithm=plain | zero)) == (0, 1, 0)
    forward_only, training, copies = passes(make_topology(model=model, algorithm=plain | zero | above))
    assert (forward_only > 0, training, copies) == (True, 1, 1)


@pytest.mark.parametrize(
    ("algorithm", "forward_only"),
    [
        ({}, 0),
        ({"entropy_coef": 0.0}, 0),
        ({"entropy_coef": 0.1}, 0),
        ({"positive_example_nll_weight": 0.0}, 0),
        ({"positive_example_nll_weight": 0.1}, 0),
        ({"use_rollout_logprobs": True, "num_steps_per_rollout": 2}, 0),
        ({"num_steps_per_rollout": 2}, 1),  # old log-probs of the second optimizer step's samples
        ({"num_steps_per_rollout": 2, "loss": {"type": "gpg"}}, 0),  # it has no ratio
        ({"tis": {"type": "clip", "batch_normalize": True}}, 1),  # old log-probs before the first optimizer step
        ({"tis": {"type": "clip"}}, 0),
    ],
)
def test_other_terms_share_the_passes_of_the_optimizer_steps(
    make_topology: MakeTopology, algorithm: dict[str, Any], forward_only: int
) -> None:
    algorithm = {"num_steps_per_rollout": 1} | algorithm
    assert passes(make_topology(algorithm=algorithm)) == (forward_only, algorithm["num_steps_per_rollout"], 0)


@contextmanager
def entropy_gradients() -> Iterator[list[bool]]:
    """Whether each backward pass of log-probs computed a gradient of the entropy, too."""
    found: list[bool] = []
    gradient = log_probs._gradient

    def looked(*args: Any, **options: Any) -> Any:
        found.append(args[3] is not None)
        return gradient(*args, **options)

    with mock.patch.object(log_probs, "_gradient", looked):
        yield found


@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_the_entropys_gradient_is_computed_if_it_has_a_weight(make_topology: MakeTopology, coef: float) -> None:
    with entropy_gradients() as found:
        passes(make_topology(algorithm={"entropy_coef": coef}))
    assert set(found) == {coef > 0}


def test_an_mtp_layer_runs_in_training_alone(make_topology: MakeTopology, tmp_path: Path) -> None:
    write_mtp_model(tmp_path / "hf")
    topology = make_topology(
        model={"hf_checkpoint": str(tmp_path / "hf"), "random_init": False},
        algorithm={"num_steps_per_rollout": 2, "tis": {"type": "clip", "batch_normalize": True}},
        trainer={"megatron": {"mtp_num_layers": 1}},
    )
    replica = Counting(topology)
    with_gradients: list[bool] = []
    replica.chunks[0].mtp.layers[0].register_forward_hook(lambda *_: with_gradients.append(torch.is_grad_enabled()))
    TrainStep(topology, replica)(random_batch(0))
    assert replica.forward_only == 1
    assert with_gradients
    assert all(with_gradients)
