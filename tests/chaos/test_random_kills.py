"""The random killer: what it chooses, and nightly a minute of it; `just kills` takes half an hour."""

import json
import os
import sys
from itertools import pairwise
from pathlib import Path

import anyio
import pytest

from tests.chaos.harness import ROOT, SEED, SMALL
from tests.chaos.random_kills import DAEMON, Victims

LIVING = ["buffer", "engine.policy.0", "nats-server", "rollout", "trainer.0", "trainer.1"]
MINUTES = 1.2
LIMIT_S = 360.0  # with a last restart of everything, the rest of the run and its audit


def drawn(seed: int, number: int = 200) -> list[tuple[float, str | None]]:
    victims, now_s, kills = Victims(seed, mean_s=15.0, trainer_spacing_s=60.0), 0.0, []
    for _ in range(number):
        now_s += victims.next_wait_s()
        kills.append((now_s, victims.choose(LIVING, now_s)))
    return kills


def test_a_seed_always_kills_the_same_processes_at_the_same_moments() -> None:
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


def test_every_process_is_hit_and_the_trainer_has_its_peace() -> None:
    kills = drawn(7, 2000)
    assert {name for _, name in kills} == {*LIVING, DAEMON}
    moments = [now_s for now_s, name in kills if name in ("trainer.0", "trainer.1", DAEMON)]
    assert min(later - earlier for earlier, later in pairwise(moments)) >= 60.0
    assert 14.0 < kills[-1][0] / len(kills) < 16.0


def test_nobody_is_killed_while_nobody_lives() -> None:
    assert Victims(7, mean_s=1.0, trainer_spacing_s=0.0).choose([], 1.0) is None


@pytest.mark.nightly
@pytest.mark.anyio
@pytest.mark.timeout(LIMIT_S + 30)
async def test_a_run_under_random_kills_completes_with_the_groups_of_an_undisturbed_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.chaos.random_kills", "--minutes", str(MINUTES), "--seed", SEED]
    command += ["--mean-s", "5", "--trainer-spacing-s", "15", "--directory", str(tmp_path)]
    settings = [word for setting in SMALL for word in ("--set", setting)]
    with anyio.fail_after(LIMIT_S):
        done = await anyio.run_process(
            [*command, *settings], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
        )
    assert done.returncode == 0, done.stderr.decode()[-8000:]
    report = json.loads(done.stdout)
    assert report["num_killed"] >= 5
    assert report["books"]["issued"] == report["books"]["trained"]
    assert report["unasked"] == {}
