"""All engines are lost with the weights of an evaluation, and the trainer has newer ones: it ends, and says by whom.

The weights are in no files. Half of the evaluation's items wait until a test opens the gate (gated.py).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from messages import EvalCompleted, EvalEnded, EvalIssued, Message, WeightsAnnounced, WeightsLost
from tests.chaos import gated
from tests.chaos.audit import Log, audit, first_answers, read_all
from tests.chaos.harness import ROOT, SMALL, Run
from tests.chaos.test_kill import finish

pytestmark = [pytest.mark.anyio]

SPLIT: Final = ROOT / "topologies" / "laptop-split.toml"
COLOCATED: Final = ROOT / "topologies" / "laptop-colocated.toml"
ENGINES: Final = ["engine.policy.0", "engine.policy.1"]
SET: Final = "reverse-digits-held-out"
NUM_FREE: Final = len(gated.LABELS) - len(gated.GATED)  # items that wait for nothing


def gated_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topology: Path, *overrides: str) -> tuple[Run, Path]:
    """A run whose evaluations wait, and the file that they wait for."""
    gate = tmp_path / "gate"
    monkeypatch.setenv(gated.GATE, str(gate))
    generate = f"rollout.custom_generate={Path(gated.__file__)}:at_the_gate"
    # a quarter of one engine's slots holds all items: the other engine may start too late for the first weights
    settings = (*SMALL, generate, "engines.policy.batch_requests=false", "engines.policy.concurrency=96")
    return Run(tmp_path, num_steps=3, topology=topology, settings=settings, overrides=overrides), gate


def half_done(*, newest: int) -> Callable[[Message], bool]:
    """Whether all items that wait for nothing have ended, and a version is announced."""
    ended, announced = set[str](), set[int]()

    def holds(event: Message) -> bool:
        match event:
            case EvalCompleted():
                ended.add(event.key())
            case WeightsAnnounced():
                announced.add(event.version)
            case _:
                pass
        return len(ended) == NUM_FREE and newest in announced

    return holds


async def log_of(run: Run) -> Log:
    async with run.reopened() as bus:
        return await read_all(bus, run)


def check_result(log: Log) -> None:
    """The first evaluation began with version 1, ended with a newer one, and says how much of it that answered."""
    issued = next(event for _, event in log if isinstance(event, EvalIssued))
    ended = next(event for _, event in log if isinstance(event, EvalEnded))
    assert (issued.step, issued.version) == (ended.step, ended.version) == (0, 1)
    lost = [event for _, event in log if isinstance(event, WeightsLost)]
    assert [event.version for event in lost] == [1, *(event.newer for event in lost[:-1])]  # no engine had that yet
    versions = {item: event.samples[0].last_version for item, event in first_answers(log, 0).items()}
    assert sum(version == 1 for version in versions.values()) == NUM_FREE
    (newer,) = set(versions.values()) - {1}
    assert ended.newest_version == lost[-1].newer == newer
    assert ended.metrics[f"eval/{SET}-newer_weights_ratio"] == len(gated.GATED) / len(gated.LABELS)


@pytest.mark.parametrize(
    "export",
    [pytest.param("live", marks=pytest.mark.chaos), pytest.param("async", marks=pytest.mark.nightly)],
)
async def test_both_engines_are_killed_when_the_trainer_is_ahead_of_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export: str
) -> None:
    overrides = "rollout.max_staleness=1", f"trainer.weight_export={export}"
    run, gate = gated_run(tmp_path, monkeypatch, SPLIT, *overrides)
    async with run.started() as command:
        await command.log.until(half_done(newest=2))
        before = {name: command.log.pids[name] for name in ENGINES}
        for name in ENGINES:
            command.log.kill(name)
        await command.log.until(lambda _: all(command.log.pids[name] != before[name] for name in ENGINES))
        gate.touch()
        await finish(run, command)
    await audit(run, killed=ENGINES, ordered=False)
    check_result(await log_of(run))
    assert "no engine of rollout holds weights v1 any more: their evaluation goes on with v" in run.output.read_text()


@pytest.mark.nightly
async def test_one_of_two_engines_is_killed_and_the_other_ends_the_evaluation_by_its_own_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, gate = gated_run(tmp_path, monkeypatch, SPLIT, "rollout.max_staleness=1")
    async with run.started() as command:
        await command.log.until(half_done(newest=2))
        command.log.kill(ENGINES[1])
        await command.log.until_restarted(ENGINES[1])
        gate.touch()
        await finish(run, command)
    await audit(run, killed=ENGINES[1:], ordered=False)
    log = await log_of(run)
    assert not [event for _, event in log if isinstance(event, WeightsLost)]
    assert {event.newest_version for _, event in log if isinstance(event, EvalEnded)} == {0}


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param(SPLIT, id="collective", marks=pytest.mark.nightly),
        pytest.param(COLOCATED, id="ipc", marks=pytest.mark.nightly),
    ],
)
async def test_everything_is_killed_within_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topology: Path
) -> None:
    """The trainer comes back with a new number for the same weights, at max_staleness 0 too."""
    run, gate = gated_run(tmp_path, monkeypatch, topology)
    async with run.started() as command:
        await command.log.until(half_done(newest=1))
        family = command.kill_everything()
        await command.end()
        await run.gone(family)
    gate.touch()
    async with run.started() as command:
        await finish(run, command)
    await audit(run, killed=None)
    check_result(await log_of(run))


@pytest.mark.nightly
async def test_a_trainer_in_turns_with_its_engines_is_killed_within_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines give their weights away for its start."""
    run, gate = gated_run(tmp_path, monkeypatch, COLOCATED)
    async with run.started() as command:
        await command.log.until(half_done(newest=1))
        command.log.kill("trainer")
        await command.log.until(lambda event: isinstance(event, WeightsAnnounced) and event.version == 2)
        gate.touch()
        await finish(run, command)
    await audit(run, killed=["trainer"])
    check_result(await log_of(run))
