"""The laptop run learns: the whole system, every part real, from random weights to a solved task."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.metric_names import undocumented
from tests.support.printed_run import FIRST_RUN, README, blocks_of, shape_of, shapes_of
from tests.support.whole_runs import advice_in, best_reward, run_topology

FEWER_STEPS = 100  # of the recipe's 200: it has learnt by then
LIMIT_S = 900  # a loaded machine takes several times the two minutes of an idle one


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(
    "num_steps", [pytest.param(FEWER_STEPS, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.nightly)]
)
def test_the_laptop_run_learns_to_reverse_digits_and_its_books_close(tmp_path: Path, num_steps: int) -> None:
    settings = f"train.num_steps={num_steps}"
    result, rows, *_ = finished = run_topology(tmp_path, "topologies/laptop.toml", settings, limit_s=LIMIT_S)
    assert result["run"] == "laptop"
    assert result["steps"] == num_steps
    assert result["reward_first"] < 0.2
    assert best_reward(finished.steps) >= 0.95
    assert max(row.get("eval/reverse-digits-held-out", 0.0) for row in rows) >= 0.85
    assert result["reward_last"] > 0.5
    groups = result["groups"]
    assert groups["issued"] == groups["trained"] == num_steps * 64
    assert undocumented(rows) == set()
    steps = finished.steps
    assert [row["step"] for row in steps] == list(range(1, num_steps + 1))
    # engine and trainer compute the same model: their log-probs of the same tokens under the same weights
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in steps) < 1e-3
    assert max(row["train/train_rollout_logprob_abs_diff_max"] for row in steps) < 1e-3
    assert all(0 < row["perf/update_weights_pause_time"] < row["perf/update_weights_applied_time"] for row in steps)
    assert best_reward(steps[:85]) >= 0.85
    assert not [line for line in finished.printed if "same score" in line]
    assert advice_in(finished.run_dir) == {}
    run, summary = shapes_of(finished.printed, tmp_path)
    (readme,), (begin, end) = blocks_of(README), blocks_of(FIRST_RUN)
    written = [*map(shape_of, readme.splitlines())]
    assert written == [*run, "", *summary], "python -m tests.support.printed_run writes the pages"
    assert ([*map(shape_of, begin.splitlines())], [*map(shape_of, end.splitlines())]) == (run, summary)


@pytest.mark.nightly  # CI reads the same alarm of a smaller run in tests/docs/test_own_recipe_doc.py
@pytest.mark.timeout(LIMIT_S + 60)
def test_a_broken_grader_is_named_at_the_tenth_step_of_random_weights(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def grade(sample):\n    return 0.0\n")
    broken = (f"data.0.rm_type={tmp_path}/broken.py:grade", "train.num_steps=11")
    finished = run_topology(tmp_path, "topologies/laptop.toml", *broken, limit_s=LIMIT_S)
    (alarm,) = [number for number, line in enumerate(finished.printed) if "have the same score, 0" in line]
    before = [line for line in finished.printed[:alarm] if line.startswith("step ")]
    assert len(before) == 10


@pytest.mark.nightly
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("layout", ["laptop", "laptop-split", "laptop-colocated"])
def test_it_learns_whichever_way_weights_go(tmp_path: Path, layout: str, seed: int) -> None:
    """By files, by broadcast from two ranks to two engines, in shared memory in turns: from the same beginnings."""
    settings = (f"run.seed={seed}", f"train.num_steps={FEWER_STEPS}")
    result, *_ = finished = run_topology(tmp_path, f"topologies/{layout}.toml", *settings, limit_s=LIMIT_S)
    sys.stdout.write(f"{layout}, seed {seed}: {json.dumps(result)}\n")
    assert best_reward(finished.steps) >= 0.9
    assert result["groups"]["issued"] == result["groups"]["trained"] == FEWER_STEPS * 64
    assert (tmp_path / f"runs/{layout}/weights").exists() == (layout == "laptop")
