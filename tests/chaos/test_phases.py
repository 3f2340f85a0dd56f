"""Trainer and engine in the same memory: whoever dies in whichever phase, the run goes on with the same trained set."""

import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from messages import EngineState, EngineStateChanged, Phase, PhaseChanged
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import ROOT, SMALL, Command, Run

pytestmark = [pytest.mark.anyio]

COLOCATED: Final = ROOT / "topologies/laptop-colocated.toml"
ENGINE, ROLLOUT, TRAINER = "engine.policy.0", "rollout", "trainer"
NOTICED: Final = (  # the node daemon kills a process that stands still
    "engines.policy.unresponsive_after_s=8",
    "engines.policy.update_stall_s=8",
    "run.unresponsive_after_s=10",
)
Deaths = tuple[tuple[str, Phase], ...]

FEW: Final[Deaths] = (  # each of them
    (ENGINE, Phase.TRAIN),
    (ROLLOUT, Phase.RELEASE),
    (TRAINER, Phase.GENERATE),
    (TRAINER, Phase.UPDATE),  # its engines are in a session
    (ROLLOUT, Phase.RESUME_KV),  # what its engines have loaded is proven to nobody then
)
ALL: Final[dict[str, Deaths]] = {
    victim: tuple((victim, phase) for phase in Phase) for victim in (ENGINE, ROLLOUT, TRAINER)
}


async def kill_in(command: Command, deaths: Deaths, number: signal.Signals) -> None:
    """Kill or stop one after another, each in a phase of the first step that comes after its predecessor is back."""
    for victim, phase in deaths:
        await command.log.until_trained(command.log.trained + 1)
        await command.log.until(lambda event, phase=phase: isinstance(event, PhaseChanged) and event.phase is phase)
        if number is signal.SIGKILL:
            command.log.kill(victim)
        else:
            os.kill(command.log.pids[victim], number)
        await command.log.until_restarted(victim)


async def survive(tmp_path: Path, deaths: Deaths, number: signal.Signals = signal.SIGKILL) -> None:
    settings = SMALL if number is signal.SIGKILL else (*SMALL, *NOTICED)
    run = Run(tmp_path, num_steps=3 * len(deaths) + 3, topology=COLOCATED, settings=settings)
    async with run.started() as command:
        await kill_in(command, deaths, number)
        family = command.family()
        assert await command.end() == 0
        await run.gone(family)
    # A rollout actor may die, or stand still, between a call to release or resume memory and its answer: then its
    # engine is started again, too.
    await audit(
        run,
        killed=[victim for victim, _ in deaths] if number is signal.SIGKILL else None,
        also="its memory level is unknown",
    )
    async with run.reopened() as bus:
        events = [event for _, event in await read_all(bus, run)]
    turns = [event for event in events if isinstance(event, PhaseChanged)]
    check_order(turns)
    states = [event.new for event in events if isinstance(event, EngineStateChanged)]
    assert EngineState.RELEASED in states


def check_order(turns: list[PhaseChanged]) -> None:
    """Each phase follows the one before it, except where another incarnation begins with release."""
    order = list(Phase)
    for before, turn in pairwise(turns):
        if turn.reason:
            # unknown if the trainer began with a snapshot that is newer than the last change: snapshots have no phase
            assert turn.previous in (before.phase, None)
            assert (turn.phase, turn.incarnation) == (Phase.RELEASE, before.incarnation + 1)
        else:
            assert turn.previous is before.phase
            assert turn.phase is order[(order.index(before.phase) + 1) % len(order)]
            assert turn.incarnation == before.incarnation
    assert turns[0].phase is Phase.TRAIN


@pytest.mark.chaos
async def test_each_of_them_dies_in_phases_that_need_it(tmp_path: Path) -> None:
    await survive(tmp_path, FEW)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
@pytest.mark.parametrize("victim", list(ALL))
async def test_one_ends_in_every_phase(tmp_path: Path, victim: str, number: signal.Signals) -> None:
    await survive(tmp_path, ALL[victim], number)


def test_every_phase_has_its_deaths() -> None:
    assert {death for deaths in ALL.values() for death in deaths} >= set(FEW)
    assert all({phase for _, phase in deaths} == set(Phase) for deaths in ALL.values())
