"""What a start is refused for that settings show only together with the model."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.preflight import block_problems
from actors.trainer.models.config import read_hf_config
from runtime.settings.load import load_topology
from tests.gpu.model import CONFIG

TOPOLOGY = Path(__file__).parents[2] / "topologies" / "colocate-8gpu.toml"
FP8 = "engines.policy.weight_format=fp8"


@pytest.mark.parametrize(
    ("changes", "settings", "refused"),
    [
        ({}, (FP8,), ""),
        ({}, (FP8, "engines.policy.num_gpus_per_engine=8"), ""),
        ({"intermediate_size": 1536}, ("engines.policy.num_gpus_per_engine=8",), ""),
        (
            {"intermediate_size": 1536},
            (FP8, "engines.policy.num_gpus_per_engine=8"),
            "intermediate_size = 1536 of the model, 192 on each of 8 ranks: SGLang reads FP8 in multiples of 128 there",
        ),
        (
            {"num_key_value_heads": 1, "head_dim": 64},
            (FP8,),
            "num_key_value_heads x head_dim = 64 of the model: SGLang reads FP8 in multiples of 128 there",
        ),
    ],
)
def test_a_model_that_sglang_does_not_read_in_fp8_is_refused_by_its_size(
    changes: dict[str, Any], settings: tuple[str, ...], refused: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    found = list(block_problems(load_topology(TOPOLOGY, settings).topology, read_hf_config(tmp_path)))
    assert [(problem.key, problem.message) for problem in found] == (
        [("engines.policy.weight_format", refused)] if refused else []
    )
