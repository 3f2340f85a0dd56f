"""Recovery from a kill point: all engines get the newest weights, while no further step is trained."""

import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import pytest

from messages import ActorExited, ActorStarted, Message, WeightsAnnounced, WeightSyncEnded
from tests.chaos.audit import read_all
from tests.chaos.harness import Command, Run
from tests.chaos.rank_moments import GATE, Moment, planned
from tests.fixtures.nats import eventually

GRADER: Final = """
import time
from pathlib import Path

def score(sample):
    while Path({gate!r}).exists():
        time.sleep(0.05)
    return str(sample.response).count("1") / 4
"""


def prepare(directory: Path, monkeypatch: pytest.MonkeyPatch, moments: Sequence[Moment]) -> tuple[Path, str]:
    """Plan consecutive kill points for the processes of a run.

    Returns:
        The directory of the marks, and the setting of a grader that blocks while the gate file exists there.
    """
    (marks := directory / "marks").mkdir()
    (grader := directory / "grader.py").write_text(GRADER.format(gate=str(marks / GATE)))
    for name, value in planned(moments, marks, in_turn=True).items():
        monkeypatch.setenv(name, value)
    return marks, f"data.0.rm_type={grader}:score"


class Recovery:
    """Tracks whether a process has restarted since a kill point, and whether all engines hold the newest weights."""

    def __init__(self, moment: Moment, mark: Path, engines: Collection[str]) -> None:
        self._process = moment.process
        self._mark = mark
        self._engines = engines
        self._has_ended = self._is_back = False
        self._newest = 0
        self._held: dict[str, int] = {}
        self.ended_after_s = 0.0

    @property
    def since_s(self) -> float:
        """Seconds since the kill point."""
        return time.time() - self._mark.stat().st_mtime

    def is_whole(self, event: Message) -> bool:
        """Process a log event. True: the run has recovered."""
        match event:
            case ActorExited() if event.actor == self._process:
                self._has_ended, self.ended_after_s = True, self.since_s
                self._held.pop(self._process, None)
            case ActorStarted() if event.actor == self._process and self._has_ended:
                self._is_back = True
                if self._process not in self._engines:  # engines are verified again, or replaced
                    self._held.clear()
            case WeightsAnnounced():
                self._newest = event.version
            case WeightSyncEnded():
                self._held |= dict.fromkeys(event.holds, event.version)
            case _:
                pass
        return self._is_back and all(self._held.get(engine, -1) >= self._newest for engine in self._engines)


async def until_whole(command: Command, moment: Moment, marks: Path, engines: Collection[str]) -> None:
    """Wait for a kill point, then until all engines hold the newest weights, while nothing is trained."""
    mark = marks / moment.name
    await eventually(mark.exists, timeout_s=command.log.event_s)
    recovery = Recovery(moment, mark, engines)
    await command.log.until(recovery.is_whole)
    ended_s, whole_s = recovery.ended_after_s, recovery.since_s
    sys.stdout.write(f"{mark.name}: ended after {ended_s:.1f} s, weights everywhere after {whole_s:.1f} s\n")


def died(moments: Sequence[Moment]) -> list[str]:
    """Return the processes that end. The end of one rank also ends the other."""
    ranks = ["trainer.0", "trainer.1"]
    return [name for each in moments for name in (ranks if each.process in ranks else [each.process])]


async def check_the_last_session(run: Run) -> None:
    """Check in an ended run that all engines hold the newest weights."""
    async with run.reopened() as bus:
        log = [event for _, event in await read_all(bus, run)]
    newest = max(event.version for event in log if isinstance(event, WeightsAnnounced))
    last = [event for event in log if isinstance(event, WeightSyncEnded)][-1]
    engines = tuple(f"engine.policy.{index}" for index in range(run.topology.engines["policy"].num_engines))
    assert (last.version, last.holds, last.out) == (newest, engines, {}), (newest, last)
