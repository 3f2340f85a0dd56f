"""Sick and healthy runs of the laptop recipe: advice names the cause in each sick one, and is silent on the healthy."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from bin.watch import main
from tests.support.commands import called
from tests.support.whole_runs import run_topology

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

USER = """
import asyncio

async def slow_grade(sample):
    await asyncio.sleep(8.0)
    return float(len(set(sample.response)) % 3)

def equal_grade(sample):
    return 1.0

def one_in_ten(group):
    return (group.group_id % 10 == 0, "nine_in_ten")
"""
SLOW_ENGINES = """
import os, sys

if "actors.tiny_engine" in sys.orig_argv:
    from actors.tiny_engine.engine.thread import EngineThread

    try:  # the first engine that starts is five times as slow as the others
        os.close(os.open({first!r}, os.O_CREAT | os.O_EXCL))
        seconds = 0.1
    except FileExistsError:
        seconds = 0.02
    begin = EngineThread.__init__

    def delayed(self, *arguments, **named):
        begin(self, *arguments, **named)
        self.slow_down(seconds)

    EngineThread.__init__ = delayed
"""
COMMON = ("run.name=r", "run.check_timeout_s=300")  # also on a busy machine
SMALL = (
    "rollout.rollout_batch_size=8",
    "rollout.n_samples_per_prompt=4",
    "algorithm.num_steps_per_rollout=1",
    "eval=[]",
)


class Case(NamedTuple):
    """A run, and the advice that it must get."""

    names: tuple[str, ...]
    settings: tuple[str, ...]
    site: str = ""  # of all its processes


CASES = {
    "normal": Case((), ("train.num_steps=200",)),
    "long tail": Case(
        (),
        ("train.num_steps=60", "rollout.max_response_len=24", "rollout.over_sampling_batch_size=96"),
    ),
    "asynchronous": Case((), ("train.num_steps=60", "rollout.max_staleness=2", 'trainer.weight_export="async"')),
    "slow engine": Case(
        ("slow engine",),
        (
            *SMALL,
            "train.num_steps=12",
            "rollout.rollout_batch_size=32",
            "rollout.max_response_len=16",
            "engines.policy.num_engines=2",
            "engines.policy.concurrency=32",
        ),
        SLOW_ENGINES,
    ),
    "slow grader": Case(("slow grader",), (*SMALL, "train.num_steps=8", 'data.0.rm_type="my_user.py:slow_grade"')),
    "starving filter": Case(
        ("filter drops groups",), (*SMALL, "train.num_steps=12", 'rollout.dynamic_filter="my_user.py:one_in_ten"')
    ),
    "garbled": Case(("no end token",), ("train.num_steps=22", "rollout.temperature=5.0")),
    "equal rewards": Case(
        ("groups without spread",), (*SMALL, "train.num_steps=12", 'data.0.rm_type="my_user.py:equal_grade"')
    ),
}


def run(case: Case, place: Path) -> Path:
    """Run a case to its end; return its run directory."""
    (place / "my_user.py").write_text(USER)
    (place / "site").mkdir()
    (place / "site" / "sitecustomize.py").write_text(case.site.format(first=str(place / "first")))
    return run_topology(place, "topologies/laptop.toml", *COMMON, *case.settings, limit_s=800.0).run_dir


@pytest.mark.parametrize("name", CASES)
def test_advice_names_the_cause_of_a_sick_run_and_is_silent_on_a_healthy_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    run_dir = run(CASES[name], tmp_path)
    shown = called(main, str(run_dir), "--time", "--json", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert tuple(advice["name"] for advice in json.loads(shown.stdout)["advice"]) == CASES[name].names
