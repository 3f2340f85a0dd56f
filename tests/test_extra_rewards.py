"""Runs whose groups have more than a reward per sample: several named rewards, or a greedy sample to compare with."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
LIMIT_S = 300
GRADER = '''
def grade(sample):
    """Two rewards, and the one that a metric shows."""
    right = sum(ours == theirs for ours, theirs in zip(sample.response, sample.label, strict=False))
    return {"score": float(right), "right": float(right), "ended": float(not sample.truncated)}
'''


def trained(directory: Path, settings: dict[str, object]) -> list[dict[str, Any]]:
    """Train two steps of a tiny recipe, and return the rows of the steps."""
    command = [sys.executable, "-P", str(ROOT / "bin" / "start_topology.py"), str(ROOT / "topologies/slime/grpo.toml")]
    settings = {"train.num_steps": 2, "optimizer.lr": 1e-2} | settings
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = map(json.loads, (directory / "runs/slime-grpo/metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "train/loss" in row]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_gdpo_trains_the_named_rewards_of_a_grader(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(GRADER)
    settings = {
        "data.0.rm_type": f"{tmp_path}/two.py:grade",
        "reward.reward_key": "score",
        "algorithm.advantage_estimator": "gdpo",
        "algorithm.gdpo_reward_keys": '["right", "ended"]',
        "algorithm.normalize_advantages": "true",
    }
    for row in trained(tmp_path, settings):
        right = row["rollout/rewards/right/mean"]
        assert row["rollout/raw_reward"] == pytest.approx(right)
        assert row["rollout/rewards/ended/mean"] == pytest.approx(1 - row["rollout/truncated"])
        assert row["rollout/rewards/right/max"] >= right >= row["rollout/rewards/right/min"] == 0
        assert row["train/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_remax_compares_with_a_greedy_sample_that_is_not_trained(tmp_path: Path) -> None:
    for row in trained(tmp_path, {"algorithm.advantage_estimator": "remax"}):
        assert row["train/global_batch_size"] == 16 * 8  # the greedy ones are no part of the batch
        assert 0 <= row["rollout/baseline_reward"] <= 1
        # each sample's advantage is its reward minus that of its prompt's greedy sample
        assert row["train/grad_norm"] > 0
