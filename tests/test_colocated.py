"""topologies/laptop-colocated.toml as a user starts it: the order of its phases, and the memory that each frees."""

import json
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from messages import Phase, PhaseChanged
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import ROOT, SMALL, Run

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(1000)]

COLOCATED: Final = ROOT / "topologies/laptop-colocated.toml"
MODEL: Final = ROOT / "topologies/demo/models/reverse-digits"
LARGER: Final = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}  # 44 MB in float32
MB: Final = 1_000_000
NUM_STEPS: Final = 4
LIMIT_S: Final = 900  # a loaded machine takes several times the minute of an idle one


class Colocated(NamedTuple):
    """What is looked at of a run."""

    turns: list[PhaseChanged]
    rows: list[dict[str, Any]]  # of metrics, by train step


async def run(directory: Path, *overrides: str, num_steps: int) -> Colocated:
    """A run to its end, its log checked."""
    run = Run(directory, num_steps=num_steps, topology=COLOCATED, settings=SMALL, overrides=overrides)
    async with run.started() as command:
        command.end_s = LIMIT_S
        family = command.family()
        assert await command.end() == 0
        await run.gone(family)
    await audit(run)
    async with run.reopened() as bus:
        turns = [event for _, event in await read_all(bus, run) if isinstance(event, PhaseChanged)]
    return Colocated(turns, [row for row in run.rows() if row["step"] > 0])


@pytest.mark.slow
async def test_phases_run_in_order_and_free_the_memory_that_they_report(tmp_path: Path) -> None:
    """That a colocated run learns is shown by tests/test_laptop.py, at night."""
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    config = json.loads((model / "config.json").read_text()) | LARGER
    (model / "config.json").write_text(json.dumps(config))
    turns, rows = await run(tmp_path, f"model.hf_checkpoint={model}", num_steps=NUM_STEPS)
    order = list(Phase)
    assert turns[0].phase is Phase.TRAIN
    for before, turn in pairwise(turns):
        assert turn.phase is order[(order.index(before.phase) + 1) % len(order)]
        assert (turn.previous, turn.incarnation) == (before.phase, 1)
    trained = [turn.step for turn in turns if turn.phase is Phase.OFFLOAD]
    assert trained[: NUM_STEPS + 1] == list(range(NUM_STEPS + 1))  # the last checkpoint's own turn comes on top
    moved = {phase: [turn for turn in turns if turn.previous is phase and turn.step == 2] for phase in Phase}
    assert fallen(moved[Phase.OFFLOAD], "trainer") >= 100 * MB  # gradients and two moments
    assert -fallen(moved[Phase.TRAIN], "trainer") >= 100 * MB  # it takes them back
    assert fallen(moved[Phase.RELEASE], "engine.policy.0") >= 40 * MB  # its weights
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    for row in rows:
        assert 0 < row["perf/update_weights_pause_time"] < row["perf/update_weights_applied_time"]
        assert row["perf/update_weights_session_time"] > 0
        assert row["perf/update_weights_wire_bytes"] == rows[0]["perf/update_weights_wire_bytes"] > 0


@pytest.mark.nightly
async def test_engines_get_base_and_adapter_back_after_each_train_step(tmp_path: Path) -> None:
    """Their log-probs are the trainer's, and no version is published in full."""
    settings = ("trainer.lora.rank=4", "optimizer.lr=1e-2", "engines.policy.weight_transport=disk")
    turns, rows = await run(tmp_path, *settings, num_steps=NUM_STEPS)
    assert len([turn for turn in turns if turn.phase is Phase.UPDATE]) >= NUM_STEPS
    assert max(row["train/train_rollout_logprob_abs_diff_max"] for row in rows) < 1e-3
    assert published(tmp_path) == ["adapters"]


def published(directory: Path) -> list[str]:
    """What a run has published: versions in full, and the directory of adapters."""
    return sorted(path.name for path in directory.glob("runs/*/weights/*"))


def fallen(turns: list[PhaseChanged], instance: str) -> int:
    """The least that a phase has freed of a process."""
    fallen: list[int] = []
    for turn in turns:
        before, after = turn.bytes_before[instance], turn.bytes_after[instance]
        assert before is not None
        assert after is not None
        sys.stdout.write(f"{turn.previous} {instance}: {before / MB:.0f} -> {after / MB:.0f} MB\n")
        fallen.append(before - after)
    return min(fallen)
