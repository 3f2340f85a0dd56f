"""A run is dumped; the trainer alone learns the same from the dump, and rollout alone runs without training."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.data.dump_files import read_pair, steps_in
from runtime.data.trained_tokens import read_trained
from tests.support.whole_runs import Finished, run_topology

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, BATCH, SAMPLES = 3, 8, 4
SMALL = (f"train.num_steps={STEPS}", f"rollout.rollout_batch_size={BATCH}", f"rollout.n_samples_per_prompt={SAMPLES}")


def start(cwd: Path, name: str, *words: str, overrides: tuple[str, ...] = ()) -> Finished:
    """A whole run of the laptop topology, small."""
    settings = (*SMALL, "eval.0.interval=2", f"run.name={name}", *overrides)
    return run_topology(cwd, "topologies/laptop.toml", *words, *settings)


def samples(dump: Path) -> list[Any]:
    """Every sample of a dump by step, without the names of its group."""
    assert steps_in(dump) == list(range(STEPS))
    return [
        (step, sample.prompt, sample.response, sample.reward, [segment.response_ids.tolist() for segment in segments])
        for step in steps_in(dump)
        for group in read_pair(dump, step)
        for sample, segments in zip(group.samples, group.segments, strict=True)
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A whole run; tests only read it."""
    overrides = ("run.dump_details=dump", "observe.tokens=true")
    finished = start(tmp_path_factory.mktemp("whole"), "whole", overrides=overrides)
    assert finished.result["groups"]["trained"] == STEPS * BATCH
    return finished


@pytest.fixture(scope="module")
def dump(whole: Finished) -> Path:
    """The dump of the whole run."""
    return whole.run_dir.parents[1] / "dump"


def test_the_trainer_alone_learns_the_same_from_a_dump(whole: Finished, dump: Path, tmp_path: Path) -> None:
    again = start(tmp_path, "again", "--only", "trainer", "--load", str(dump), overrides=("run.dump_details=second",))
    assert again.result["groups"]["trained"] == STEPS * BATCH
    assert again.result["eval_last"] is None
    first = samples(dump)
    assert len(first) == STEPS * BATCH * SAMPLES
    assert first == samples(tmp_path / "second")
    same = (
        "train/loss",
        "train/grad_norm",
        "rollout/raw_reward",
        "rollout/response_lengths",
        "rollout/truncated_ratio",
    )
    for one, other in zip(whole.steps, again.steps, strict=True):
        assert {key: one[key] for key in same} == {key: other[key] for key in same}
    logs = {path.stem for path in (again.run_dir / "logs").iterdir()}
    assert not {name for name in logs if name.startswith(("engine", "router", "reward"))}
    assert list(again.run_dir.glob("weights/v*")) == []


def test_the_trainer_adds_its_log_probs_of_the_first_optimizer_step_to_the_dump(dump: Path) -> None:
    num_compared = 0
    groups = [(step, group) for step in steps_in(dump) for group in read_pair(dump, step)]
    for number, group in groups:
        for index, segments in enumerate(group.segments):
            (segment,) = segments
            num_prompt, num_tokens = len(segment.prompt_ids), len(segment.prompt_ids) + len(segment.response_ids)
            found = read_trained(dump, number, (group.group_id, index, 0), num_tokens)
            assert found is not None
            assert found.left_out == ""
            log_probs = found.trainer_log_probs[num_prompt:]
            known = (segment.loss_mask != 0) & ~np.isnan(log_probs)
            np.testing.assert_allclose(log_probs[known], segment.rollout_log_probs[known], atol=1e-3)
            num_compared += int(known.sum())
    assert num_compared > STEPS * SAMPLES


def test_a_run_on_a_shorter_dump_ends_with_the_dump(dump: Path, tmp_path: Path) -> None:
    shutil.copytree(dump, tmp_path / "dump", ignore=shutil.ignore_patterns("rollout_[1-9]*"))
    shorter = start(tmp_path, "shorter", "--only", "trainer", "--load", "dump").result
    assert (shorter["steps"], shorter["groups"]["trained"]) == (1, BATCH)


def test_rollout_alone_runs_to_its_end_on_the_same_weights(tmp_path: Path) -> None:
    finished = start(tmp_path, "alone", "--only", "rollout", overrides=("run.dump_details=dump",))
    result, run = finished.result, finished.run_dir
    groups = result["groups"]
    assert groups["issued"] == groups["trained"] == STEPS * BATCH
    assert result["eval_last"] is not None
    assert len(samples(tmp_path / "dump")) == STEPS * BATCH * SAMPLES
    assert "trainer.jsonl" not in {path.name for path in (run / "logs").iterdir()}
    assert [path.name for path in (run / "weights").iterdir()] == ["drawn"]
    assert not (run / "checkpoints").exists()
