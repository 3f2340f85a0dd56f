"""A rank of the trainer is killed, or stands still, in each part of a step and of a checkpoint.

The run goes on from the last complete checkpoint, and learns to the bit what the undisturbed one learns.
"""

import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest
import torch

from actors.trainer.checkpoints import checkpoints_in
from messages import BatchTrained
from runtime.models.checkpoint_files import CHECKPOINTS
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import Run
from tests.chaos.rank_moments import Moment, planned
from tests.chaos.recorded import write_dump
from tests.support.checkpoint_tensors import tensors_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(1500)]

NUM_STEPS, BATCH_SIZE, NUM_SAMPLES = 6, 8, 4
SAVE_INTERVAL = 2
STILL_S = 10.0  # without a sign of its event loop a rank is given up
END_S = 120.0  # limit of an undisturbed run, and of the steps after each death
SETTINGS = (
    f"rollout.rollout_batch_size={BATCH_SIZE}",
    f"rollout.n_samples_per_prompt={NUM_SAMPLES}",
    "rollout.max_staleness=0",
    f"train.save_interval={SAVE_INTERVAL}",
    "run.only=trainer",
    f"run.unresponsive_after_s={STILL_S}",
    "trainer.num_processes=2",
)
LAYOUTS = {
    "TP2": ("trainer.megatron.tensor_model_parallel_size=2",),
    "DP2+DO": ("trainer.optimizer.use_distributed_optimizer=true",),
    "CP2": ("trainer.megatron.context_parallel_size=2",),  # the model has one layer, too few for stages
}
STOPPED = "SIGSTOP"

PARTS = ("forward", "backward", "optimizer", "copied", "before its files", "before its report", "after its report")


def everywhere(rank: int, signal: str) -> tuple[Moment, ...]:
    """Each part of a step and of a checkpoint, one after the other."""
    steps = (1, 2, 3, 2, 4, 4, 6)  # a checkpoint of 2 steps is written beside the step with number 2
    return tuple(Moment(part, step, f"trainer.{rank}", signal) for part, step in zip(PARTS, steps, strict=True))


FEW = {
    "TP2": (Moment("forward", 1, "trainer.1"), Moment("before its report", 4, "trainer.1")),
    "DP2+DO": (Moment("backward", 3, "trainer.1", STOPPED), Moment("optimizer", 5, "trainer.0")),
}
MARKS = {"TP2": pytest.mark.nightly, "DP2+DO": pytest.mark.chaos}
ALL = {
    f"{layout}, rank {rank}, {signal}": (layout, everywhere(rank, signal))
    for layout in LAYOUTS
    for rank in (0, 1)
    for signal in ("SIGKILL", STOPPED)
}
CASES = [
    *(pytest.param(layout, FEW[layout], id=layout, marks=mark) for layout, mark in MARKS.items()),
    *(pytest.param(*case, id=name, marks=pytest.mark.nightly) for name, case in ALL.items()),
]


@pytest.mark.parametrize(("layout", "moments"), CASES)
async def test_a_run_learns_the_same_whenever_a_rank_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, moments: tuple[Moment, ...]
) -> None:
    for directory in (undisturbed := tmp_path / "undisturbed", disturbed := tmp_path / "disturbed"):
        directory.mkdir()
    write_dump(tmp_path / "dump", num_steps=NUM_STEPS, num_groups=BATCH_SIZE, group_size=NUM_SAMPLES)
    expected = await trained(undisturbed, layout)
    (marks := tmp_path / "marks").mkdir()
    for name, value in planned(moments, marks).items():
        monkeypatch.setenv(name, value)
    found = await trained(disturbed, layout, killed=["trainer.0", "trainer.1"] * len(moments))
    assert {mark.name for mark in marks.iterdir()} == {moment.name for moment in moments}
    assert len(found) > len(expected) == NUM_STEPS  # some steps were trained twice
    assert [unequal for step, metrics in found if (unequal := differing(metrics, dict(expected)[step]))] == []
    final = last_tensors(disturbed)
    assert [name for name, tensor in last_tensors(undisturbed).items() if not torch.equal(tensor, final[name])] == []
    for moment in moments:
        told = ends_after(disturbed, marks / moment.name)
        stopped = moment.signal == STOPPED
        (other,) = {"trainer.0", "trainer.1"} - {moment.process}
        assert told == {
            moment.process: f"event loop was blocked for {STILL_S:g} s" if stopped else "killed by SIGKILL",
            other: f"{moment.process}, another process of restart group trainer, had ended",
        }, moment


async def trained(directory: Path, layout: str, *, killed: Sequence[str] = ()) -> list[tuple[int, dict[str, float]]]:
    """Run it to its end; return what every train step came to, in the order of the log, those trained again too."""
    settings = (*SETTINGS, *LAYOUTS[layout], f"run.load={directory.parent / 'dump'}")
    run = Run(directory, num_steps=NUM_STEPS, eval_interval=None, settings=settings)
    async with run.started() as command:
        command.end_s = END_S * (1 + len(killed) / 2)
        family = command.family()
        assert await command.end() == 0
        await run.gone(family)
    await audit(run, killed=killed, ordered=False)
    async with run.reopened() as bus:
        steps = [event for _, event in await read_all(bus, run) if isinstance(event, BatchTrained)]
    return [(event.step, untimed(event.metrics)) for event in steps]


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def differing(found: dict[str, float], expected: dict[str, float]) -> dict[str, tuple[float | None, float | None]]:
    """Metrics that are not the same to the bit."""
    names = found.keys() | expected.keys()
    pairs = {name: (found.get(name), expected.get(name)) for name in sorted(names)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def last_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer at the end of a run."""
    (run,) = (directory / "runs").iterdir()
    newest = checkpoints_in(run / CHECKPOINTS)[-1]
    assert newest.step == NUM_STEPS
    return tensors_of(newest.path)


def ends_after(directory: Path, mark: Path) -> dict[str, str]:
    """Why the ranks ended after a moment, by the daemon's log."""
    (run,) = (directory / "runs").iterdir()
    came = mark.stat().st_mtime
    ended: dict[str, str] = {}
    for line in map(json.loads, (run / "logs" / "daemon.jsonl").read_text().splitlines()):
        after_s = datetime.fromisoformat(line["time"]).timestamp() - came
        if after_s > 0 and line["event"] == "process_changed" and line["change"] == "exited":
            if line["process"] not in ended:
                ended[line["process"]] = line["reason"]
                sys.stdout.write(f"{mark.name}: {line['process']} {after_s:.2f} s {line['reason']}\n")
            if len(ended) == 2:
                break
    return ended
