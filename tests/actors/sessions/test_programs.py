"""Programs outlive their rollout actor and nothing else: a successor gets them, and without one they are killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.sessions import programs as holder
from actors.sessions.programs import HolderSettings, holding
from runtime.process.main import RUN_DIR
from runtime.sessions.link import Connection, short_path
from runtime.sessions.programs import OF_HOLDER, SOCKET_FILE, ActorHere, Held, Listed, Note, Over, Programs, Start, Stop
from tests.fixtures.nats import eventually

WAITS = "open(__import__('sys').argv[1], 'w').write(str(__import__('os').getpid())); __import__('time').sleep(600)"
KEY = "physarum-s1-secret"


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test, which fails if it waits."""

    async def limited() -> None:
        with anyio.fail_after(200):
            await test()

    anyio.run(limited)


def start(code: str, *arguments: str, session: str = "s1") -> Start:
    settings: dict[str, Any] = {
        "program": [sys.executable, "-c", code, *arguments],
        "directory": None,
        "given": "ROW",
        "prefix": "physarum-agent-",
        "sandbox": "none",
        "max_processes": None,
    }
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "KEY": KEY}
    return Start(session, settings, env, b"{}", (KEY,), b"about")


@asynccontextmanager
async def actor(run_dir: Path, born_ns: int = 1) -> AsyncGenerator[Connection]:
    """A rollout actor whose connection breaks at the end of the block, as by its death."""
    with short_path(run_dir, SOCKET_FILE) as path:
        stream = await anyio.connect_unix(path)
    async with stream:
        connection = Connection(stream)
        await connection.send(ActorHere("rollout", born_ns))
        yield connection


async def heard(connection: Connection, last: type) -> list[Any]:
    """Return what the holder says up to a message of a kind."""
    found: list[Any] = []
    async for message in connection.messages(OF_HOLDER):
        found.append(message)
        if isinstance(message, last):
            break
    return found


def content_of(file: Path) -> str:
    return file.read_text() if file.exists() else ""


async def pid_in(file: Path) -> int:
    await eventually(lambda: content_of(file) != "")
    return int(content_of(file))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def died_with_a_program(run_dir: Path, file: Path, *notes: Note) -> int:
    async with actor(run_dir) as connection:
        await connection.send(start(WAITS, str(file)))
        for note in notes:
            await connection.send(note)
        return await pid_in(file)


def test_a_successor_gets_the_program_and_the_notes_of_its_session(tmp_path: Path) -> None:
    async def test() -> None:
        async with holding(tmp_path, HolderSettings()):
            pid = await died_with_a_program(tmp_path, tmp_path / "pid", Note("s1", b"a", b"1"), Note("s1", b"b", b"2"))
            async with actor(tmp_path, born_ns=2) as connection:
                assert await heard(connection, Listed) == [Held("s1", b"about", (b"a", b"b"), b"2"), Listed()]
                assert is_alive(pid)
                await connection.send(Stop("s1"))
                await eventually(lambda: not is_alive(pid))

    run(test)


def test_a_successor_learns_how_a_program_ended_meanwhile_without_its_keys(tmp_path: Path) -> None:
    ends = f"import os; print('no way,', os.environ['KEY']); open({str(tmp_path / 'ends')!r}, 'w'); raise SystemExit(3)"

    async def test() -> None:
        async with holding(tmp_path, HolderSettings()):
            async with actor(tmp_path) as connection:
                await connection.send(start(ends))
                await eventually((tmp_path / "ends").exists)
            async with actor(tmp_path, born_ns=2) as connection:
                over = (await heard(connection, Over))[-1]
        assert over == Over("s1", 3, b"no way, ***\n")

    run(test)


def test_programs_of_an_actor_that_does_not_come_back_are_killed(tmp_path: Path) -> None:
    async def test() -> None:
        async with holding(tmp_path, HolderSettings(hold_s=0.1)):
            pid = await died_with_a_program(tmp_path, tmp_path / "pid")
            await eventually(lambda: not is_alive(pid))
            async with actor(tmp_path, born_ns=2) as connection:
                assert await heard(connection, Listed) == [Listed()]

    run(test)


def test_an_actor_that_was_replaced_gets_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with holding(tmp_path, HolderSettings()), actor(tmp_path, born_ns=2) as newer:
            await heard(newer, Listed)
            async with actor(tmp_path, born_ns=1) as older:
                assert await heard(older, Listed) == []

    run(test)


def test_notes_that_are_too_large_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder, "MAX_NOTES_BYTES", 3)

    async def test() -> None:
        async with holding(tmp_path, HolderSettings()):
            notes = [Note("s1", b"ab", b"1"), Note("s1", b"cd", b"2")]
            await died_with_a_program(tmp_path, tmp_path / "pid", *notes)
            async with actor(tmp_path, born_ns=2) as connection:
                assert (await heard(connection, Listed))[0] == Held("s1", b"about", None, b"2")

    run(test)


def test_an_actor_that_ends_in_order_takes_its_programs_along(tmp_path: Path) -> None:
    async def test() -> None:
        async with holding(tmp_path, HolderSettings()):
            async with anyio.create_task_group() as tasks:
                programs = Programs(tmp_path, "rollout")
                tasks.start_soon(programs.run)
                await programs.start(start(WAITS, str(tmp_path / "pid")))
                pid = await pid_in(tmp_path / "pid")
                tasks.cancel_scope.cancel()
            assert not is_alive(pid)

    run(test)


def test_programs_die_with_the_process_that_holds_them_and_their_actor_hears_of_it(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "actors.sessions.programs", json.dumps({"hold_s": 30})]
    env = {**os.environ, RUN_DIR: str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])}

    async def test() -> None:
        async with anyio.create_task_group() as tasks:
            programs = Programs(tmp_path, "rollout")
            tasks.start_soon(programs.run)
            await programs.start(start(WAITS, str(tmp_path / "pid")))
            pid = await pid_in(tmp_path / "pid")
            process.send_signal(signal.SIGKILL)
            over = await programs.ended("s1")
            assert over.code == -signal.SIGKILL
            assert b"the process that holds programs ended" in over.output
            await eventually(lambda: not is_alive(pid))
            tasks.cancel_scope.cancel()

    with subprocess.Popen(command, env=env) as process:
        run(test)
