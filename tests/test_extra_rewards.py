"""Runs whose groups have more than a reward per sample: several named rewards, or a greedy sample to compare with."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.whole_runs import run_topology

GRADER = '''
def grade(sample):
    """Two rewards, and the one that a metric shows."""
    right = sum(ours == theirs for ours, theirs in zip(sample.response, sample.label, strict=False))
    return {"score": float(right), "right": float(right), "ended": float(not sample.truncated)}
'''


def trained(place: Path, *settings: str) -> list[dict[str, Any]]:
    """Train two steps of a tiny recipe, and return the rows of the steps."""
    return run_topology(place, "topologies/slime/grpo.toml", "train.num_steps=2", "optimizer.lr=1e-2", *settings).steps


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_gdpo_trains_the_named_rewards_of_a_grader(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(GRADER)
    settings = (
        f"data.0.rm_type={tmp_path}/two.py:grade",
        "reward.reward_key=score",
        "algorithm.estimator.type=gdpo",
        'algorithm.estimator.reward_keys=["right", "ended"]',
        "algorithm.normalize_advantages=true",
    )
    for row in trained(tmp_path, *settings):
        right = row["rollout/rewards/right/mean"]
        assert row["rollout/raw_reward"] == pytest.approx(right)
        assert row["rollout/rewards/ended/mean"] == pytest.approx(1 - row["rollout/truncated"])
        assert row["rollout/rewards/right/max"] >= right >= row["rollout/rewards/right/min"] == 0
        assert row["train/grad_norm"] > 0


@pytest.mark.nightly
@pytest.mark.timeout(360)
def test_remax_compares_with_a_greedy_sample_that_is_not_trained(tmp_path: Path) -> None:
    for row in trained(tmp_path, "algorithm.estimator.type=remax"):
        assert row["train/global_batch_size"] == 16 * 8  # the greedy ones are no part of the batch
        assert 0 <= row["rollout/baseline_reward"] <= 1
        # each sample's advantage is its reward minus that of its prompt's greedy sample
        assert row["train/grad_norm"] > 0
