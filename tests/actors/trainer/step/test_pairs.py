"""Training on preference pairs: against plain torch, with pairs whole in every layout of micro-batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from actors.trainer.data.batch import TrainBatch
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.train_step import TrainStep
from runtime.settings.topology import Topology
from tests.actors.trainer.hf import whole_weights, write_model
from tests.actors.trainer.tiny import pairs
from tests.build.topology import MakeTopology

CPU = torch.device("cpu")
ADAM_EPS = 1e-4  # at 1e-8 a gradient that is rounding alone moves its weight by all of the learning rate


def topology_of(make_topology: MakeTopology, directory: Path, *, max_tokens: int, **algorithm: Any) -> Topology:
    return make_topology(
        model={"hf_checkpoint": str(directory), "random_init": False},
        rollout={"rollout_batch_size": 8, "n_samples_per_prompt": 1},
        algorithm={"loss": {"type": "dpo"}, **algorithm},
        optimizer={"weight_decay": 0.0, "adam_eps": ADAM_EPS},
        train={"max_tokens_per_gpu": max_tokens},
    )


def log_prob(model: Any, batch: TrainBatch, sample: int) -> tuple[torch.Tensor, int]:
    """Sum of the log-probs of a sample's trained tokens, and their number."""
    tokens = slice(batch.starts_B[sample], batch.starts_B[sample] + batch.lengths_B[sample])
    ids = torch.from_numpy(batch.tokens_N[tokens]).long()
    chosen = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    mask = torch.from_numpy(batch.loss_mask_N[tokens]).bool()[1:]
    return chosen[mask].sum(), int(mask.sum())


def plain_loss(model: Any, reference: Any, batch: TrainBatch, pair: int, kind: str, beta: float) -> torch.Tensor:
    """The loss of a pair as anyone would write it."""
    distances: list[torch.Tensor] = []
    for sample in (2 * pair, 2 * pair + 1):
        total, count = log_prob(model, batch, sample)
        if not count:
            return total * 0.0
        with torch.no_grad():
            base = log_prob(reference, batch, sample)[0]
        distances.append((total - base) / (count if kind == "ipo" else 1))
    margin = distances[0] - distances[1]
    return (margin - 1 / (2 * beta)) ** 2 if kind == "ipo" else -logsigmoid(beta * margin)


@pytest.mark.parametrize("max_tokens", [20, 4096], ids=["many micro-batches", "one micro-batch"])
@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_training_equals_a_plain_loop(make_topology: MakeTopology, tmp_path: Path, kind: Any, max_tokens: int) -> None:
    model, reference = write_model(tmp_path / "weights"), write_model(tmp_path / "weights")
    settings: dict[str, Any] = {
        "num_steps_per_rollout": 2,
        "loss": {"type": "preference_ipo" if kind == "ipo" else "dpo", "beta": 0.3},
    }
    topology = topology_of(make_topology, tmp_path / "weights", max_tokens=max_tokens, **settings)
    replica = Replica(topology, CPU)
    step = TrainStep(topology, replica)
    adam = torch.optim.AdamW(model.parameters(), lr=topology.optimizer.lr, weight_decay=0.0, eps=ADAM_EPS)
    for batch in map(pairs, range(3)):
        losses: list[float] = []
        for half in (range(4), range(4, 8)):
            adam.zero_grad()
            loss = torch.stack([plain_loss(model, reference, batch, pair, kind, 0.3) for pair in half]).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), topology.optimizer.clip_grad)
            adam.step()
            losses.append(loss.item())
        assert step(batch).metrics["train/preference_loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    state = model.state_dict()
    for name, weight in whole_weights(replica.complete_chunks(), replica.hf).items():
        torch.testing.assert_close(weight, state[name], rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_an_evaluation_of_held_out_pairs_is_that_of_plain_torch(
    make_topology: MakeTopology, tmp_path: Path, kind: Any
) -> None:
    model, reference = write_model(tmp_path / "weights"), write_model(tmp_path / "weights")
    settings: dict[str, Any] = {
        "num_steps_per_rollout": 1,
        "loss": {"type": "preference_ipo" if kind == "ipo" else "dpo", "beta": 0.3},
    }
    topology = topology_of(make_topology, tmp_path / "weights", max_tokens=4096, **settings)
    replica = Replica(topology, CPU)
    step = TrainStep(topology, replica)
    step(pairs(0))
    weights = whole_weights(replica.complete_chunks(), replica.hf)
    model.load_state_dict(weights)
    known, batch = {name: weight.clone() for name, weight in weights.items()}, pairs(1)
    found = step.evaluate(batch)
    assert all(torch.equal(weight, known[name]) for name, weight in weights.items())
    with torch.no_grad():
        losses = [plain_loss(model, reference, batch, pair, kind, 0.3).item() for pair in range(8)]
    assert found.num_pairs == 8
    assert found.sums["train/preference_loss"] == pytest.approx(sum(losses), abs=1e-4)
    assert found.sums["train/rewards_accuracies"] == sum(0 < loss < expected_at_zero(kind) for loss in losses)


def expected_at_zero(kind: str) -> float:
    """The loss of a pair whose margin is 0: below it the margin is above 0."""
    return (1 / 0.6) ** 2 if kind == "ipo" else float(np.log(2))
