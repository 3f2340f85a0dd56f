"""A whole run of PPO with a critic, colocated with its engine: the critic's memory leaves with the trainer's."""

from pathlib import Path

import pytest

from tests.support.whole_runs import run_topology

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_colocated_run_trains_saves_and_exports_a_critic(tmp_path: Path) -> None:
    run = run_topology(
        tmp_path,
        "topologies/laptop-colocated.toml",
        "run.name=ppo",
        "algorithm.advantage_estimator=ppo",
        "algorithm.num_critic_only_steps=1",
        "rollout.rollout_batch_size=8",
        "train.num_steps=4",
        "train.save_interval=2",
        "train.save_hf=true",
    )
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
