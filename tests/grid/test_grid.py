"""Every parallel layout trains what a single rank trains, and no row of the grid passes with a fault in it."""

import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from actors.trainer.export import export_run
from runtime.models.safetensors import SINGLE_FILE
from runtime.settings.devices import HIDDEN
from tests.grid import faults, table
from tests.grid.rows import ALL, FAULTY, FEW, FEW_FAULTY, SAVED, WITH_CRITIC, WITH_LORA, Row
from tests.grid.running import CRITIC, Half, Job, copied, differences, first_half, outcome, train

TIMEOUT_S = 5400.0  # for the whole grid, on a busy machine
JOB_TIMEOUT_S = 20.0  # the part of it for each job: a hang ends, and is named, before the stage of CI does
LIMITS = {
    "loss": 1e-5,
    "entropy": 1e-5,
    "KL": 1e-5,
    "gradient norm": 2e-5,  # relative
    "log-probs": 1e-4,
    "weights": 5e-5,
    "moments": 2e-5,  # of the largest; sums in another order leave up to 1.06e-5
}
DEEP_LIMIT = 1e-4  # of moments in 8 layers, and of kinds whose rounding grows as much
# Scores of Gemma 4 are not scaled. The last bits of the first weights alone change moments of one rank by 8.4e-5
# (dense) and 9.2e-5 (experts), log-probs by 7.3e-5; its rows differ by up to 4.8e-5 and 4.2e-5. For Gemma 3 these are
# 6.5e-6 and 3.1e-5; its row CP2 differs by 1.7e-6 and 4.0e-6.
ROUNDED = ("gemma4_text", "gemma4_text, dense")
HALF_LIMIT = 2e-2  # of loss and entropy in bfloat16 against float32
HALVES_LIMIT = 2e-2  # the same against a single rank in bfloat16: its own packed and padded losses are 2.3e-2 apart
WRITES = "PHYSARUM_WRITE_GRID"  # set: the table of this run goes into docs/results/DATE-grid.md


def marked(items: Sequence[Any], few: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Those of CI and the others, by their marks."""
    return [
        pytest.param(item, id=name, marks=pytest.mark.grid if item in few else pytest.mark.nightly)
        for item, name in zip(items, names, strict=True)
    ]


PAIRS = [(kind, one, other) for kind, layouts in SAVED for one in layouts for other in layouts]
FEW_PAIRS = [("qwen3", "1", "TP2"), ("qwen3", "PP2", "1"), ("qwen3", "DP2+DO", "PP2")]
FEW_PAIRS += [("qwen3", "DP2+DO", "DP2+DO"), ("qwen3_moe", "EP2", "1")]
FEW_PAIRS += [(WITH_LORA, "TP2+SP", "PP2"), (WITH_LORA, "PP2", "DP2+DO")]
FEW_PAIRS += [(WITH_CRITIC, "TP2+SP", "DP2+DO"), (WITH_CRITIC, "TP2+SP", "1 & PP2")]
MAIN = "optimizer.state.param."  # main parameters: the other optimizer has none in float32
ROWS = [*ALL, *(row for row in FEW if row not in ALL)]
HALVES = [row for row in ROWS if row.is_half]
# one worker runs them all, since one set of processes trains all layouts
pytestmark = [pytest.mark.timeout(2 * TIMEOUT_S + 60), pytest.mark.xdist_group("grid")]


@pytest.fixture(scope="module")
def grid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where everything that this session asks about was trained."""
    wanted: dict[Job, Half] = {}
    for item in request.session.items:
        if item.path == Path(__file__) and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            for job, last in needed(item.callspec.params):
                wanted[job] = max(last, wanted.get(job, last))  # the second half, if any test reads it
    place = tmp_path_factory.mktemp("grid")
    jobs = sorted(wanted, key=lambda job: (job.reads is not None, job.row.world))
    limit_s = min(TIMEOUT_S, 120 + JOB_TIMEOUT_S * len(jobs))
    train(place, {job: wanted[job] for job in jobs}, timeout_s=limit_s)
    return place


def needed(params: dict[str, Any]) -> list[tuple[Job, Half]]:
    """The trainings that a test reads, and up to which half."""
    if row := params.get("row"):
        return [(Job(row.baseline), "second"), (Job(row), "second")]
    if half := params.get("half"):
        return [(Job(half.half_baseline), "second"), (Job(half), "second")]
    if faulty := params.get("faulty"):
        return [(Job(faulty[0].baseline), "first"), (Job(*faulty), "first")]
    one, other = pair_of(params["pair"])
    return [(Job(one), "first"), (Job(other, reads=one), "second")]


def pair_of(names: tuple[str, str, str]) -> tuple[Row, Row]:
    """Who wrote a checkpoint, and who reads it."""
    kind, one, other = names
    if kind == WITH_CRITIC:
        return _with_critic(one), _with_critic(other)
    if kind == WITH_LORA:
        return Row(one, lora=True), Row(other, lora=True)
    return Row(one, kind=kind), Row(other, kind=kind)


def _with_critic(name: str) -> Row:
    layout, _, own = name.partition(" & ")
    return Row(layout, critic=True, critic_on=own)


@pytest.mark.parametrize("row", marked(ROWS, FEW, [row.name for row in ROWS]))
def test_a_layout_trains_what_one_rank_trains(grid: Path, row: Row) -> None:
    found = differences(outcome(grid, Job(row)), outcome(grid, Job(row.baseline)))
    if os.environ.get(WRITES):
        table.add(row, found, today=date.today())
    if row.is_half:
        assert max(found["loss"], found["entropy"]) <= HALF_LIMIT, found
    else:
        limits = LIMITS | ({"moments": DEEP_LIMIT} if row.num_layers == 8 or row.kind in ROUNDED else {})
        assert {name: value for name, value in found.items() if value > limits[name]} == {}


@pytest.mark.parametrize("half", marked(HALVES, FEW, [row.name for row in HALVES]))
def test_layouts_agree_in_bfloat16(grid: Path, half: Row) -> None:
    found = differences(outcome(grid, Job(half)), outcome(grid, Job(half.half_baseline)))
    assert max(found["loss"], found["entropy"]) <= HALVES_LIMIT, found


@pytest.mark.parametrize("row", marked(ROWS, FEW, [row.name for row in ROWS]))
def test_one_process_exports_the_checkpoint_of_a_layout(
    grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Row
) -> None:
    job = Job(row)
    for name in HIDDEN:
        monkeypatch.setenv(name, "")
    assert export_run(grid / job.directory, tmp_path / "hf").description == "checkpoint of step 3"
    exported, weights = load_file(tmp_path / "hf" / SINGLE_FILE), outcome(grid, job).weights
    expected = {name: tensor for name, tensor in weights.items() if not name.startswith(CRITIC)}
    if row.critic:
        critic = load_file(tmp_path / "hf" / "critic" / SINGLE_FILE)
        assert torch.equal(critic["score.weight"], weights[f"{CRITIC}output_layer.weight"])
        assert critic.keys() - exported.keys() == {"score.weight", "score.bias"}
    assert exported.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(exported[name], expected[name])] == []


@pytest.mark.grid
def test_every_fault_can_be_planted() -> None:
    for fault in faults.FAULTS:
        with faults.planted(fault):  # what it replaces is where it was
            pass


@pytest.mark.parametrize("faulty", marked(FAULTY, FEW_FAULTY, [f"{row.name}: {fault}" for row, fault in FAULTY]))
def test_a_fault_breaks_its_row(grid: Path, faulty: tuple[Row, str]) -> None:
    row, _ = faulty
    found = differences(first_half(grid, Job(*faulty)), first_half(grid, Job(row.baseline)))
    assert any(value > LIMITS[name] for name, value in found.items()), found


@pytest.mark.parametrize(
    "pair", marked(PAIRS, FEW_PAIRS, [f"{one} read by {other}, {kind}" for kind, one, other in PAIRS])
)
def test_a_checkpoint_is_read_by_another_layout_to_the_bit(grid: Path, pair: tuple[str, str, str]) -> None:
    one, other = pair_of(pair)
    read, written = map(without_main_parameters, copied(grid, Job(other, reads=one)))
    assert read.keys() == written.keys(), read.keys() ^ written.keys()
    different = [name for name in read if not torch.equal(read[name], written[name])]
    assert different == []
    assert any(".exp_avg_sq." in name for name in read)


def without_main_parameters(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """They are the model's weights."""
    main = {name: tensor for name, tensor in tensors.items() if MAIN in name}
    assert all(torch.equal(tensor, tensors[name.replace(MAIN, "")]) for name, tensor in main.items())
    return {name: tensor for name, tensor in tensors.items() if name not in main}
