"""A run that samples with top-p: log-probs of engine and trainer are over the same kept tokens."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.whole_runs import run_topology

LIMIT_S = 300


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_engine_and_trainer_agree_on_log_probs_over_kept_tokens(tmp_path: Path) -> None:
    settings = (
        "rollout.top_p=0.5",
        "rollout.top_k=12",
        "rollout.temperature=0.8",
        "rollout.return_sampling_mask=true",
        "optimizer.lr=1e-2",  # the weights of the second step are others than those of the first
        "train.num_steps=2",
        "run.dump_details=dump",
    )
    trained = run_topology(tmp_path, "topologies/slime/grpo.toml", *settings, limit_s=LIMIT_S).steps
    assert len(trained) == 2
    for row in trained:
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert row["train/train_rollout_logprob_abs_diff_max"] < 1e-4
        assert 1 <= row["rollout/top_p_kept_vocab_per_token"] <= 12
        # over the whole vocabulary, the mean log-prob would be about the negative entropy
        assert row["rollout/rollout_log_probs"] > row["train/entropy_loss"] * -0.95
    with np.load(tmp_path / "dump" / "rollout_0.npz") as columns:
        assert 1 <= columns["kept_counts"].min() <= columns["kept_counts"].max() <= 12
        assert columns["kept_counts"].sum() == len(columns["kept_ids"])
