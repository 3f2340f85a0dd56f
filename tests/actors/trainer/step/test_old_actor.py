"""Old log-probs by the weights that sampled each token: against an independent loop, by hand, and after a resume."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.trainer.commands import TrainerRank
from actors.trainer.data.batch import TrainBatch
from actors.trainer.data.precomputed import PrecomputedLogProbs
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.metrics import DIFF
from actors.trainer.step.old_actor import CURRENT, copies_of
from actors.trainer.step.train_step import TrainStep
from runtime.settings.topology import Topology
from tests.actors.trainer.hf import state_of, whole_weights, write_model
from tests.actors.trainer.step.reference import ReferenceTrainer
from tests.actors.trainer.tiny import groups_of, random_batch
from tests.build.topology import MakeTopology
from tests.support.checkpoints import save

KEPT = {"algorithm": {"keep_old_actor": True, "num_steps_per_rollout": 1}, "rollout": {"max_token_staleness": 2}}


def aged(step: int, oldest: int = 2) -> TrainBatch:
    """A random batch whose tokens are up to `oldest` train steps old, of the steps that there were."""
    batch, draw = random_batch(step), np.random.default_rng(step)
    ages_N = draw.integers(0, min(step, oldest) + 1, len(batch.tokens_N))
    return replace(batch, staleness_N=np.where(batch.loss_mask_N, ages_N, -1).astype(np.int32))


def trainer(topology: Topology) -> tuple[Replica, TrainStep]:
    replica = Replica(topology, torch.device("cpu"))
    return replica, TrainStep(topology, replica)


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def changed(**algorithm: Any) -> dict[str, dict[str, Any]]:
    return KEPT | {"algorithm": KEPT["algorithm"] | algorithm}


@pytest.mark.parametrize(
    "algorithm",
    [{}, {"num_steps_per_rollout": 2}, {"tis": {"type": "clip", "upper_bound": 1.5, "batch_normalize": True}}],
    ids=["one step", "two steps", "importance weights"],
)
def test_training_equals_an_independent_loop(
    make_topology: MakeTopology, tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    model = write_model(tmp_path / "weights")
    every = {"get_mismatch_metrics": True}  # the loop below measures the entropy of all samples
    tables = changed(**algorithm, **every) | {
        "model": {"hf_checkpoint": str(tmp_path / "weights"), "random_init": False}
    }
    topology = make_topology(**tables)
    replica, train = trainer(topology)
    loop = ReferenceTrainer(topology, model)
    for step in range(4):
        metrics, expected = train(aged(step)).metrics, loop.train(aged(step))
        for name in expected[0]:
            mean = sum(one[name] for one in expected) / len(expected)
            assert metrics[f"train/{name}"] == pytest.approx(mean, abs=1e-4), name
        assert (metrics["train/old_actor_ratio"] > 0) == (step > 0)
    state = state_of(model)
    for name, weight in whole_weights(replica.complete_chunks(), replica.hf).items():
        torch.testing.assert_close(weight, state[name], rtol=0, atol=2e-4)


def test_tokens_of_exact_engines_have_no_mismatch_however_old_they_are(make_topology: MakeTopology) -> None:
    """The engine's log-probs are those of the weights one train step ago. Without the old actor they differ."""
    found: list[float] = []
    for keeps in (True, False):
        topology = make_topology(**changed(keep_old_actor=keeps) | {"trainer": {"log_probs_ahead": True}})
        _, train = trainer(make_topology(**changed(keep_old_actor=keeps)))
        _, engine = trainer(topology)  # trains the same, and computes log-probs before
        batch = random_batch(1)
        sampled_N = engine._log_probs._by_group.policy(batch, batch.groups_B) if engine._log_probs._by_group else None
        assert sampled_N is not None
        train(random_batch(0))
        ones_N = np.where(batch.loss_mask_N, 1, -1).astype(np.int32)
        batch = replace(batch, staleness_N=ones_N, rollout_log_probs_N=sampled_N * batch.loss_mask_N)
        found.append(train(batch).metrics[DIFF])
    assert found[0] < 1e-6
    assert found[1] > 1e-3


def test_tokens_of_the_current_weights_train_as_without_it(make_topology: MakeTopology) -> None:
    _, train = trainer(make_topology(**KEPT))
    _, other = trainer(make_topology(**changed(keep_old_actor=False)))
    for step in range(3):
        found, expected = train(random_batch(step)).metrics, other(random_batch(step)).metrics
        assert found.pop("train/old_actor_ratio") == 0
        assert without_times(found) == without_times(expected)


@pytest.mark.parametrize("saved_step", [1, 3], ids=["one copy is empty", "all copies are used"])
def test_a_resumed_run_goes_on_to_the_same_bits(make_topology: MakeTopology, tmp_path: Path, saved_step: int) -> None:
    topology = make_topology(**KEPT, train={"num_steps": 8})
    rank = TrainerRank(topology, tmp_path / "run")
    for step in range(saved_step):
        rank.train(aged(step))
    save(rank, step=saved_step)
    expected = [without_times(rank.train(aged(step)).metrics) for step in range(saved_step, saved_step + 3)]
    again = TrainerRank(topology, tmp_path / "run")
    assert again.resume() == saved_step
    assert [without_times(again.train(aged(step)).metrics) for step in range(saved_step, saved_step + 3)] == expected
    assert expected[0]["train/old_actor_ratio"] > 0.2


def test_old_log_probs_that_were_precomputed_give_way(make_topology: MakeTopology) -> None:
    topology = make_topology(**changed(num_steps_per_rollout=2), trainer={"log_probs_ahead": True})
    found: list[dict[str, float]] = []
    for precomputes in (False, True):
        _, train = trainer(topology)
        train(aged(0))
        batch, precomputed = aged(1), PrecomputedLogProbs()
        for group, alone in groups_of(batch) if precomputes else ():
            precomputed.add(group, train.precompute(alone))
        batch, _ = precomputed.put_into(batch, {group: group for group in range(4)})
        found.append(without_times(train(batch).metrics))
    assert found[0] == found[1]
    assert found[0]["train/old_actor_ratio"] > 0.2


@pytest.mark.parametrize(
    ("steps", "kept", "expected"),
    [
        (0, [None, None], [CURRENT, CURRENT, CURRENT]),
        (5, [3, 4], [CURRENT, 1, 0]),
        (5, [4, 3], [CURRENT, 0, 1]),
        (5, [None, 4], [CURRENT, 1, 1]),  # nothing older is there
        (6, [3, 4], [CURRENT, CURRENT, 1]),  # step 5 had no batch: its weights are the current ones
        (5, [2, 4], [CURRENT, 1, 1]),  # step 3 had no batch: its weights are those before step 4
    ],
)
def test_a_token_gets_the_weights_that_sampled_it(steps: int, kept: list[int | None], expected: list[int]) -> None:
    batch = random_batch(0)
    for age, number in enumerate(expected):
        ages_N = np.full(len(batch.tokens_N), age, dtype=np.int32)
        found_N = copies_of(replace(batch, staleness_N=ages_N), steps, kept)
        assert set(found_N[batch.loss_mask_N != 0]) == {number}
        assert set(found_N[batch.loss_mask_N == 0]) == {CURRENT}
