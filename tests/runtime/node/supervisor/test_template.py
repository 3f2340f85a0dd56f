"""Processes that the template forks are as started ones, and a template that fails costs no process."""

import json
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from anyio import wait_all_tasks_blocked

from runtime.node.supervisor import guardian, template
from runtime.node.supervisor.state_changes import Change, Exited, Started
from runtime.node.supervisor.supervision import Supervision
from runtime.node.supervisor.template import Forked
from runtime.settings.devices import ON_CPU
from runtime.settings.processes import OURS, ProcessSpec, SendsHeartbeats

pytestmark = pytest.mark.anyio

FORKED, STARTED = "up forked=True", "up forked=False"


class Supervised:
    """A supervision, the changes that it announced, and what its processes printed."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.changes: list[Change] = []
        self.supervision = Supervision(run_dir, environment={}, listener=self.changes.append)

    def probe(
        self, name: str, *arguments: str, env: Mapping[str, str] = OURS, forked: bool = True, **settings: Any
    ) -> ProcessSpec:
        """Spec of a process that the template may fork."""
        command = (sys.executable, "-P", "-m", "tests.support.probe", *arguments)
        return ProcessSpec(name=name, command=command, env=env, forked=forked, max_restarts=3, **settings)

    async def start(self, *specs: ProcessSpec) -> None:
        self.supervision.template.prepare(specs)
        for spec in specs:
            self.supervision.start(spec)

    async def lines(self, name: str, number: int = 1) -> list[str]:
        """Wait until a process has printed so many lines."""
        path = self.run_dir / "logs" / f"{name}.jsonl"
        with anyio.fail_after(200):
            while not path.exists() or len(path.read_text().splitlines()) < number:  # noqa: ASYNC110 - a file
                await anyio.sleep(0.01)
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        return [entry.get("text", "") if entry["event"] == "output" else json.dumps(entry) for entry in entries]

    async def told(self, name: str, path: Path) -> dict[str, Any]:
        """What a process wrote into a file before its first line."""
        await self.lines(name)
        return json.loads(await anyio.Path(path).read_text())

    async def ended(self, name: str) -> Exited:
        with anyio.fail_after(200):
            while True:
                for change in self.changes:
                    if isinstance(change, Exited) and change.spec.name == name:
                        return change
                await anyio.sleep(0.01)

    async def template(self) -> int:
        """The process id of the template, once it runs."""
        with anyio.fail_after(200):
            while (pid := self.supervision.template.pid) is None:  # noqa: ASYNC110 - another process
                await anyio.sleep(0.01)
        return pid

    def pid_of(self, name: str) -> int:
        return next(each.pid for each in reversed(self.changes) if isinstance(each, Started) and each.spec.name == name)


@asynccontextmanager
async def supervising(run_dir: Path) -> AsyncGenerator[Supervised]:
    supervised = Supervised(run_dir)
    async with anyio.create_task_group() as tasks:
        await tasks.start(supervised.supervision.run)
        yield supervised
        tasks.cancel_scope.cancel()
    assert not guardian.find(guardian.mark_of("", "local", run_dir))  # neither processes nor the template


async def test_a_forked_process_is_as_a_started_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHYSARUM_OF_A_TEST", "before")
    env = OURS | ON_CPU | {"RANK": "3", "PHYSARUM_OF_A_TEST": "ünï\udcff", "PHYSARUM_LONG": "x" * 100_000}
    told: dict[str, dict[str, Any]] = {}
    for name in ("forked", "started"):
        async with supervising(tmp_path / name) as supervised:
            spec = supervised.probe("probe", "facts", str(tmp_path / "facts"), env=env, forked=name == "forked")
            await supervised.start(msgspec.structs.replace(spec, probe=SendsHeartbeats()))
            told[name] = await supervised.told("probe", tmp_path / "facts")
    assert (told["forked"]["forked"], told["started"]["forked"]) == (True, False)
    by_run = {str(tmp_path / "forked"), str(tmp_path / "started")}
    shown = {name: _without_ids(each["facts"], by_run) for name, each in told.items()}
    assert shown["forked"] == shown["started"]
    assert told["forked"]["facts"]["parent"] == os.getpid()
    assert told["forked"]["facts"]["dies_with_parent"]
    assert told["forked"]["facts"]["mapped"] == [False, True]  # by MALLOC_MMAP_THRESHOLD_ of ON_CPU


def _without_ids(facts: dict[str, Any], paths: set[str]) -> dict[str, Any]:
    """Facts without the mark of the supervision, which differs."""
    facts["environment"].pop(guardian.MARK_VARIABLE)
    shown = facts["shown_environment"].split("\0")
    facts["shown_environment"] = sorted(item for item in shown if not item.startswith(guardian.MARK_VARIABLE))
    assert not any(path in json.dumps(facts) for path in paths)
    return facts


async def test_two_forks_draw_other_random_numbers(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervised:
        names = ("first", "second")
        await supervised.start(*(supervised.probe(name, "facts", str(tmp_path / name)) for name in names))
        first, second = [await supervised.told(name, tmp_path / name) for name in names]
        assert first["forked"]
        assert second["forked"]
        assert not set(first["drawn"]) & set(second["drawn"])


async def test_exit_codes_and_signals_are_those_of_the_process(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervised:
        await supervised.start(supervised.probe("ends", "exit", "2"), supervised.probe("sleeps", "sleep"))
        assert (await supervised.ended("ends")).exit_code == 2
        assert await supervised.lines("sleeps") == [FORKED]
        os.kill(supervised.pid_of("sleeps"), signal.SIGSEGV)
        assert (await supervised.ended("sleeps")).exit_code == -signal.SIGSEGV
        assert FORKED in (await supervised.lines("sleeps", 2))[-1]  # again by the template


async def test_a_wait_ends_when_another_look_found_the_end_first() -> None:
    process = Forked(os.posix_spawn(sys.executable, [sys.executable, "-c", "input()"], {}))  # noqa: ASYNC221 - it ends when it is killed
    codes: list[int] = []

    async def wait() -> None:
        codes.append(await process.wait())

    with anyio.fail_after(200):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await wait_all_tasks_blocked()
            process.kill()
            while process.returncode is None:  # the event loop does not run meanwhile
                time.sleep(0.01)  # noqa: ASYNC251
    assert codes == [-signal.SIGKILL]


async def test_a_process_with_another_environment_is_started(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervised:
        foreign, devices = OURS | {"OMP_NUM_THREADS": "2"}, OURS | {"A_LIBRARY": "1"}
        await supervised.start(
            supervised.probe("threads", "sleep", env=foreign),
            supervised.probe("library", "sleep", env=devices),
            supervised.probe("own", "sleep", env=OURS | {"PHYSARUM_PROCESS": "own"}),
        )
        assert await supervised.lines("threads") == [STARTED]
        assert await supervised.lines("library") == [STARTED]
        assert await supervised.lines("own") == [FORKED]


@pytest.mark.parametrize(("code", "comes"), [("", STARTED), ("may_be_forked = True", FORKED)])
async def test_processes_are_started_where_each_interpreter_runs_code_of_the_user_unless_that_may_be_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, comes: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setitem(OURS, "PYTHONPATH", os.pathsep.join([str(tmp_path), OURS["PYTHONPATH"]]))
    async with supervising(tmp_path) as supervised:
        await supervised.start(supervised.probe("own", "sleep"))
        assert await supervised.lines("own") == [comes]


@pytest.mark.parametrize("what", ["thread", "variable", "raise"])
async def test_a_process_whose_imports_are_unfit_for_a_fork_is_started(tmp_path: Path, what: str) -> None:
    async with supervising(tmp_path) as supervised:
        await supervised.start(supervised.probe("unfit", what))
        assert await supervised.lines("unfit") == [STARTED]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_processes_are_started_when_the_template_was_killed_or_stopped(tmp_path: Path, number: int) -> None:
    async with supervising(tmp_path) as supervised:
        await supervised.start(supervised.probe("before", "sleep"))
        assert await supervised.lines("before") == [FORKED]
        os.kill(await supervised.template(), number)
        await supervised.start(supervised.probe("after", "sleep"))
        assert await supervised.lines("after") == [STARTED]
        os.kill(supervised.pid_of("before"), 0)  # the template's end ends no other process
        assert not any(isinstance(change, Exited) for change in supervised.changes)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_processes_are_started_when_the_template_fails_while_it_imports(tmp_path: Path, number: int) -> None:
    async with supervising(tmp_path) as supervised:
        supervised.supervision.template.prepare([supervised.probe("", "hang")])
        await supervised.start(supervised.probe("waits", "sleep"))
        os.kill(await supervised.template(), number)
        assert await supervised.lines("waits") == [STARTED]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_one_process_runs_when_the_template_fails_in_the_middle_of_a_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The forked process exists and waits for its command: it must never run it beside the started one."""
    send = template.send_request

    async with supervising(tmp_path) as supervised:

        async def failing(*arguments: Any) -> None:
            os.kill(await supervised.template(), number)
            if number == signal.SIGKILL:
                await anyio.sleep_forever()  # until the end of the template is seen
            await send(*arguments)

        monkeypatch.setattr(template, "send_request", failing)
        await supervised.start(supervised.probe("one", "sleep"))
        if number == signal.SIGKILL:
            assert await supervised.lines("one") == [STARTED]
        else:
            assert await supervised.lines("one") == [FORKED]  # its command does not pass through the template
        found = guardian.find(guardian.mark_of("", "local", tmp_path))
        assert set(found) - {supervised.supervision.template.pid} == {supervised.pid_of("one")}


async def test_a_template_that_gives_no_answer_is_killed(tmp_path: Path) -> None:
    async with supervising(tmp_path) as supervised:
        supervised.supervision.template.limit_s = 0.5
        supervised.supervision.template.prepare([supervised.probe("", "hang")])
        await supervised.start(supervised.probe("waits", "sleep"))
        template = await supervised.template()
        assert await supervised.lines("waits") == [STARTED]
        with pytest.raises(ProcessLookupError):
            os.kill(template, 0)
