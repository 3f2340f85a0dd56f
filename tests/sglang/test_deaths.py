"""Who takes part in a weight session dies in it, or stands still, in whole runs on SGLang's own server.

The run goes on, and all engines get the newest weights. No engine is left paused or in an open session, and what it
samples from is what the trainer has.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import aiohttp
import pytest

from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.updates import WeightUpdates
from runtime.bus.addresses import engine_key
from tests.chaos.audit import audit
from tests.chaos.harness import ROOT, SMALL, Command, Run
from tests.chaos.outliving import check_the_last_session, died, prepare, until_whole
from tests.chaos.rank_moments import FOLDER, GATE, Moment
from tests.chaos.test_kill import finish, url_of
from tests.chaos.test_within_a_session import outlive
from tests.chaos.weight_moments import at
from tests.sglang.recipe import RECIPE, overrides
from tests.sglang.server import SHIM
from tests.sglang.test_kills import LIMIT_S, RESTART_S, SOON, check_that_it_is_not_paused
from tests.sglang.test_laptop import CLOSE, LAYOUTS

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(LIMIT_S)]

CALL_S: Final = 30.0
STEPS: Final = 2  # for each moment: to come to it, and the one after
ONE: Final = {"engines.policy.weight_transport": "collective"}
SPLIT, COLOCATED = LAYOUTS["split, collective"], LAYOUTS["colocated, ipc"]
SETTINGS: Final = (
    *SMALL,
    "trainer.export_bucket_bytes=16384",
    "reward.timeout_s=600",
)
HANGS: Final = (*SOON, "engines.policy.update_stall_s=20")  # where a process stands still: the limits must strike
CASES: Final = [
    pytest.param(
        ONE,
        (at("before", "bucket", 2, process="engine.policy.0"), at("before", "bucket", 2, process="trainer")),
        id="engine and trainer, SIGKILL",
        marks=pytest.mark.sglang,
    ),
    pytest.param(
        SPLIT,
        (
            at("before", "bucket", 2, process="rollout"),
            at("after", "bucket", 2, process="trainer.0"),
            at("before", "bucket", 2, process="engine.policy.1", signal="SIGSTOP"),
        ),
        id="split: rollout and rank, SIGKILL, engine, SIGSTOP",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        COLOCATED,
        (at("before", "bucket", 2, process="engine.policy.0"),),
        id="in turns: engine, SIGKILL",
        marks=pytest.mark.nightly,
    ),
]


def run_of(directory: Path, num_steps: int, layout: dict[str, object], *settings: str) -> Run:
    """The laptop recipe on SGLang, whose scheduler gets its moments, too."""
    path = {"engines.policy.env.PYTHONPATH": f"{FOLDER}:{SHIM}:{ROOT}"}
    return Run(
        directory,
        num_steps=num_steps,
        eval_interval=1000,  # none at the gate: while one runs, nobody is given weights
        topology=RECIPE,
        settings=(*SETTINGS, *settings),
        overrides=overrides(**path, **layout),
        paced=False,  # the grader waits for the test
    )


@pytest.mark.parametrize(("layout", "moments"), CASES)
async def test_sglang_gets_the_newest_weights_whoever_dies_in_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: dict[str, object], moments: Sequence[Moment]
) -> None:
    marks, grader = prepare(tmp_path, monkeypatch, moments)
    hangs = HANGS if any(moment.signal == "SIGSTOP" for moment in moments) else ()
    run = run_of(tmp_path, STEPS * (1 + len(moments)), layout, grader, *hangs)
    engines = [f"engine.policy.{index}" for index in range(run.topology.engines["policy"].num_engines)]
    async with run.started() as command:
        command.log.event_s = command.end_s = RESTART_S
        for moment in moments:
            await until_whole(command, moment, marks, engines)
            for engine in engines:
                await check_that_it_is_not_paused(command, engine)
                await check_that_no_session_is_open(command, engine)
            (marks / GATE).unlink()
        await finish(run, command)
    await audit(run, killed=died(moments))
    await check_the_last_session(run)
    check_log_probs(run)


@pytest.mark.nightly
async def test_sglang_gets_the_newest_weights_in_turns_when_everything_dies_in_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, 3 * STEPS, COLOCATED, *HANGS)
    await outlive(run, monkeypatch, "trainer", "everything", limit_s=RESTART_S)
    check_log_probs(run)


async def check_that_no_session_is_open(command: Command, engine: str) -> None:
    """Begin one, which is refused while another is open, and end it."""
    async with aiohttp.ClientSession() as session:
        updates = WeightUpdates(SglangClient(session, await engine_key(command.bus.kv)))
        await updates.begin_update(url_of(command, engine), timeout_s=CALL_S)
        await updates.end_update(url_of(command, engine), timeout_s=CALL_S)


def check_log_probs(run: Run) -> None:
    """Engine and trainer say the same of each token: no engine sampled from a part of a version."""
    rows = [row for row in run.rows() if row["step"] > 0]
    assert len(rows) >= run.num_steps
    assert max(row["train/train_rollout_logprob_abs_diff_max"] for row in rows) <= CLOSE
