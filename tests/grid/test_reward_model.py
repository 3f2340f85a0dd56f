"""A reward model continues from the checkpoint of any other layout as a single rank does, value head included."""

import json
import math
from pathlib import Path
from typing import Any, Final

import pytest

from runtime.settings.topology import encode_topology
from tests.actors.trainer.hf import write_model
from tests.build.topology import trainer_topology
from tests.grid.running import run_ranks

ROOT: Final = Path(__file__).parents[2]
PROGRAM: Final = Path(__file__).with_name("reward_model_program.py")
TIMEOUT_S: Final = 300.0
DISTRIBUTED: Final = {"use_distributed_optimizer": True}
LAYOUTS: Final[tuple[dict[str, Any], ...]] = (  # settings of [trainer], one train step in each
    {"megatron": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
    {"megatron": {"pipeline_model_parallel_size": 2}},
    {"optimizer": DISTRIBUTED},
    {"packed": True, "megatron": {"context_parallel_size": 2}},
    {"megatron": {"tensor_model_parallel_size": 2}, "optimizer": DISTRIBUTED},
)

pytestmark = [pytest.mark.grid, pytest.mark.timeout(TIMEOUT_S + 60), pytest.mark.xdist_group("grid")]


def job(place: Path, run: str, trainer: dict[str, Any]) -> dict[str, Any]:
    topology = trainer_topology(
        place / "model",
        place,
        model={"random_init": False},
        rollout={"n_samples_per_prompt": 1},
        algorithm={"num_steps_per_rollout": 1, "loss": {"type": "rm"}},
        optimizer={"adam_eps": 1e-4},  # at 1e-8 a gradient that is rounding alone moves its weight
        train={"max_tokens_per_gpu": 40},
        trainer={"device": "cpu", **trainer},
    )
    encoded = json.loads(encode_topology(topology))
    return {"run": run, "world": trainer.get("num_processes", 1), "topology": encoded}


def test_a_reward_model_continues_in_another_layout_as_on_one_rank(tmp_path: Path) -> None:
    write_model(tmp_path / "model", initializer_range=0.1)
    jobs = [job(tmp_path, "layouts", {"num_processes": 2, **trainer}) for trainer in LAYOUTS]
    jobs += [job(tmp_path, "one rank", {})] * len(LAYOUTS)
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    run_ranks(PROGRAM, tmp_path, timeout_s=TIMEOUT_S)
    found: list[dict[str, float]] = json.loads((tmp_path / "found.json").read_text())
    steps, expected = found[: len(LAYOUTS)], found[len(LAYOUTS) :]
    assert len({step["train/grad_norm"] for step in expected}) == len(LAYOUTS)
    for own, other in zip(steps, expected, strict=True):
        wrong = {name: (own[name], other[name]) for name in other if not close(own[name], other[name])}
        assert wrong == {}


def close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-5)
