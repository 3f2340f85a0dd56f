"""Observers of a run, such as trackers: they may crash or hang; they get the last row; the run's log has none of it."""

import os
import signal
import sys
from pathlib import Path

import aiohttp
import anyio
import msgspec
import psutil
import pytest

from messages import ActorExited, ActorStarted
from runtime.node.page_url import renew
from runtime.settings.processes import ProcessSpec, Tier
from runtime.settings.tables.observe import PAGE, PAGE_FILE
from runtime.util.files import write_atomically
from runtime.util.import_path import ROOT
from tests.fixtures.nats import eventually
from tests.runtime.node.daemons import Running, plan, player
from tests.runtime.node.test_daemon import events_of

pytestmark = pytest.mark.anyio

COUNTS_ROWS = """
import pathlib, signal, sys
def count(*_):
    pathlib.Path(sys.argv[2]).write_text(str(len(pathlib.Path(sys.argv[1]).read_bytes().splitlines())))
    sys.exit()
signal.signal(signal.SIGTERM, count)
while True:
    signal.pause()
"""
OF_A_KILLED_START = "5ec4e7" * 8
HANGS = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


def observer(name: str, code: str, *arguments: Path, stop_timeout_s: float = 5.0) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        command=(sys.executable, "-c", code, *map(str, arguments)),
        tier=Tier.OBSERVER,
        critical=False,
        max_restarts=1,
        stop_timeout_s=stop_timeout_s,
    )


async def test_a_run_does_not_notice_observers_and_gives_them_its_last_row(tmp_path: Path) -> None:
    """One always fails, one logs rows, one hangs."""
    given_up, counted, hangs = (tmp_path / name for name in ("given-up", "counted", "hangs"))
    observers = (
        observer("tracker.broken", "raise ValueError('no server')"),
        observer("tracker.well", COUNTS_ROWS, tmp_path / "r" / "metrics.jsonl", counted),
        observer("tracker.hangs", HANGS, hangs, stop_timeout_s=0.3),
    )
    running = Running(plan(tmp_path / "r", player("3", "--wait", str(given_up)), *observers))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        line = await running.shown("tracker.broken is off")
        given_up.touch()
    assert running.outcome is not None
    assert running.outcome.finished
    why = "ValueError: no server (exit code 1)"
    assert line.startswith(f"tracker.broken is off until the next start: {why}; restarted 1 time without progress; the")
    ended = [line for line in running.lines if "is started again" in line]
    assert ended == [f"tracker.broken ended and is started again: {why}; the run goes on"]
    assert counted.read_text() == "3"
    killed = "tracker.hangs was killed after 0.3 s (observe.stop_timeout_s); the next start sends the rest"
    assert killed in running.lines
    exits = [event for event in await events_of(tmp_path / "r") if isinstance(event, ActorStarted | ActorExited)]
    assert {event.actor for event in exits} == {"nats-server", "player"}


@pytest.mark.slow
async def test_after_a_failed_run_they_get_the_last_row_too(tmp_path: Path) -> None:
    counted = tmp_path / "counted"
    tracker = observer("tracker.well", COUNTS_ROWS, tmp_path / "r" / "metrics.jsonl", counted)
    running = Running(plan(tmp_path / "r", player("3", "--then", "fail"), tracker))
    assert not (await running.run()).finished
    assert counted.read_text() == "3"


@pytest.mark.slow
async def test_a_second_signal_ends_the_wait_for_them(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    hanging = observer("tracker.hangs", HANGS, ready, stop_timeout_s=300.0)
    running = Running(plan(tmp_path / "r", player("3", "--wait", str(ready)), hanging))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await running.shown("waiting for tracker.hangs to send the rest")
        os.kill(os.getpid(), signal.SIGINT)
        await running.shown("SIGINT: stopping; send it again to stop at once")
        os.kill(os.getpid(), signal.SIGINT)
    assert running.outcome is not None
    assert running.outcome.finished
    assert not [line for line in running.lines if "was killed after" in line]


def no_progress(_: str) -> None:
    """As on a terminal."""


async def test_a_page_that_is_killed_comes_back_with_its_secret_and_the_run_does_not_notice(tmp_path: Path) -> None:
    ended, run_dir = tmp_path / "ended", tmp_path / "r"
    page = msgspec.structs.replace(
        observer(PAGE, ""),
        command=(sys.executable, "-P", "-m", "actors.observer", "127.0.0.1:0"),
        env={"PYTHONPATH": str(ROOT)},
        max_restarts=3,
    )
    run_dir.mkdir()
    write_atomically(run_dir / PAGE_FILE, f"http://127.0.0.1:1/#token={OF_A_KILLED_START}\n".encode())

    async def status_of(url: str) -> int:
        place, _, secret = url.partition("#token=")
        async with client.get(f"{place}timeline", headers={"Authorization": f"Bearer {secret}"}) as answer:
            return answer.status

    running = Running(plan(run_dir, player("3", "--wait", str(ended)), page), rewrite=no_progress)
    async with anyio.create_task_group() as tasks, aiohttp.ClientSession() as client:
        tasks.start_soon(running.run)
        first = (await running.shown("page  ")).split()[1]
        assert OF_A_KILLED_START not in first
        assert await status_of(first) == 200
        (pid,) = [each.pid for each in psutil.Process().children() if "actors.observer" in each.cmdline()]
        os.kill(pid, signal.SIGKILL)
        await running.shown("page ended and is started again")

        async def is_back() -> bool:
            try:
                return await status_of(first) == 200
            except aiohttp.ClientError:
                return False

        await eventually(is_back)
        renewed = renew(run_dir / PAGE_FILE)
        assert renewed.partition("#")[0] == first.partition("#")[0]
        assert [await status_of(url) for url in (first, renewed)] == [401, 200]
        await running.shown(f"page      {renewed}")
        ended.touch()
    assert running.outcome is not None
    assert running.outcome.finished
    assert not (run_dir / PAGE_FILE).exists()
