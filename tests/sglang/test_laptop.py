"""Whole runs on SGLang's own server: the laptop recipe as a user starts it, twelve steps and until it has learnt.

All are nightly: the whole run of CI on SGLang is one in which engine and trainer are killed (test_deaths.py).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from runtime.models.delta import held_in
from runtime.models.versions import name_of, on_disk
from tests.sglang.recipe import DEMO, RECIPE, overrides
from tests.sglang.server import ROOT
from tests.support.whole_runs import best_reward

NUM_STEPS: Final = 12
ENOUGH_STEPS: Final = 80  # the recipe's 200 are for its entropy's slow end; these learn, too
STALE_STEPS: Final = 120  # of which it takes more where most tokens are a step old
BATCH: Final = 64
CLOSE: Final = 1e-4  # natural log, of tokens of staleness 0
HALF_CLOSE: Final = 0.05  # the same in bfloat16, of a single token
LIMIT_S: Final = 900
LONG_LIMIT_S: Final = 1800

FEW_STEPS: Final = 4

EXPERTS: Final[dict[str, dict[str, Any]]] = {  # what makes the recipe's model one of experts
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
    },
}
NUM_UPDATES: Final = 20
LAYOUTS: Final[dict[str, dict[str, object]]] = {
    "split, collective": {
        "trainer.num_processes": 2,
        "trainer.megatron.tensor_model_parallel_size": 2,
        "trainer.megatron.sequence_parallel": "true",
        "engines.policy.num_engines": 2,
        "engines.policy.weight_transport": "collective",
    },
    "colocated, ipc": {"engines.policy.colocate": "trainer", "engines.policy.weight_transport": "ipc"},
}
WIDE: Final = {"engines.policy.concurrency": 256}

Rows = list[dict[str, Any]]


def run(
    directory: Path, num_steps: int, limit_s: float, *, close: float = CLOSE, **settings: object
) -> tuple[dict[str, Any], Rows]:
    """Run it to its end; what it prints, and the metrics of its steps."""
    own = overrides(**{"eval.0.interval": num_steps, "train.num_steps": num_steps}, **settings)
    command = [sys.executable, "-P", str(ROOT / "bin/physarum.py"), "start-topology", str(RECIPE), "--json"]
    command += [word for setting in own for word in ("--set", setting)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = directory / "runs" / "laptop-sglang" / "metrics.jsonl"
    rows = [row for row in map(json.loads, metrics.read_text().splitlines()) if row["step"] > 0]
    assert len(rows) == num_steps
    difference = max(row["train/train_rollout_logprob_abs_diff_max"] for row in rows)
    assert difference <= close
    result = json.loads(done.stdout)
    assert result["steps"] == num_steps
    assert result["groups"]["trained"] == num_steps * BATCH
    sys.stdout.write(f"{json.dumps(result)} {difference:.2g}\n")
    return result, rows


@pytest.mark.nightly
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("transport", ["disk", "collective"])
def test_twelve_steps_on_sglang_learn_and_their_books_close(tmp_path: Path, transport: str) -> None:
    result, rows = run(tmp_path, NUM_STEPS, LIMIT_S, **{"engines.policy.weight_transport": transport})
    assert (tmp_path / "runs/laptop-sglang/weights").exists() == (transport == "disk")
    assert result["groups"]["issued"] == NUM_STEPS * BATCH
    rewards = [row["rollout/raw_reward"] for row in rows]
    assert sum(rewards[-4:]) > 1.5 * sum(rewards[:4])


@pytest.mark.nightly
@pytest.mark.timeout(LONG_LIMIT_S + 60)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_steps_on_sglang_without_a_file_of_weights(tmp_path: Path, layout: str) -> None:
    result, rows = run(tmp_path, NUM_UPDATES, LONG_LIMIT_S, **LAYOUTS[layout])
    assert not (tmp_path / "runs/laptop-sglang/weights").exists()
    assert result["groups"]["issued"] == NUM_UPDATES * BATCH
    rewards = [row["rollout/raw_reward"] for row in rows]
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5])


@pytest.mark.nightly
@pytest.mark.timeout(LIMIT_S + 60)
def test_sglang_computes_in_bfloat16_with_weights_that_are_trained_in_float32(tmp_path: Path) -> None:
    settings = {"model.dtype": "float32", "engines.policy.weight_format": "bfloat16", "engines.policy.verify": "always"}
    _, rows = run(tmp_path, FEW_STEPS, LIMIT_S, close=HALF_CLOSE, **settings)
    assert max(row["train/train_rollout_logprob_abs_diff_max"] for row in rows) > CLOSE  # it does
    versions = list((tmp_path / "runs/laptop-sglang/weights").glob("v*"))
    assert versions
    assert all(json.loads((each / "config.json").read_bytes())["torch_dtype"] == "bfloat16" for each in versions)


@pytest.mark.nightly
@pytest.mark.timeout(LIMIT_S + 60)
def test_sglang_reads_its_node_s_copies_of_versions_that_are_changes(tmp_path: Path) -> None:
    run(tmp_path, FEW_STEPS, LIMIT_S, **{"trainer.full_export_interval": 10, "engines.policy.verify": "always"})
    directory = tmp_path / "runs/laptop-sglang"
    versions = on_disk(directory / "weights")
    newest = versions[-1].version
    assert newest.number == FEW_STEPS + 1
    assert [each.version.number for each in versions if each.base is None] == [1]
    assert held_in(directory / "copies/local" / name_of(newest.number)) == newest


@pytest.mark.nightly
@pytest.mark.timeout(LONG_LIMIT_S + 60)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_recipe_learns_on_sglang(tmp_path: Path, seed: int) -> None:
    result, rows = run(tmp_path, ENOUGH_STEPS, LONG_LIMIT_S, **{"run.seed": seed}, **WIDE)
    check_learnt(result, rows)
    assert result["groups"]["issued"] == ENOUGH_STEPS * BATCH


@pytest.mark.nightly
@pytest.mark.timeout(LONG_LIMIT_S + 60)
def test_the_recipe_learns_on_sglang_with_partial_rollout_and_a_step_of_staleness(tmp_path: Path) -> None:
    partial = {"rollout.over_sampling_batch_size": BATCH * 3 // 2, "rollout.max_staleness": 1}
    result, rows = run(tmp_path, STALE_STEPS, LONG_LIMIT_S, **partial, **WIDE)
    check_learnt(result, rows)
    groups = dict(result["groups"])
    assert groups.pop("issued") == sum(groups.values())
    assert max(row["rollout/staleness_max"] for row in rows) >= 1


@pytest.mark.nightly
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("kind", list(EXPERTS))
def test_a_mixture_of_experts_shared_out_over_two_ranks_agrees_with_sglang(tmp_path: Path, kind: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO / "models/reverse-digits", model)
    config = json.loads((model / "config.json").read_text()) | EXPERTS[kind]
    (model / "config.json").write_text(json.dumps(config))
    shared_out = {"trainer.num_processes": 2, "trainer.megatron.expert_model_parallel_size": 2}
    result, rows = run(tmp_path, FEW_STEPS, LIMIT_S, **{"model.hf_checkpoint": model}, **shared_out)
    assert result["groups"]["issued"] == FEW_STEPS * BATCH
    assert all(row["train/grad_norm"] > 0 for row in rows)


def check_learnt(result: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """From nothing to the recipe's goal, also on prompts that were not trained."""
    assert result["reward_first"] < 0.05
    assert best_reward(rows) >= 0.85
    assert result["eval_last"] >= 0.85
