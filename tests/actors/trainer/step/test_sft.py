"""Training on demonstrations: against plain torch, and without anything of a policy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from actors.trainer.data.batch import TrainBatch
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.train_step import TrainStep
from runtime.settings.topology import Topology
from tests.actors.trainer.hf import whole_weights, write_model
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology

CPU = torch.device("cpu")
IGNORED = -100
ADAM_EPS = 1e-4  # at 1e-8 a gradient that is rounding alone moves its weight by all of the learning rate


def plain_loss(model: Any, batch: TrainBatch, samples: range, *, per_token: bool) -> torch.Tensor:
    """Cross entropy as anyone would write it, one sample at a time."""
    by_rollout: dict[int, list[torch.Tensor]] = {}
    for index in samples:
        tokens = slice(batch.starts_B[index], batch.starts_B[index] + batch.lengths_B[index])
        ids = torch.from_numpy(batch.tokens_N[tokens]).long()
        targets = ids.where(torch.from_numpy(batch.loss_mask_N[tokens]).bool(), IGNORED)[1:]
        losses = cross_entropy(model(ids[None]).logits[0, :-1], targets, ignore_index=IGNORED, reduction="none")
        by_rollout.setdefault(int(batch.rollouts_B[index]), []).append(losses[targets != IGNORED])
    rollouts = [torch.cat(parts) for parts in by_rollout.values()]
    if per_token:
        return torch.cat(rollouts).mean()
    return torch.stack([losses.mean() if len(losses) else losses.sum() for losses in rollouts]).mean()


def demonstrations(step: int) -> TrainBatch:
    return random_batch(step, num_groups=16, group_size=1)


def topology_of(make_topology: MakeTopology, directory: Path | None = None, **algorithm: Any) -> Topology:
    model = {} if directory is None else {"hf_checkpoint": str(directory), "random_init": False}
    return make_topology(
        model=model,
        rollout={"rollout_batch_size": 16, "n_samples_per_prompt": 1},
        algorithm={"num_steps_per_rollout": 1, "loss": {"type": "sft"}, **algorithm},
        optimizer={"weight_decay": 0.0, "adam_eps": ADAM_EPS},
    )


@pytest.mark.parametrize("per_token", [False, True], ids=["mean of samples", "mean of tokens"])
def test_training_equals_a_plain_loop(make_topology: MakeTopology, tmp_path: Path, per_token: bool) -> None:
    model = write_model(tmp_path / "weights")
    topology = topology_of(
        make_topology, tmp_path / "weights", reduction={"type": "token-mean" if per_token else "rollout-mean"}
    )
    replica = Replica(topology, CPU)
    step = TrainStep(topology, replica)
    adam = torch.optim.AdamW(model.parameters(), lr=topology.optimizer.lr, weight_decay=0.0, eps=ADAM_EPS)
    for batch in map(demonstrations, range(3)):
        loss = plain_loss(model, batch, range(len(batch.lengths_B)), per_token=per_token)
        assert step(batch).metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-5)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), topology.optimizer.clip_grad)
        adam.step()
    state = model.state_dict()
    for name, weight in whole_weights(replica.complete_chunks(), replica.hf).items():
        torch.testing.assert_close(weight, state[name], rtol=0, atol=2e-4)


def test_metrics_speak_of_the_loss_and_of_no_policy(make_topology: MakeTopology) -> None:
    topology = topology_of(make_topology, num_steps_per_rollout=2)
    metrics = TrainStep(topology, Replica(topology, CPU))(demonstrations(0)).metrics
    assert {"train/loss", "train/sft_loss", "train/entropy_loss", "train/grad_norm", "train/lr-pg_0"} <= metrics.keys()
    foreign = ("reward", "advantage", "kl", "clipfrac", "logprob", "log_probs", "staleness")
    assert [name for name in metrics if any(word in name for word in foreign) and "time" not in name] == []


def test_demonstrations_are_learnt(make_topology: MakeTopology) -> None:
    topology = topology_of(make_topology, reduction={"type": "token-mean"})
    step = TrainStep(topology, Replica(topology, CPU))
    batch = demonstrations(0)
    losses = [step(batch).metrics["train/loss"] for _ in range(8)]
    assert losses[-1] < losses[0] / 2
