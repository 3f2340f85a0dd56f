"""Both halves of boxed-copy as a user runs them: demonstrations without an engine, then RL from the model they made."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.metric_names import undocumented
from tests.support.whole_runs import run_topology

LIMIT_S = 600  # for each half; a loaded machine takes several times what an idle one does
ASYNCHRONOUS = ("rollout.max_staleness=1", "rollout.over_sampling_batch_size=96")

pytestmark = pytest.mark.timeout(2 * LIMIT_S + 60)  # the first test begins with the first half


def books_closed(groups: dict[str, int]) -> bool:
    return groups["issued"] == sum(count for state, count in groups.items() if state != "issued")


class Halves(NamedTuple):
    """How far both halves train, and whether they are long enough to learn."""

    sft_steps: int
    rl_steps: int
    learns: bool


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(Halves(20, 4, learns=False), id="few steps", marks=pytest.mark.slow),
        pytest.param(Halves(200, 30, learns=True), id="whole", marks=pytest.mark.nightly),
    ],
)
def halves(request: pytest.FixtureRequest) -> Halves:
    return request.param


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, halves: Halves) -> Path:
    """Where the first half has been run."""
    place = tmp_path_factory.mktemp("boxed-copy")
    steps = f"train.num_steps={halves.sft_steps}"
    result, metrics, *_ = run_topology(place, "topologies/boxed-copy-sft.toml", steps, limit_s=LIMIT_S)
    assert undocumented(metrics) == set()
    assert result["groups"]["trained"] == result["groups"]["issued"] == halves.sft_steps * 64
    assert result["loss_first"] > 2.5  # ln 16 = 2.77 at random weights
    assert result["loss_last"] < (
        1.7 if halves.learns else 2.6
    )  # half of the digits are noise: 1.1 is the least there is
    return place


def test_demonstrations_are_trained_without_an_engine_and_exported(place: Path) -> None:
    logs = {path.stem for path in (place / "runs/boxed-copy-sft/logs").glob("*.jsonl")}
    assert {"daemon", "trainer", "rollout", "buffer"} <= logs
    assert not [name for name in logs if name.startswith(("engine", "router", "reward", "filter"))]
    exported = {path.name for path in (place / "runs/boxed-copy-sft/hf").iterdir()}
    assert exported == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_rl_goes_on_from_the_exported_model_by_partial_rollout_one_step_off(place: Path, halves: Halves) -> None:
    """Synchronous learning is that of test_laptop.py."""
    name, num_steps = "asynchronous", halves.rl_steps
    settings = (f"run.name={name}", f"train.num_steps={num_steps}", f"eval.0.interval={num_steps}")
    finished = run_topology(place, "topologies/boxed-copy.toml", *settings, *ASYNCHRONOUS, limit_s=LIMIT_S)
    result, metrics, *_ = finished
    assert result["steps"] == num_steps
    assert books_closed(result["groups"])
    assert result["groups"]["trained"] == num_steps * 64
    assert undocumented(metrics) == set()
    steps = finished.steps
    assert max(row["train/train_rollout_logprob_abs_diff_max"] for row in steps) < 1e-3
    assert max(row["rollout/staleness_max"] for row in steps) > 0
    if halves.learns:
        held_out = [row["eval/boxed-copy-held-out"] for row in metrics if "eval/boxed-copy-held-out" in row]
        assert 0.15 < result["reward_first"] < 0.5  # the form and half of the habit
        assert result["reward_last"] >= result["reward_first"] + 0.2
        assert held_out[-1] >= held_out[0] + 0.1
