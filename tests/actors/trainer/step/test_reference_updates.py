"""A reference that takes the policy's weights every k train steps, and an optimizer that forgets its moments."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.trainer.commands import TrainerRank
from actors.trainer.data.precomputed import PrecomputedLogProbs
from actors.trainer.megatron.checkpoint import load_checkpoint
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.train_step import TrainStep
from runtime.settings.topology import Topology
from tests.actors.trainer.hf import state_of, whole_weights, write_model
from tests.actors.trainer.step.reference import ReferenceTrainer
from tests.actors.trainer.step.test_pairs import pairs
from tests.actors.trainer.tiny import groups_of, random_batch
from tests.build.topology import MakeTopology
from tests.support.checkpoints import save, save_checkpoint

DIVERGENCE = {"num_steps_per_rollout": 1, "kl": {"type": "k3", "loss_coef": 0.3}}
EVERY_SECOND = DIVERGENCE | {"ref_update_interval": 2}


def trainer(topology: Topology) -> tuple[Replica, TrainStep]:
    replica = Replica(topology, torch.device("cpu"))
    return replica, TrainStep(topology, replica)


def weights_of(replica: Replica) -> dict[str, torch.Tensor]:
    return whole_weights(replica.complete_chunks(), replica.hf)


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def test_every_second_step_equals_an_independent_loop(make_topology: MakeTopology, tmp_path: Path) -> None:
    directories = [tmp_path / "weights", tmp_path / "reference"]
    model = write_model(directories[0])
    reference_model = write_model(directories[1], initializer_range=0.1)
    topology = make_topology(
        model={"hf_checkpoint": str(directories[0]), "random_init": False, "ref_load": str(directories[1])},
        algorithm=EVERY_SECOND,
    )
    replica, train = trainer(topology)
    loop = ReferenceTrainer(topology, model, reference_model=reference_model)
    for step in range(5):
        if step in (2, 4):
            reference_model.load_state_dict(model.state_dict())
        metrics, (expected,) = train(random_batch(step)).metrics, loop.train(random_batch(step))
        assert metrics["train/kl_loss"] == pytest.approx(expected["kl_loss"], abs=1e-4)
        assert (metrics["train/kl_loss"] < 1e-6) == (step in (2, 4))
        assert metrics["train/ref_step"] == step // 2 * 2
    state = state_of(model)
    for name, weight in weights_of(replica).items():
        torch.testing.assert_close(weight, state[name], rtol=0, atol=2e-4)


def test_without_an_interval_the_reference_stays(make_topology: MakeTopology) -> None:
    _, train = trainer(make_topology(algorithm=DIVERGENCE))
    metrics = [train(random_batch(step)).metrics for step in range(4)]
    assert [one["train/kl_loss"] > 1e-6 for one in metrics] == [False, True, True, True]
    assert "train/ref_step" not in metrics[0]


IN_BFLOAT16 = {"model": {"dtype": "bfloat16"}, "trainer": {"optimizer": {"use_distributed_optimizer": True}}}


@pytest.mark.parametrize(
    ("saved_step", "tables"),
    [(1, {}), (2, {}), (3, {}), (3, IN_BFLOAT16)],
    ids=["before the first", "when one is due", "after one", "after one, in bfloat16, with the distributed optimizer"],
)
def test_a_resumed_run_goes_on_to_the_same_bits(
    make_topology: MakeTopology, tmp_path: Path, saved_step: int, tables: dict[str, Any]
) -> None:
    topology = make_topology(train={"num_steps": 8}, algorithm=EVERY_SECOND, **tables)
    rank = TrainerRank(topology, tmp_path / "run")
    for step in range(saved_step):
        rank.train(random_batch(step))
    save(rank, step=saved_step)
    expected = [without_times(rank.train(random_batch(step)).metrics) for step in range(saved_step, 6)]
    again = TrainerRank(topology, tmp_path / "run")
    assert again.resume() == saved_step
    assert [without_times(again.train(random_batch(step)).metrics) for step in range(saved_step, 6)] == expected


def test_another_run_goes_on_with_the_reference_of_the_checkpoint(make_topology: MakeTopology, tmp_path: Path) -> None:
    """Its train steps count from 0; the updates count on."""
    topology = make_topology(train={"num_steps": 8}, algorithm=EVERY_SECOND)
    rank = TrainerRank(topology, tmp_path / "run")
    for step in range(3):
        rank.train(random_batch(step))
    save(rank, step=3)
    expected = [rank.train(random_batch(step)).metrics["train/kl_loss"] for step in (3, 4, 5)]
    other = make_topology(
        train={"num_steps": 5}, algorithm=EVERY_SECOND, trainer={"load": str(tmp_path / "run")}, run={"name": "other"}
    )
    continued = TrainerRank(other, tmp_path / "other")
    assert continued.resume() == 0
    renumbered = [replace(random_batch(step), step=step - 3) for step in (3, 4, 5)]
    assert [continued.train(batch).metrics["train/kl_loss"] for batch in renumbered] == expected


def test_a_checkpoint_without_the_reference_leaves_it_until_the_next_update(
    make_topology: MakeTopology, tmp_path: Path
) -> None:
    replica, train = trainer(make_topology(algorithm=DIVERGENCE))
    for step in range(3):
        train(random_batch(step))
    path = save_checkpoint(replica, tmp_path, step=3, incarnation=1)
    expected = train(random_batch(3)).metrics["train/kl_loss"]
    resumed, train_on = trainer(make_topology(algorithm=EVERY_SECOND))
    load_checkpoint(resumed, path)
    assert train_on(random_batch(3)).metrics["train/kl_loss"] == expected
    assert train_on(random_batch(4)).metrics["train/kl_loss"] < 1e-6


def test_an_update_that_falls_on_a_step_without_a_batch_is_not_missed(make_topology: MakeTopology) -> None:
    _, train = trainer(make_topology(algorithm=EVERY_SECOND))
    found = [train(random_batch(step)).metrics for step in (0, 3, 4)]
    assert [one["train/ref_step"] for one in found] == [0, 2, 4]
    assert [one["train/kl_loss"] < 1e-6 for one in found] == [True, True, True]


def test_log_probs_ahead_are_those_of_the_reference_that_their_step_has(make_topology: MakeTopology) -> None:
    ahead = make_topology(algorithm=EVERY_SECOND, trainer={"log_probs_ahead": True})
    found: list[list[dict[str, float]]] = []
    for precomputes in (False, True):
        _, train = trainer(ahead)
        metrics: list[dict[str, float]] = []
        for step in range(5):
            batch, precomputed = random_batch(step), PrecomputedLogProbs()
            for group, alone in groups_of(batch) if precomputes else ():
                precomputed.add(group, train.precompute(alone))
            batch, _ = precomputed.put_into(batch, {group: group for group in range(4)})
            metrics.append(without_times(train(batch).metrics))
        found.append(metrics)
    assert found[0] == found[1]
    assert found[0][4]["train/ref_step"] == 4


def test_preference_pairs_follow_too(make_topology: MakeTopology) -> None:
    topology = make_topology(algorithm={"ref_update_interval": 1, "num_steps_per_rollout": 1, "loss": {"type": "dpo"}})
    _, train = trainer(topology)
    margins = [train(pairs(step)).metrics["train/rewards_margins"] for step in range(2)]
    assert margins == pytest.approx([0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize(
    "trainer_table",
    [
        {},
        {"optimizer": {"use_distributed_optimizer": True}},
    ],
    ids=["plain", "distributed"],
)
def test_a_reset_optimizer_steps_as_a_new_one(
    make_topology: MakeTopology, tmp_path: Path, trainer_table: dict[str, Any]
) -> None:
    """Also after a checkpoint, whose moments it does not use."""
    table = {"reset_optimizer_states": True, "num_steps_per_rollout": 2}
    topology = make_topology(algorithm=table, trainer=trainer_table)
    replica, train = trainer(topology)
    train(random_batch(0))
    path = save_checkpoint(replica, tmp_path, step=1, incarnation=1)
    new, train_new = trainer(topology)
    for weight, other in zip(new.weights(), replica.weights_copy(), strict=True):
        weight.data.copy_(other)
    new.optimizer.reload_model_params()
    train(random_batch(1))
    train_new(random_batch(1))
    resumed, train_on = trainer(topology)
    load_checkpoint(resumed, path)
    train_on(random_batch(1))
    kept, train_kept = trainer(
        make_topology(algorithm=table | {"reset_optimizer_states": False}, trainer=trainer_table)
    )
    for step in range(2):
        train_kept(random_batch(step))
    expected = weights_of(replica)
    for found in (new, resumed):
        assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(found).items())
    assert not all(torch.equal(weight, expected[name]) for name, weight in weights_of(kept).items())
