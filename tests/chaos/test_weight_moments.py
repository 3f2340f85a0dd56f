"""A trainer rank, a rollout actor or an engine dies or stands still before, during or after a step of a weight sync.

The run goes on, and all engines get the newest weights. While nothing more is trained they still do.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.chaos.audit import audit
from tests.chaos.harness import ROOT, SMALL, Run
from tests.chaos.outliving import check_the_last_session, died, prepare, until_whole
from tests.chaos.rank_moments import GATE, Moment
from tests.chaos.test_kill import finish
from tests.chaos.weight_moments import Step, When, at

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

SPLIT: Final = ROOT / "topologies" / "laptop-split.toml"
BOTH: Final = ("engine.policy.0", "engine.policy.1")
Place = tuple[When, Step, int | None]
KILLED, STOPPED = "SIGKILL", "SIGSTOP"
STEPS: Final = 4  # for each moment: to come to it, and those that were under way meanwhile
SETTINGS: Final = (
    *SMALL,
    "trainer.export_bucket_bytes=16384",
    "reward.timeout_s=600",
    "engines.policy.update_stall_s=8",  # also waited for where a rollout actor died that was to have a bucket taken
    "engines.policy.unresponsive_after_s=8",
    "run.unresponsive_after_s=10",
)
PLACES: Final[dict[str, tuple[Place, ...]]] = {  # by who dies
    "trainer.0": (
        ("before", "prepare", None),
        ("before", "bucket", 0),
        ("during", "bucket", 2),
        ("after", "bucket", 2),
        ("before", "commit", None),
        ("after", "commit", None),
    ),
    "trainer.1": (("before", "bucket", 2),),
    "engine.policy.1": (
        ("before", "prepare", None),
        ("during", "bucket", 0),
        ("during", "bucket", 2),
        ("before", "commit", None),
        ("during", "commit", None),
    ),
    "rollout": (
        ("before", "prepare", None),
        ("before", "bucket", 0),
        ("during", "bucket", 2),
        ("after", "commit", None),
    ),
}
FEW_KILLED: Final[tuple[tuple[str, Place], ...]] = (
    ("engine.policy.1", ("during", "bucket", 2)),
    ("trainer.0", ("before", "bucket", 2)),
)
FEW_STOPPED: Final[tuple[tuple[str, Place], ...]] = (("engine.policy.1", ("during", "bucket", 2)),)


def moments_of(places: Sequence[tuple[str, Place]], signal: str) -> tuple[Moment, ...]:
    """One after the other, from the second version on."""
    return tuple(at(*place, process=process, signal=signal) for process, place in places)


COPIED: Final = ("trainer.weight_export=async", "rollout.max_staleness=1")  # sent beside later train steps

ALL: Final = {
    f"{process}, {signal}": moments_of([(process, place) for place in places], signal)
    for process, places in PLACES.items()
    for signal in (KILLED, STOPPED)
}
CASES: Final = [
    pytest.param(moments_of(FEW_STOPPED, STOPPED), (), id=STOPPED, marks=pytest.mark.nightly),
    pytest.param(moments_of(FEW_KILLED, KILLED), COPIED, id="of a copy", marks=pytest.mark.chaos),
    *(pytest.param(moments, (), id=name, marks=pytest.mark.nightly) for name, moments in ALL.items()),
    *(
        pytest.param(moments, COPIED, id=f"of a copy, {name}", marks=pytest.mark.nightly)
        for name, moments in ALL.items()
        if "trainer.1" not in name  # which sends nothing of a copy
    ),
]


@pytest.mark.parametrize(("moments", "settings"), CASES)
async def test_all_engines_get_the_newest_weights_whoever_dies_in_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: tuple[Moment, ...], settings: Sequence[str]
) -> None:
    marks, grader = prepare(tmp_path, monkeypatch, moments)
    run = Run(
        tmp_path,
        num_steps=STEPS * (1 + len(moments)),
        eval_interval=1000,  # none at the gate: while one runs, nobody is given weights
        topology=SPLIT,
        settings=(*SETTINGS, *settings, grader),
        paced=False,  # the grader waits for the test
    )
    async with run.started() as command:
        for moment in moments:
            await until_whole(command, moment, marks, BOTH)
            (marks / GATE).unlink()
        await finish(run, command)
    await audit(run, killed=died(moments), ordered=not settings)
    await check_the_last_session(run)
