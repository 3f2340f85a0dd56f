"""Whole runs of PPO: colocated with the engine, and again from its samples with a critic on ranks of its own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.whole_runs import Finished, run_topology

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


PPO = (
    "algorithm.estimator.type=ppo",
    "algorithm.estimator.num_critic_only_steps=1",
    "rollout.rollout_batch_size=8",
    "train.num_steps=4",
    "train.save_interval=2",
    "train.save_hf=true",
)
SAME = (
    *("train/loss", "train/grad_norm", "train/value_loss", "train/critic-grad_norm", "train/explained_variance"),
    *(
        "rollout/values",
        "rollout/returns",
        "train/value_clipfrac",
        "train/critic-lr-pg_0",
        "train/critic-num_skipped_steps",
    ),
)


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run whose critic has the actor's ranks; tests only read it."""
    place, dumped = tmp_path_factory.mktemp("colocated"), "run.dump_details=dump"
    return run_topology(place, "topologies/laptop-colocated.toml", "run.name=ppo", dumped, *PPO)


def test_a_colocated_run_trains_saves_and_exports_a_critic(colocated: Finished) -> None:
    run = colocated
    assert [row["step"] for row in run.steps] == [1, 2, 3, 4]
    assert all("train/explained_variance" in row for row in run.steps)
    assert ["train/loss" in row for row in run.steps] == [False, True, True, True]
    assert {path.name for path in (run.run_dir / "checkpoints").iterdir()} == {"0001"}  # no trainer was restarted
    assert sorted(path.name for path in (run.run_dir / "checkpoints" / "0001").iterdir()) == [
        "step-00000002",
        "step-00000004",
    ]
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (run.run_dir / "hf" / "critic" / name).is_file()


def test_a_critic_with_ranks_and_a_layout_of_its_own_learns_the_same_from_the_same_samples(
    colocated: Finished, tmp_path: Path
) -> None:
    dump = colocated.run_dir.parents[1] / "dump"
    own = ("trainer.critic.num_processes=2", "trainer.critic.megatron.tensor_model_parallel_size=2")
    words = ("--only", "trainer", "--load", str(dump), "run.name=apart")
    apart = run_topology(tmp_path, "topologies/laptop.toml", *words, *PPO, *own)
    assert len(apart.steps) == len(colocated.steps) == 4
    for found, expected in zip(apart.steps, colocated.steps, strict=True):
        names = [name for name in SAME if name in expected]
        assert {name: found[name] for name in names} == pytest.approx(
            {name: expected[name] for name in names}, rel=1e-3, abs=1e-5
        )
        assert "perf/critic_wait_time" in found
    parts = [run / "checkpoints" / "0001" / "step-00000004" for run in (apart.run_dir, colocated.run_dir)]
    assert [(part / "critic").is_dir() for part in parts] == [True, False]
    exported = [load_file(run.run_dir / "hf" / "critic" / "model.safetensors") for run in (apart, colocated)]
    for name, tensor in exported[1].items():
        torch.testing.assert_close(exported[0][name], tensor, rtol=0, atol=1e-4, msg=name)
