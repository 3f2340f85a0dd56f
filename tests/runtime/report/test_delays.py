"""Delays of a second in a real run: they appear in the parts of its steps, for `bin/watch --time` as for the fold."""

import json
from pathlib import Path

import pytest

from bin.watch import main
from tests.support.commands import called
from tests.support.whole_runs import run_topology

DELAY_S = 1.0
USER = """
import asyncio

async def grade(sample):
    await asyncio.sleep(1.0)
    return float(len(set(sample.response)) % 3)

async def keep(group):
    await asyncio.sleep(0.25)  # four groups of a batch, one after the other
    return True
"""
OF_THE_TRAINER = """
import sys, time

if "trainer" in sys.orig_argv:
    from actors.trainer.commands import TrainerRank

    def delayed(name):
        function = getattr(TrainerRank, name)
        def late(*arguments, **named):
            time.sleep(1.0)
            return function(*arguments, **named)
        setattr(TrainerRank, name, late)

    delayed("publish")
    delayed("begin_save")
"""


@pytest.mark.slow
def test_delays_of_grader_filter_weights_and_checkpoint_are_in_their_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_delays.py").write_text(USER)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(OF_THE_TRAINER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    settings = ("run.name=late", "train.num_steps=5", "train.save_interval=2", "rollout.rollout_batch_size=4")
    settings += ("rollout.n_samples_per_prompt=2", "algorithm.num_steps_per_rollout=1", "eval=[]")
    settings += ('rollout.dynamic_filter="my_delays.py:keep"', 'data.0.rm_type="my_delays.py:grade"')
    run = run_topology(tmp_path, "topologies/laptop.toml", *settings)
    shown = called(main, str(run.run_dir), "--time", "--json", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    steps = [step for step in json.loads(shown.stdout)["steps"] if step["what"] == "step"][1:]
    parts = {part: [step["parts"].get(part, 0.0) for step in steps] for part in steps[0]["parts"] | {"checkpoint": 0}}
    saves = [step["step"] in (3, 5) for step in steps]  # after the checkpoints of steps 2 and 4
    without_save = [seconds for seconds, saved in zip(parts["scores"], saves, strict=True) if not saved]
    with_save = [seconds for seconds, saved in zip(parts["checkpoint"], saves, strict=True) if saved]
    no_checkpoint = [seconds for seconds, saved in zip(parts["checkpoint"], saves, strict=True) if not saved]
    # a busy machine adds to single steps: the shortest one shows that nothing else is counted
    for delayed in (with_save, parts["weights"]):
        assert DELAY_S <= min(delayed) <= 1.5 * DELAY_S, parts
    for delayed in (parts["filter"], without_save):  # while one group is filtered, another may still be graded
        assert 0.5 * DELAY_S <= min(delayed) <= 1.5 * DELAY_S, parts
    assert min(no_checkpoint) <= 0.5 * DELAY_S, parts
    for step in steps:
        assert sum(step["parts"].values()) == pytest.approx(step["end"] - step["begin"], abs=0.001)
    assert sum(parts["unexplained"]) <= 0.1 * sum(step["end"] - step["begin"] for step in steps), parts
