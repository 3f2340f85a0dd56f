"""Ranks load their shares of quantized checkpoints to the bit, and need little memory beside them.

`tests/actors/trainer/models/test_dequantize.py` compares whole tensors with transformers and compressed-tensors.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.models.safetensors import SINGLE_FILE
from tests.actors.trainer.hf import write_model
from tests.grid.running import run_ranks
from tests.support.quantized import FP8, INT4, MXFP4, fp8, int4, mxfp4

ROOT: Final = Path(__file__).parents[2]
PROGRAM: Final = Path(__file__).with_name("quantized_program.py")
TIMEOUT_S: Final = 300.0
RANKS: Final = 2

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(TIMEOUT_S + 60), pytest.mark.xdist_group("grid")]


class Model(NamedTuple):
    """A tiny model of a family that is published in this form."""

    kind: str
    draw: Callable[..., tuple[dict[str, Tensor], Tensor]]
    config: dict[str, Any]  # its quantization_config
    pieces: str  # in the names of its quantized tensors
    sizes: dict[str, Any]


MODELS: Final = {  # no side of a block, and parts of two ranks that begin inside of one
    "FP8": Model("qwen3", fp8, FP8, "_proj.weight", {"hidden_size": 136, "head_dim": 40, "intermediate_size": 300}),
    "FP8 with MLA and experts": Model(
        *("deepseek_v3", fp8, FP8, "_proj"),
        {"hidden_size": 136, "intermediate_size": 264, "moe_intermediate_size": 150, "q_lora_rank": 140},
    ),
    "FP8, stacks of experts": Model(
        *("qwen3_5_moe_text", fp8, FP8, ".experts."),
        {"hidden_size": 136, "moe_intermediate_size": 150, "shared_expert_intermediate_size": 132},
    ),
    "MXFP4": Model("gpt_oss", mxfp4, MXFP4, ".experts.", {"hidden_size": 96, "intermediate_size": 160}),
    "int4": Model("deepseek_v3", int4, INT4, ".mlp.experts.", {"hidden_size": 96, "moe_intermediate_size": 160}),
}
EXPERTS: Final = [name for name, model in MODELS.items() if model.kind != "qwen3"]
LAYOUTS: Final[dict[str, tuple[dict[str, Any], list[str]]]] = {  # and the models that have it
    "TP2": (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        [name for name in MODELS if name != "MXFP4"],  # its experts are not divided
    ),
    "PP2": ({"pipeline_model_parallel_size": 2}, [*MODELS]),
    "EP2": ({"expert_model_parallel_size": 2}, EXPERTS),
    "EP2 and TP2": (
        {
            **{"tensor_model_parallel_size": 2, "sequence_parallel": True},
            **{"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        },
        EXPERTS,
    ),
}


def write(place: Path, model: Model) -> None:
    """Write a model in quantized files, and in plain ones that have the numbers of the definition."""
    write_model(place / "plain", model.kind, **model.sizes)
    shutil.copytree(place / "plain", place / "quantized")
    stored = load_file(place / "plain" / SINGLE_FILE)
    numbers, draw = dict(stored), torch.Generator().manual_seed(1)
    names = [name for name in stored if model.pieces in name and "bias" not in name]
    assert names
    for name in names:
        parts, own = model.draw(name, stored.pop(name).shape, draw)
        numbers[name] = own.float()
        stored |= parts
    save_file(numbers, place / "plain" / SINGLE_FILE)
    save_file(stored, place / "quantized" / SINGLE_FILE)
    config = json.loads((place / "plain" / "config.json").read_text())
    (place / "quantized" / "config.json").write_text(json.dumps(config | {"quantization_config": model.config}))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, by model, layout and dtype."""
    place = tmp_path_factory.mktemp("quantized")
    for name, model in MODELS.items():
        write(place / name, model)
    jobs = [{"name": name, "layout": layout, "models": models} for name, (layout, models) in LAYOUTS.items()]
    (place / "jobs.json").write_text(json.dumps(jobs))
    run_ranks(PROGRAM, place, world=RANKS, timeout_s=TIMEOUT_S)
    return [json.loads((place / f"found by {rank}.json").read_text()) for rank in range(RANKS)]


def test_each_rank_has_the_bits_of_the_definition(found: list[dict[str, Any]]) -> None:
    for own in found:
        assert len(own) == 2 * sum(len(models) for _, models in LAYOUTS.values())
        wrong = {name: each[form]["differing"] for name, each in own.items() for form in ("quantized", "plain")}
        assert {name: names for name, names in wrong.items() if names} == {}
        assert all(each["tensors"] > 5 for each in own.values())


@pytest.mark.parametrize("form", ["quantized", "plain"])
def test_a_load_takes_a_rank_s_share_and_two_tensors_of_it_at_most(found: list[dict[str, Any]], form: str) -> None:
    for own in found:
        for name, each in own.items():
            memory = each[form]
            assert memory["own"] <= memory["peak"], (name, memory)
            assert memory["peak"] <= memory["own"] + memory["largest"] + memory["strip"], (name, memory)
