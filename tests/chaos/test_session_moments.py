"""Whoever takes part in a weight session dies, or stands still, at each moment of it.

The run goes on, and all engines get the newest weights. While nothing more is trained they still do.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from messages import ActorExited, ActorStarted, Message, SessionEnded, WeightsAnnounced
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import EVENT_S, ROOT, SMALL, Command, Run
from tests.chaos.rank_moments import GATE, Moment, planned
from tests.chaos.test_kill import finish
from tests.fixtures.nats import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

SPLIT: Final = ROOT / "topologies" / "laptop-split.toml"
BOTH: Final = ("engine.policy.0", "engine.policy.1")
KILLED, STOPPED = "SIGKILL", "SIGSTOP"
STEPS: Final = 4  # for each moment: to come to it, and those that were under way meanwhile
SETTINGS: Final = (
    *SMALL,
    "trainer.export_bucket_bytes=16384",
    "reward.timeout_s=600",
    "engines.policy.update_timeout_s=8",  # also waited for where a rollout actor died that was to have a bucket taken
    "engines.policy.unresponsive_after_s=8",
    "run.unresponsive_after_s=10",
)
GRADER: Final = """
import time
from pathlib import Path

def score(sample):
    while Path({gate!r}).exists():
        time.sleep(0.05)
    return str(sample.response).count("1") / 4
"""
PLACES: Final = {  # by who dies
    "trainer.0": ("before bucket 0", "before bucket 2", "after bucket 2", "before the end"),
    "trainer.1": ("before bucket 2",),
    "engine.policy.1": ("before begin", "in bucket 0", "in bucket 2", "before end"),
    "rollout": ("prepared", "told of bucket 0", "told of bucket 2"),
}
FEW: Final = {
    KILLED: (("engine.policy.1", "in bucket 2"), ("trainer.0", "before bucket 2")),
    STOPPED: (("engine.policy.1", "in bucket 2"),),
}


def moments_of(places: Sequence[tuple[str, str]], signal: str) -> tuple[Moment, ...]:
    """One after the other, from the second version on."""
    return tuple(Moment(what, 2, process, signal) for process, what in places)


COPIED: Final = ("trainer.handover=copy", "rollout.max_staleness=1")  # sent beside later train steps

ALL: Final = {
    f"{process}, {signal}": moments_of([(process, what) for what in places], signal)
    for process, places in PLACES.items()
    for signal in (KILLED, STOPPED)
}
CASES: Final = [
    *(
        pytest.param(moments_of(places, signal), (), id=signal, marks=pytest.mark.chaos)
        for signal, places in FEW.items()
    ),
    pytest.param(moments_of(FEW[KILLED], KILLED), COPIED, id="of a copy", marks=pytest.mark.chaos),
    *(pytest.param(moments, (), id=name, marks=pytest.mark.weights_all) for name, moments in ALL.items()),
    *(
        pytest.param(moments, COPIED, id=f"of a copy, {name}", marks=pytest.mark.weights_all)
        for name, moments in ALL.items()
        if "trainer.1" not in name  # which sends nothing of a copy
    ),
]


@pytest.mark.parametrize(("moments", "handover"), CASES)
async def test_all_engines_get_the_newest_weights_whoever_dies_in_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: tuple[Moment, ...], handover: Sequence[str]
) -> None:
    (marks := tmp_path / "marks").mkdir()
    (grader := tmp_path / "grader.py").write_text(GRADER.format(gate=str(marks / GATE)))
    for name, value in planned(moments, marks, in_turn=True).items():
        monkeypatch.setenv(name, value)
    run = Run(
        tmp_path,
        num_steps=STEPS * (1 + len(moments)),
        eval_interval=1000,  # none at the gate: while one runs, nobody is given weights
        topology=SPLIT,
        settings=(*SETTINGS, *handover, f"data.0.rm_type={grader}:score"),
    )
    async with run.started() as command:
        for moment in moments:
            await outlive(command, moment, marks)
        await finish(run, command)
    await audit(run, killed=died(moments), ordered=not handover)
    async with run.reopened() as bus:
        log = [event for _, event in await read_all(bus, run)]
    newest = max(event.version for event in log if isinstance(event, WeightsAnnounced))
    last = [event for event in log if isinstance(event, SessionEnded)][-1]
    assert (last.version, last.holds, last.out) == (newest, BOTH, {})


class Recovery:
    """Whether a process has been started again since a moment, and all engines hold the newest weights."""

    def __init__(self, moment: Moment, mark: Path) -> None:
        self._process = moment.process
        self._mark = mark
        self._has_ended = self._is_back = False
        self._newest = 0
        self._held: dict[str, int] = {}
        self.ended_after_s = 0.0

    @property
    def since_s(self) -> float:
        """Seconds since the moment."""
        return time.time() - self._mark.stat().st_mtime

    def is_whole(self, event: Message) -> bool:
        """Note an event of the log."""
        match event:
            case ActorExited() if event.actor == self._process:
                self._has_ended, self.ended_after_s = True, self.since_s
                self._held.pop(self._process, None)
            case ActorStarted() if event.actor == self._process and self._has_ended:
                self._is_back = True
                if self._process not in BOTH:  # whatever they hold is proven again, or replaced
                    self._held.clear()
            case WeightsAnnounced():
                self._newest = event.version
            case SessionEnded():
                self._held |= dict.fromkeys(event.holds, event.version)
            case _:
                pass
        return self._is_back and all(self._held.get(engine, -1) >= self._newest for engine in BOTH)


async def outlive(command: Command, moment: Moment, marks: Path) -> None:
    """Wait for a moment, and, while nothing is trained, until both engines hold the newest weights; then go on."""
    mark = marks / moment.name
    await eventually(mark.exists, timeout_s=EVENT_S)
    recovery = Recovery(moment, mark)
    await command.log.until(recovery.is_whole)
    ended_s, whole_s = recovery.ended_after_s, recovery.since_s
    sys.stdout.write(f"{mark.name}: ended after {ended_s:.1f} s, weights everywhere after {whole_s:.1f} s\n")
    (marks / GATE).unlink()


def died(moments: Sequence[Moment]) -> list[str]:
    """Processes that ended: a rank takes the other one along."""
    ranks = ["trainer.0", "trainer.1"]
    return [name for each in moments for name in (ranks if each.process in ranks else [each.process])]
