"""The grader pool against real processes and the worst graders we could think of."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import psutil
import pytest

from actors.reward.grades import GRADES, Grade, Graded, GraderSpec, Hello
from actors.reward.gradings import CallLimits
from actors.reward.pool import GraderPool, PoolSettings, open_pool
from actors.reward.process import GraderProcess, GraderStartError, GraderUnusableError
from actors.reward.samples import GradedSample
from actors.reward.worker import Graders
from runtime.functions.sandbox import Sandbox
from runtime.util.retrying import Backoff

pytestmark = pytest.mark.anyio

USER_CODE = str(Path(__file__).parent / "user_graders.py")
AS_TOLD = GraderSpec(name=f"{USER_CODE}:as_told")
LENGTH = GraderSpec(name=f"{USER_CODE}:length")
AMPLE_S = 50.0  # the limit of a score that must not be late, even on a machine that stands still for some seconds


def pool_of(
    num_processes: int = 1,
    timeout_s: float = AMPLE_S,
    max_tries: int = 2,
    sandbox: Sandbox | None = None,
    bounds: dict[str, Any] | None = None,
    **hello: Any,
):
    return open_pool(
        PoolSettings(
            hello=Hello(**hello),
            sandbox=sandbox or Sandbox(),
            num_processes=num_processes,
            timeout_s=timeout_s,
            max_tries=max_tries,
            **(bounds or {}),
        )
    )


async def tell(
    pool: GraderPool,
    *commands: str,
    grader: GraderSpec = AS_TOLD,
    limits: CallLimits | None = None,
    **metadata: str,
) -> list[Graded]:
    samples = [GradedSample(response=command, metadata=metadata) for command in commands]
    with anyio.fail_after(AMPLE_S):
        return await pool.grade(grader, samples, limits)


async def until_exists(path: Path) -> str:
    """Wait for a grader to write a file; it runs in a process of its own and can signal nothing else."""
    file = anyio.Path(path)
    with anyio.fail_after(AMPLE_S):
        while not await file.exists() or not await file.read_text():  # noqa: ASYNC110 - a file has no event
            await anyio.sleep(0.005)
    return await file.read_text()


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while its file is read
        return False


async def until_ended(pid: int) -> None:
    with anyio.fail_after(AMPLE_S):
        while is_running(pid):  # noqa: ASYNC110 - a process that is not our child has no event
            await anyio.sleep(0.005)


async def test_a_built_in_grader_grades_in_order() -> None:
    samples = [GradedSample(response=str(number), label="7", index=number) for number in range(100)]
    async with pool_of(num_processes=2) as pool:
        grades = await pool.grade(GraderSpec(name="exact_match"), samples)
    assert [graded.reward for graded in grades] == [float(number == 7) for number in range(100)]


@pytest.mark.parametrize("grader", ["length", "slowly"])
async def test_a_users_function_may_be_plain_or_async(grader: str) -> None:
    async with pool_of(reward_key="score") as pool:
        grades = await tell(pool, "a", "abc", "", grader=GraderSpec(name=f"{USER_CODE}:{grader}"))
    assert [graded.reward for graded in grades] == [1.0, 3.0, 0.0]


async def test_a_users_function_sees_the_whole_sample() -> None:
    sample = GradedSample(
        index=3, prompt="p", response="r", label={"any": ["json"]}, metadata={"k": 1}, status="truncated"
    )
    async with pool_of(reward_key="score") as pool:
        (graded,) = await pool.grade(GraderSpec(name=f"{USER_CODE}:everything"), [sample])
    assert graded.reward == 0.5
    assert graded.details == {"score": 0.5, "seen": [3, "p", "r", {"any": ["json"]}, {"k": 1}, "truncated"]}


async def test_a_group_function_is_called_once_with_all_samples() -> None:
    async with pool_of() as pool:
        grades = await tell(pool, "a", "abc", "abc", grader=GraderSpec(name=f"{USER_CODE}:rank", group=True))
        wrong = await tell(pool, "a", "abc", grader=GraderSpec(name=f"{USER_CODE}:rank_wrongly", group=True))
    assert [graded.reward for graded in grades] == [0.0, 1.0, 1.0]
    assert [graded.error for graded in wrong] == ["returned 1 rewards for 2 samples"] * 2


async def test_what_is_too_large_for_a_frame_fails_its_group_and_nothing_else() -> None:
    rank, row = GraderSpec(name=f"{USER_CODE}:rank", group=True), "x" * 40_000
    async with pool_of(bounds={"max_frame_bytes": 100_000}) as pool:
        large = await tell(pool, *(["a"] * 3), grader=rank, row=row)
        fitting = await tell(pool, "a", "abc", grader=rank, row=row)
        pool._mean_s[LENGTH] = 1e-6  # cheap: many samples share a frame
        one_by_one = await tell(pool, *(["abc"] * 5), grader=LENGTH, row=row)
        stats = pool.stats()
    assert [graded.error for graded in large] == [large[0].error] * 3
    assert "too large for a grader process: a frame of 120" in str(large[0].error)
    assert [graded.error for graded in (*fitting, *one_by_one)] == [None] * 7
    assert (stats["num_starts"], stats["num_failed_scores"]) == (1, 3)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("raise", "raised RuntimeError('as told')"),
        ("nan", "returned nan, not a finite number"),
        ("text", "returned 'good' (str), not a number"),
        ("none", "returned None, not a number"),
        ("dict", "the dict it returned has no 'score', only 'accuracy'"),
        ("exit", "raised SystemExit(1)"),
        ("allocate", "raised MemoryError()"),
    ],
)
async def test_a_bad_answer_fails_its_sample_only_and_keeps_the_process(command: str, reason: str) -> None:
    async with pool_of(reward_key="score", sandbox=Sandbox(memory_bytes=1 << 30)) as pool:
        before, bad, after = await tell(pool, "fine", command, "fine")
        assert pool.stats()["num_starts"] == 1
    assert bad.error == reason
    assert (before.reward, after.reward) == (1.0, 1.0)


async def test_a_grader_that_hoards_memory_gets_a_memory_error() -> None:
    async with pool_of(sandbox=Sandbox(memory_bytes=256 << 20)) as pool:
        (graded,) = await tell(pool, "allocate slowly")
    assert graded.error == "raised MemoryError()"


@pytest.mark.parametrize("command", ["hang", "sleep"])
async def test_a_grader_that_hangs_is_killed_and_replaced(command: str) -> None:
    grades: dict[str, Graded] = {}

    async def ask(pool: GraderPool, name: str, command: str, limits: CallLimits | None = None) -> None:
        (grades[name],) = await tell(pool, command, limits=limits)

    async with pool_of() as pool:
        start = anyio.current_time()
        async with anyio.create_task_group() as asking:  # in the order of the queue
            asking.start_soon(ask, pool, "before", "fine")
            asking.start_soon(ask, pool, "hung", command, CallLimits(timeout_s=1.0))
            asking.start_soon(ask, pool, "after", "fine")
        took_s = anyio.current_time() - start
        stats = pool.stats()
    assert grades["hung"].error == "timeout: no answer within 1 s (timeout_s)"
    assert (grades["before"].reward, grades["after"].reward) == (1.0, 1.0)
    assert (stats["num_timeouts"], stats["num_deaths"], stats["num_starts"]) == (1, 0, 2)
    assert took_s >= 1.0


async def test_a_standstill_of_the_process_is_no_timeout_of_its_graders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a machine that is suspended, three times as long as a score may take: the clock of the loop jumps."""
    started, go = tmp_path / "started", tmp_path / "go"
    loop, stood_s = asyncio.get_running_loop(), 0.0
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + stood_s)
    grades: list[Graded] = []

    async def ask(pool: GraderPool) -> None:
        samples = [GradedSample(response="wait for file", metadata={"file": str(go), "started": str(started)})]
        grades.extend(await pool.grade(AS_TOLD, samples))

    async with pool_of() as pool:
        async with anyio.create_task_group() as asking:
            asking.start_soon(ask, pool)
            await until_exists(started)
            for _ in range(3):
                before_s, stood_s = pool.running.lost_s, stood_s + AMPLE_S
                with anyio.fail_after(AMPLE_S):
                    while pool.running.lost_s - before_s < AMPLE_S - 1:  # noqa: ASYNC110 - the next tick measures it
                        await anyio.sleep(0.005)
            go.touch()
    assert [(graded.reward, graded.error) for graded in grades] == [(1.0, None)]


async def test_an_async_grader_that_never_ends_is_killed() -> None:
    async with pool_of(timeout_s=0.2) as pool:
        (graded,) = await tell(pool, "", grader=GraderSpec(name=f"{USER_CODE}:never"))
    assert graded.error == "timeout: no answer within 0.2 s (timeout_s)"


async def test_what_a_grader_prints_and_reads_is_not_the_protocol(capfd: pytest.CaptureFixture[str]) -> None:
    async with pool_of() as pool:
        grades = await tell(pool, "print", "read", "fine")
    assert [graded.reward for graded in grades] == [1.0, 0.0, 1.0]
    printed = capfd.readouterr()
    assert "to stdout" in printed.err
    assert "a child's words" in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("command", "reason"),
    [("_exit", "exited with code 7, 2 times"), ("fork and die", "exited with code 9, 2 times")],
)
async def test_a_grader_that_ends_its_process_is_tried_again_and_then_fails(command: str, reason: str) -> None:
    async with pool_of(max_tries=2) as pool:
        before, dead, after = await tell(pool, "fine", command, "fine")
        assert pool.stats()["num_deaths"] == 2
    assert dead.error == f"the grader process {reason}"
    assert (before.reward, after.reward) == (1.0, 1.0)


async def test_a_process_that_dies_once_costs_a_retry(tmp_path: Path) -> None:
    async with pool_of() as pool:
        (graded,) = await tell(pool, "die once", file=str(tmp_path / "marker"))
    assert graded.reward == 1.0


async def test_a_process_killed_in_the_middle_costs_a_retry(tmp_path: Path) -> None:
    go, started = tmp_path / "go", tmp_path / "started"
    grades: list[Graded] = []

    async def ask(pool: GraderPool) -> None:
        grades.extend(await tell(pool, "wait for file", "fine", file=str(go), started=str(started)))

    async with pool_of() as pool:
        async with anyio.create_task_group() as group:
            group.start_soon(ask, pool)
            os.kill(int(await until_exists(started)), signal.SIGKILL)
            go.touch()
        assert pool.stats()["num_deaths"] == 1
    assert [graded.reward for graded in grades] == [1.0, 1.0]


@pytest.mark.parametrize(("number", "timeout_s"), [(signal.SIGKILL, AMPLE_S), (signal.SIGSTOP, 3.0)])
async def test_no_sample_is_blamed_for_a_process_that_ends_with_several_of_a_built_in_grader(
    number: int, timeout_s: float
) -> None:
    built_in, pairs = GraderSpec(name="f1"), ["a b", "c d", "e f"]
    async with pool_of(timeout_s=timeout_s, max_tries=1) as pool:
        samples = [GradedSample(response=text, label=text) for text in pairs]
        await pool.grade(built_in, samples)
        pool._mean_s[built_in] = 1e-6  # cheap, also on a busy machine: the samples share a frame
        *_, worker = psutil.Process().children(recursive=True)
        worker.send_signal(signal.SIGSTOP)
        grades = list[Graded]()
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                grades.extend(await pool.grade(built_in, samples))

            group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            worker.send_signal(number)
    assert [graded.reward for graded in grades] == [1.0, 1.0, 1.0]


async def test_grades_of_a_built_in_grader_are_sent_together_and_those_of_a_users_function_one_by_one() -> None:
    graders = Graders(Hello())
    samples = tuple(GradedSample(response="a b", label="a b") for _ in range(3))
    num_parts = []
    for name in ("f1", f"{USER_CODE}:length"):
        spec = GraderSpec(name=name)
        [*graders.answer(msgspec.msgpack.encode(Grade(grader=spec, samples=samples[:1])))]  # resolves it
        parts = [*graders.answer(msgspec.msgpack.encode(Grade(grader=spec, samples=samples)))]
        assert sum(len(GRADES.decode(part)) for part in parts) == 3
        num_parts.append(len(parts))
    assert num_parts[0] < num_parts[1] == 3


async def test_an_idle_process_that_is_killed_is_replaced() -> None:
    async with pool_of() as pool:
        (first,) = await tell(pool, "", grader=GraderSpec(name=f"{USER_CODE}:pid"))
        os.kill(int(first.reward or 0), signal.SIGKILL)
        await until_ended(int(first.reward or 0))
        (second,) = await tell(pool, "", grader=GraderSpec(name=f"{USER_CODE}:pid"))
    assert second.reward not in (None, first.reward)


async def test_killing_a_grader_also_ends_what_it_started(tmp_path: Path) -> None:
    file = tmp_path / "child"
    async with pool_of(timeout_s=0.3) as pool:
        for _ in range(20):  # a busy machine may kill the grader before it has started something
            (graded,) = await tell(pool, "child", file=str(file))
            assert graded.error == "timeout: no answer within 0.3 s (timeout_s)"
            if file.exists():
                break
    await until_ended(int(file.read_text()))


async def test_no_process_is_left_when_the_pool_closes() -> None:
    async with pool_of(num_processes=2) as pool:
        grades = await tell(pool, *[""] * 50, grader=GraderSpec(name=f"{USER_CODE}:pid"))
    for pid in {int(graded.reward or 0) for graded in grades}:
        assert not is_running(pid)


async def test_a_grader_process_dies_with_its_parent_even_when_busy(tmp_path: Path) -> None:
    code = (
        "import sys, anyio, actors.reward.pool as p, actors.reward.grades as f, actors.reward.samples as s\n"
        "async def main():\n"
        "    async with p.open_pool(p.PoolSettings(hello=f.Hello(), timeout_s=60)) as pool:\n"
        "        files = {'started': sys.argv[2], 'file': '/no/such/file'}\n"
        "        told = s.GradedSample(response='wait for file', metadata=files)\n"
        "        await pool.grade(f.GraderSpec(name=sys.argv[1]), [told])\n"
        "anyio.run(main)\n"
    )
    started = tmp_path / "started"
    parent = await anyio.open_process([sys.executable, "-c", code, AS_TOLD.name, str(started)], stdin=None)
    async with parent:
        pid = int(await until_exists(started))
        parent.kill()
        await parent.wait()
        await until_ended(pid)


async def test_a_score_nobody_waits_for_does_not_stay_in_the_queue(tmp_path: Path) -> None:
    go, started = tmp_path / "go", tmp_path / "started"
    async with pool_of() as pool, anyio.create_task_group() as group:
        group.start_soon(lambda: tell(pool, "wait for file", file=str(go), started=str(started)))
        await until_exists(started)
        with anyio.move_on_after(0.02):
            await pool.grade(LENGTH, [GradedSample(response="abandoned")] * 5)
        go.touch()
        await tell(pool, "a", grader=LENGTH)
        assert pool.stats()["num_scores"] == 2


async def test_two_processes_grade_at_the_same_time(tmp_path: Path) -> None:
    """Each of two samples waits for a file that appears once both have begun."""
    go = tmp_path / "go"
    started = [tmp_path / "started0", tmp_path / "started1"]
    async with pool_of(num_processes=2) as pool:
        async with anyio.create_task_group() as group:
            for path in started:
                group.start_soon(lambda path=path: tell(pool, "wait for file", file=str(go), started=str(path)))
            pids = {await until_exists(path) for path in started}
            go.touch()
    assert len(pids) == 2


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("exact_mach", "did you mean 'exact_match'?"),
        ("no/such/file.py:f", "no such file"),
        (f"{USER_CODE}:no_such", "there is no 'no_such' in it"),
    ],
)
async def test_a_grader_that_cannot_be_used_is_refused_at_the_start(name: str, problem: str) -> None:
    with pytest.raises(GraderUnusableError, match="no") as caught:
        async with pool_of(graders=(GraderSpec(name=name),)):
            pass
    assert problem in str(caught.value)


async def test_a_grader_first_met_in_a_request_fails_only_that_request() -> None:
    async with pool_of() as pool:
        (bad,) = await tell(pool, "x", grader=GraderSpec(name="no_such_grader"))
        (good,) = await tell(pool, "x", grader=LENGTH)
    assert "no grader 'no_such_grader'" in str(bad.error)
    assert good.reward == 1.0


async def test_a_module_that_ends_the_process_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "bomb.py").write_text("import os; os._exit(5)")
    with pytest.raises(GraderStartError, match="exited with code 5"):
        await GraderProcess.start(Hello(graders=(GraderSpec(name="bomb.py:f"),), base_dirs=(str(tmp_path),)))


async def test_a_module_that_hangs_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("while True: pass")
    hello = Hello(graders=(GraderSpec(name="endless.py:f"),), base_dirs=(str(tmp_path),))
    with pytest.raises(GraderStartError, match=r"not ready after 0.3 s"):
        await GraderProcess.start(hello, timeout_s=0.3)


async def test_a_pool_that_cannot_replace_a_process_fails_in_bounded_time(
    tmp_path: Path,
) -> None:
    bounds = {"max_failed_starts": 2, "backoff": Backoff(first_s=0.01)}
    file = tmp_path / "short_lived.py"
    file.write_text("import os\ndef f(sample): os._exit(1)")
    with pytest.RaisesGroup(GraderUnusableError):
        async with pool_of(graders=(GraderSpec(name=f"{file}:f"),), max_tries=9, bounds=bounds) as pool:
            await anyio.Path(file).unlink()
            await tell(pool, "x", grader=GraderSpec(name=f"{file}:f"))


async def test_more_samples_than_the_queue_holds_are_graded() -> None:
    async with pool_of(bounds={"queue_size": 3}) as pool:
        grades = await tell(pool, *["abc"] * 50, grader=LENGTH)
    assert [graded.reward for graded in grades] == [3.0] * 50


async def test_a_grader_process_imports_little() -> None:
    """What makes it start in 50 ms on an idle machine, so that a killed one is soon replaced."""
    heavy = ("numpy", "torch", "asyncio", "messages", "structlog")
    modules = "actors.reward.worker, runtime.functions.worker"
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    result = await anyio.run_process([sys.executable, "-c", code])
    assert result.stdout.decode().strip() == "[]"
