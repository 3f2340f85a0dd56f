"""LoRA with other objectives: demonstrations, preference pairs, and a reference that follows, each as with peft."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.trainer.data.batch import TrainBatch
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.train_step import TrainStep
from tests.actors.trainer.lora.test_training import adapter_tensors, of_peft, started
from tests.actors.trainer.step import test_pairs, test_sft
from tests.actors.trainer.step.reference import ReferenceTrainer
from tests.actors.trainer.tiny import pairs, random_batch
from tests.build.topology import MakeTopology

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it


def sft_loss(model: Any, _reference: Any, batch: TrainBatch) -> Tensor:
    return test_sft.plain_loss(model, batch, range(len(batch.lengths_B)), per_token=False)


def dpo_loss(model: Any, reference: Any, batch: TrainBatch) -> Tensor:
    of_pairs = [test_pairs.plain_loss(model, reference, batch, pair, "sigmoid", 0.3) for pair in range(8)]
    return torch.stack(of_pairs).mean()


Loss = Callable[[Any, Any, TrainBatch], Tensor]
OBJECTIVES: dict[str, tuple[dict[str, Any], Callable[[int], TrainBatch], Loss, str]] = {
    "sft": ({"type": "sft"}, test_sft.demonstrations, sft_loss, "train/sft_loss"),
    "dpo": ({"type": "dpo", "beta": 0.3}, pairs, dpo_loss, "train/preference_loss"),
}


@pytest.mark.parametrize(("loss", "batch_of", "plain", "metric"), OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_training_equals_peft_in_a_plain_loop(
    make_topology: MakeTopology, tmp_path: Path, loss: Any, batch_of: Any, plain: Loss, metric: str
) -> None:
    """From an adapter that is not zero: the reference of the pairs is the model with that adapter."""
    topology, model = started(make_topology, tmp_path, "qwen3", algorithm={"loss": loss, "num_steps_per_rollout": 1})
    reference = copy.deepcopy(model)
    replica = Replica(topology, CPU)
    step, own = TrainStep(topology, replica), list(of_peft(model).values())
    config = topology.optimizer
    adam = torch.optim.AdamW(own, lr=config.lr, weight_decay=config.weight_decay, eps=config.adam_eps)
    for number in range(3):
        batch = batch_of(number)
        expected = plain(model, reference, batch)
        assert step(batch).metrics[metric] == pytest.approx(expected.item(), abs=1e-5)
        adam.zero_grad()
        expected.backward()
        torch.nn.utils.clip_grad_norm_(own, topology.optimizer.clip_grad)
        adam.step()
    for name, parameter in adapter_tensors(replica).items():
        torch.testing.assert_close(parameter, of_peft(model)[name], rtol=0, atol=1e-5)


def test_a_reference_that_follows_takes_the_pair(make_topology: MakeTopology, tmp_path: Path) -> None:
    """Also the first one is the model with the adapter that training started from, not the model alone."""
    algorithm = {"kl": {"type": "k3", "loss_coef": 0.3}, "ref_update_interval": 2, "num_steps_per_rollout": 1}
    topology, model = started(make_topology, tmp_path, "qwen3", algorithm=algorithm)
    reference = copy.deepcopy(model)
    step, loop = (
        TrainStep(topology, Replica(topology, CPU)),
        ReferenceTrainer(topology, model, reference_model=reference, apart=True),
    )
    for number in range(4):
        if number == 2:
            reference.load_state_dict(model.state_dict())
        metrics, (expected,) = step(random_batch(number)).metrics, loop.train(random_batch(number))
        assert metrics["train/kl_loss"] == pytest.approx(expected["kl_loss"], abs=1e-5)
        assert (metrics["train/kl_loss"] < 1e-6) == (number in (0, 2))
