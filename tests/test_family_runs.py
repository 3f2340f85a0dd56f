"""A tiny Qwen3.5 and a tiny gpt-oss learn the laptop's task as its Qwen3 does in as many steps, also with kills."""

import json
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from tests.chaos.audit import audit
from tests.chaos.harness import Run
from tests.chaos.test_kill import finish, kill_in_turn
from tests.support.whole_runs import ROOT, best_reward, run_topology

pytestmark = pytest.mark.nightly
MODEL: Final = ROOT / "topologies/demo/models/reverse-digits"
NUM_STEPS: Final = 100
LIMIT_S: Final = 1800
SEEDS: Final = (1, 2, 3)
LESS: Final = 0.1  # than the reward of Qwen3, at most
ROPE: Final[dict[str, Any]] = {"rope_theta": 10000.0}
KINDS: Final[dict[str, dict[str, Any]]] = {  # keys besides those of the laptop's model
    "qwen3_5_text": {
        **{"architectures": ["Qwen3_5ForCausalLM"], "layer_types": ["linear_attention", "full_attention"]},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
        **{
            "linear_value_head_dim": 16,
            "rope_parameters": {**ROPE, "rope_type": "default", "partial_rotary_factor": 0.5},
        },
    },
    "gpt_oss": {
        **{"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"intermediate_size": 64, "sliding_window": 4, "attention_bias": True},
        "rope_parameters": {
            **{**ROPE, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "truncate": False},
            **{"beta_fast": 32.0, "beta_slow": 1.0},
        },
    },
}


def settings_of(directory: Path, kind: str) -> str:
    """Write a model directory without weights, for random ones; return the setting that names it."""
    shutil.copytree(MODEL, directory)
    config = json.loads((MODEL / "config.json").read_text())
    own = {"model_type": kind, "num_hidden_layers": 2} | KINDS[kind]
    unread = ("rope_theta",) if "rope_parameters" in own else ()
    text = json.dumps({key: value for key, value in (config | own).items() if key not in unread})
    (directory / "config.json").write_text(text)
    return f"model.hf_checkpoint={directory}"


@pytest.fixture(scope="module")
def reward_of_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], float]:
    @cache
    def run(seed: int) -> float:
        words = (f"run.seed={seed}", f"train.num_steps={NUM_STEPS}")
        finished = run_topology(tmp_path_factory.mktemp("qwen3"), "topologies/laptop.toml", *words, limit_s=LIMIT_S)
        return best_reward(finished.steps)

    return run


@pytest.mark.timeout(2 * LIMIT_S + 60)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_another_family_learns_what_qwen3_does(
    tmp_path: Path, kind: str, seed: int, reward_of_qwen3: Callable[[int], float]
) -> None:
    words = (f"run.seed={seed}", f"train.num_steps={NUM_STEPS}", settings_of(tmp_path / "model", kind))
    result, *_ = finished = run_topology(tmp_path, "topologies/laptop.toml", *words, limit_s=LIMIT_S)
    reward, expected = best_reward(finished.steps), reward_of_qwen3(seed)
    sys.stdout.write(f"{kind}, seed {seed}: {reward:.3f}, Qwen3 {expected:.3f}\n")
    assert reward >= expected - LESS
    assert result["groups"]["issued"] == result["groups"]["trained"] == NUM_STEPS * 64
    # engine and trainer compute the same model, over weight updates and whatever is kept of prompts
    assert max(row["train/train_rollout_logprob_abs_diff_max"] for row in finished.steps) < 1e-3


@pytest.mark.anyio
@pytest.mark.timeout(2 * LIMIT_S + 60)
async def test_it_learns_although_trainer_and_engine_are_killed(
    tmp_path: Path, reward_of_qwen3: Callable[[int], float]
) -> None:
    overrides = (settings_of(tmp_path / "model", "qwen3_5_text"), "run.seed=1")
    run = Run(tmp_path, num_steps=NUM_STEPS, settings=("train.save_interval=5",), overrides=overrides)
    names = ["engine.policy.0", "trainer", "engine.policy.0", "trainer"]
    async with run.started() as command:
        command.end_s = LIMIT_S
        await kill_in_turn(command, names, every=20)
        await finish(run, command)
    await audit(run, killed=names)
    steps = [row for row in run.rows() if row["step"] > 0]
    assert best_reward(steps) >= reward_of_qwen3(1) - LESS
