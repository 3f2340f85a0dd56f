"""A trainer in float32 whose engines get their weights in bfloat16, as a user starts it: by files, and by broadcast."""

import json
import math
from pathlib import Path
from typing import Any, Final

import pytest
from safetensors import safe_open

from messages import WeightSyncEnded
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import LAPTOP, ROOT, Run

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.timeout(500)]

SPLIT: Final = ROOT / "topologies" / "laptop-split.toml"
NUM_STEPS: Final = 4


@pytest.mark.parametrize(
    "topology", [pytest.param(LAPTOP, id="disk", marks=pytest.mark.nightly), pytest.param(SPLIT, id="collective")]
)
async def test_engines_get_bfloat16_of_what_is_trained_in_float32(topology: Path, tmp_path: Path) -> None:
    overrides = ("model.dtype=float32", "engines.policy.weight_format=bfloat16", "train.save_hf=true")
    run = Run(tmp_path, num_steps=NUM_STEPS, topology=topology, overrides=overrides)
    async with run.started() as command:
        family = command.family()
        assert await command.end() == 0
        await run.gone(family)
    await audit(run)
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    apart = [row["train/train_rollout_logprob_abs_diff"] for row in rows if row["step"] > 0]
    assert all(1e-6 < each < 2e-2 for each in apart), apart  # rounded, and no more than that
    assert dtypes_in(run.directory / "hf") == ({"F32"}, "float32")  # what is kept is as it was trained
    proven = [line for line in said(run.directory, "rollout") if line["event"] == "weights_verified"]
    assert len(proven) >= NUM_STEPS
    published = sorted((run.directory / "weights").glob("v*"))
    if topology == LAPTOP:
        assert {str(dtypes_in(each)) for each in published} == {str(({"BF16"}, "bfloat16"))}
    else:
        assert published == []
        async with run.reopened() as bus:
            ended = [event for _, event in await read_all(bus, run) if isinstance(event, WeightSyncEnded)]
        assert {event.sent_bytes for event in ended if event.holds} == {2 * num_elements(run.directory / "hf")}


def dtypes_in(directory: Path) -> tuple[set[str], str]:
    """Of the tensors of a model directory, and what its config.json says."""
    config = json.loads((directory / "config.json").read_bytes())
    with safe_open(directory / "model.safetensors", framework="numpy") as file:
        return {file.get_slice(name).get_dtype() for name in file.keys()}, config.get("dtype") or config["torch_dtype"]


def num_elements(directory: Path) -> int:
    """Number of elements of a model directory's tensors."""
    with safe_open(directory / "model.safetensors", framework="numpy") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())


def said(directory: Path, process: str) -> list[dict[str, Any]]:
    files = (directory / "logs").glob(f"{process}*.jsonl")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]
