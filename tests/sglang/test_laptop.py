"""A whole run on SGLang's own server: the laptop recipe, twelve steps, started as a user starts it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sglang.server import SHIM, sglang_python

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "topologies" / "demo"
LIMIT_S = 900
NUM_STEPS = 12


@pytest.mark.sglang
@pytest.mark.timeout(LIMIT_S + 60)
def test_twelve_steps_on_sglang_learn_and_their_books_close(tmp_path: Path) -> None:
    settings = {
        "engines.policy.python": sglang_python(),
        "engines.policy.env.PYTHONPATH": SHIM,
        "model.hf_checkpoint": DEMO / "models/reverse-digits",
        "data.0.path": DEMO / "data/reverse-digits/train.jsonl",
        "eval.0.path": DEMO / "data/reverse-digits/eval.jsonl",
        "eval.0.interval": NUM_STEPS,
        "train.num_steps": NUM_STEPS,
    }
    command = [
        sys.executable,
        "-P",
        str(ROOT / "bin/start_topology.py"),
        str(ROOT / "tests/sglang/laptop.toml"),
        "--json",
    ]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["steps"] == NUM_STEPS
    assert result["groups"]["issued"] == result["groups"]["trained"] == NUM_STEPS * 64
    metrics = tmp_path / "runs" / "laptop-sglang" / "metrics.jsonl"
    rows = [row for row in map(json.loads, metrics.read_text().splitlines()) if row["step"] > 0]
    assert len(rows) == NUM_STEPS
    assert max(row["train/train_rollout_logprob_abs_diff_max"] for row in rows) <= 1e-4
    rewards = [row["rollout/raw_reward"] for row in rows]
    assert sum(rewards[-4:]) > 1.5 * sum(rewards[:4])
