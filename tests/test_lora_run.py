"""A whole LoRA run learns: adapters of rank 4, served by the engine, finish what a few full steps have begun."""

from pathlib import Path

import pytest

from tests.support.whole_runs import best_reward, run_topology

LIMIT_S = 900
BEGUN = 24  # full steps: random weights alone are no base, since embedding and head do not train with LoRA
NUM_STEPS = 40


@pytest.mark.nightly
@pytest.mark.timeout(2 * LIMIT_S)
def test_adapters_of_rank_4_learn_the_demo_without_a_pause(tmp_path: Path) -> None:
    begun = run_topology(
        _made(tmp_path / "begun"),
        "topologies/laptop.toml",
        *(f"train.num_steps={BEGUN}", "train.save_hf=true"),
        limit_s=LIMIT_S,
    )
    settings = (
        f"train.num_steps={NUM_STEPS}",
        f"model.hf_checkpoint={begun.run_dir / 'hf'}",
        "model.random_init=false",
        "trainer.lora.rank=4",
        "optimizer.lr=2e-2",
    )
    finished = run_topology(_made(tmp_path / "lora"), "topologies/laptop.toml", *settings, limit_s=LIMIT_S)
    begin = sum(row["rollout/raw_reward"] for row in finished.steps[:3]) / 3
    assert best_reward(finished.steps) >= max(0.68, begin + 0.1), begin
    groups = finished.result["groups"]
    assert groups["issued"] == groups["trained"] == NUM_STEPS * 64
    assert all(row["perf/update_weights_pause_time"] == 0.0 for row in finished.steps[1:])
    assert max(row["train/train_rollout_logprob_abs_diff_max"] for row in finished.steps) < 1e-3
    weights = finished.run_dir / "weights"
    assert [path.name for path in weights.iterdir()] == ["adapters"]  # no version is published in full
    assert [path.name for path in (weights / "adapters" / "base").iterdir()] == ["v000001"]


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
