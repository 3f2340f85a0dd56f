"""Calls of async functions run together in grader processes: what one does, the others do not notice."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.reward.grades import Graded, GraderSpec
from actors.reward.gradings import CallLimits, RateLimit
from actors.reward.pool import GraderPool
from actors.reward.samples import GradedSample
from tests.actors.reward.test_pool import AMPLE_S, LENGTH, USER_CODE, pool_of, until_exists

pytestmark = pytest.mark.anyio

TOLD = GraderSpec(name=f"{USER_CODE}:told")
RANK = GraderSpec(name=f"{USER_CODE}:rank_together", group=True)


def together(num_processes: int = 1, **options: Any):
    return pool_of(num_processes, graders=(TOLD, RANK, LENGTH), reward_key="score", **options)


async def tell(pool: GraderPool, *commands: str, limits: CallLimits | None = None, **metadata: str) -> list[Graded]:
    samples = [GradedSample(response=command, metadata=metadata) for command in commands]
    with anyio.fail_after(AMPLE_S):
        return await pool.grade(TOLD, samples, limits)


async def tell_at_once(pool: GraderPool, *commands: str | tuple[str, float]) -> list[Graded]:
    """As `tell`, and some of the commands have a timeout of their own."""
    grades: dict[int, Graded] = {}

    async def ask(place: int, command: str, limits: CallLimits | None) -> None:
        (grades[place],) = await tell(pool, command, limits=limits)

    async with anyio.create_task_group() as asking:
        for place, command in enumerate(commands):
            if isinstance(command, str):
                asking.start_soon(ask, place, command, None)
            else:
                asking.start_soon(ask, place, command[0], CallLimits(timeout_s=command[1]))
    return [grades[place] for place in range(len(commands))]


def summary(grades: list[Graded]) -> list[float | str | None]:
    return [graded.reward if graded.error is None else graded.cause for graded in grades]


async def test_calls_of_an_async_function_run_together_in_one_process() -> None:
    async with together() as pool:
        grades = await tell(pool, *["meet 60"] * 60)
        (waited,) = await tell(pool, "wait 0.2")
    assert summary(grades) == [1.0] * 60
    assert waited.took_s >= 0.2


async def test_no_more_calls_run_together_than_the_recipe_allows() -> None:
    async with together(bounds={"at_once": 2}) as pool:
        await tell(pool, "fine")
        start = time.perf_counter()
        await tell(pool, *["wait 0.1"] * 6)
        took_s = time.perf_counter() - start
        assert pool.calls_at_once(TOLD) == 2
    assert took_s >= 0.3


async def test_a_group_function_may_be_async_and_plain_functions_run_beside() -> None:
    async with together() as pool:
        ranked = await pool.grade(RANK, [GradedSample(response=text) for text in ("a", "abc")])
        plain = await pool.grade(LENGTH, [GradedSample(response="abc")])
    assert summary([*ranked, *plain]) == [0.0, 1.0, 3.0]


async def test_each_failure_has_its_cause_and_costs_no_process() -> None:
    async with together() as pool:
        commands = ("raise", "nan", "text", "none", "dict", ("never", 0.3), "cancel", "exit", "wait 0")
        grades = await tell_at_once(pool, *commands)
        assert pool.stats()["num_deaths"] == 0
        assert pool.stats()["num_bad_answer_scores"] == 4
    bad = ["bad_answer"] * 4
    assert summary(grades) == ["raised", *bad, "timeout", "raised", "raised", 1.0]


@pytest.mark.parametrize("command", ["block", "swallow"])
async def test_a_call_that_cannot_be_stopped_ends_its_process_and_no_other_call(command: str) -> None:
    async with together() as pool:
        grades = await tell_at_once(pool, *["wait 0.1"] * 5, (command, 0.5), *["wait 1.2"] * 5)
    assert summary(grades) == [1.0] * 5 + ["timeout"] + [1.0] * 5


async def test_of_calls_that_die_together_the_one_to_blame_is_found(tmp_path: Path) -> None:
    async with together(max_tries=2) as pool:
        commands = ("until_deaths 2", "die_among 3", "until_deaths 2")
        grades = await tell(pool, *commands, file=str(tmp_path / "deaths"))
        assert pool.stats()["num_deaths"] == 4  # three together, two together, twice alone
    assert summary(grades) == [1.0, "sandbox_lost", 1.0]
    assert grades[1].error == "the grader process exited with code 7, 2 times"


async def test_a_call_that_blocks_in_a_task_of_its_own_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.functions.together.GRACE_S", 0.5)
    async with together() as pool:
        grades = await tell_at_once(pool, "wait 0.1", ("block_child", 0.5))
    assert summary(grades) == [1.0, "timeout"]


async def test_a_killed_process_costs_no_score(tmp_path: Path) -> None:
    started, go = tmp_path / "started", tmp_path / "go"
    grades: list[Graded] = []

    async def ask(pool: GraderPool) -> None:
        grades.extend(await tell(pool, *["until_file"] * 10, started=str(started), file=str(go)))

    async with together() as pool:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool)
            os.kill(int(await until_exists(started)), signal.SIGKILL)
            go.touch()
        assert pool.stats()["num_deaths"] == 1
    assert summary(grades) == [1.0] * 10


async def test_a_suspended_process_loses_no_time_of_its_calls(tmp_path: Path) -> None:
    started, go = tmp_path / "started", tmp_path / "go"
    grades: list[Graded] = []

    async def ask(pool: GraderPool) -> None:
        grades.extend(await tell(pool, "until_file", started=str(started), file=str(go)))

    async with together(timeout_s=1.0) as pool, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, pool)
        pid = int(await until_exists(started))
        os.kill(pid, signal.SIGSTOP)
        await anyio.sleep(1.5)  # the suspension itself
        go.touch()
        os.kill(pid, signal.SIGCONT)
    assert summary(grades) == [1.0]


async def test_a_grader_has_its_own_timeout_and_rate() -> None:
    async with together() as pool:
        await tell(pool, "fine")
        slow = await tell(pool, "wait 1", limits=CallLimits(timeout_s=0.2))
        start = time.perf_counter()
        grades = await tell(pool, *["fine"] * 6, limits=CallLimits(rate=RateLimit(20)))
        took_s = time.perf_counter() - start
    assert summary(slow) == ["timeout"]
    assert summary(grades) == [1.0] * 6
    assert took_s >= 0.25


async def test_a_score_nobody_waits_for_is_not_graded(tmp_path: Path) -> None:
    started, go = tmp_path / "started", tmp_path / "go"
    async with together(bounds={"at_once": 1}) as pool, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: tell(pool, "until_file", started=str(started), file=str(go)))
        await until_exists(started)
        with anyio.move_on_after(0.05):
            await tell(pool, *["fine"] * 5)
        go.touch()
        await tell(pool, "fine")
        assert pool.stats()["num_scores"] == 2
