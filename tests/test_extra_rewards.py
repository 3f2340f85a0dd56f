"""Runs whose groups have more than a reward per sample: several named rewards, or a greedy sample to compare with.

The run with named rewards also samples with top-p and top-k.
"""

from pathlib import Path
from typing import Any

import numpy as np
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
def test_gdpo_trains_the_named_rewards_of_a_grader_on_log_probs_over_kept_tokens(tmp_path: Path) -> None:
    """Log-probs of engine and trainer are over the same kept tokens."""
    (tmp_path / "two.py").write_text(GRADER)
    settings = (
        f"data.0.rm_type={tmp_path}/two.py:grade",
        "reward.reward_key=score",
        "algorithm.estimator.type=gdpo",
        'algorithm.estimator.reward_keys=["right", "ended"]',
        "algorithm.normalize_advantages=true",
        "rollout.top_p=0.5",
        "rollout.top_k=12",
        "rollout.temperature=0.8",
        "rollout.return_sampling_mask=true",
        "run.dump_details=dump",
    )
    rows = trained(tmp_path, *settings)
    assert len(rows) == 2
    for row in rows:
        right = row["rollout/rewards/right/mean"]
        assert row["rollout/raw_reward"] == pytest.approx(right)
        assert row["rollout/rewards/ended/mean"] == pytest.approx(1 - row["rollout/truncated"])
        assert row["rollout/rewards/right/max"] >= right >= row["rollout/rewards/right/min"] == 0
        assert row["train/grad_norm"] > 0
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert row["train/train_rollout_logprob_abs_diff_max"] < 1e-4
        assert 1 <= row["rollout/top_p_kept_vocab_per_token"] <= 12
        # over the whole vocabulary, the mean log-prob would be about the negative entropy
        assert row["rollout/rollout_log_probs"] > row["train/entropy_loss"] * -0.95
    with np.load(tmp_path / "dump" / "rollout_0.npz") as columns:
        assert 1 <= columns["kept_counts"].min() <= columns["kept_counts"].max() <= 12
        assert columns["kept_counts"].sum() == len(columns["kept_ids"])


@pytest.mark.nightly
def test_remax_compares_with_a_greedy_sample_that_is_not_trained(tmp_path: Path) -> None:
    for row in trained(tmp_path, "algorithm.estimator.type=remax"):
        assert row["train/global_batch_size"] == 16 * 8  # the greedy ones are no part of the batch
        assert 0 <= row["rollout/baseline_reward"] <= 1
        # each sample's advantage is its reward minus that of its prompt's greedy sample
        assert row["train/grad_norm"] > 0
