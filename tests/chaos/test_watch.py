"""bin/watch in a terminal beside a live run: it shows a killed process, and killing or stopping it changes nothing."""

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from messages import GroupsIssued
from tests.chaos.audit import audit
from tests.chaos.harness import ROOT, Run
from tests.fixtures.nats import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]

CODES = re.compile(r"\x1b(\[[0-9;?<>=]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[()][A-Z0-9]|[=>78])")
SHOWN_S = 120.0
AGAIN_S = 0.5  # between two presses of a key


class Watching:
    """bin/watch in a terminal of 80 columns, and what it wrote there."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int, modes: list[Any]) -> None:
        self.process = process
        self.first_modes = modes  # of the terminal, before the view
        self._terminal = terminal
        self._written = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                some = os.read(self._terminal, 65536)
            except OSError:  # its other end is closed
                return
            if not some:
                return
            self._written += some

    @property
    def shown(self) -> str:
        return CODES.sub("", self._written.decode(errors="replace"))

    async def until(self, pattern: str) -> None:
        """Wait until the view has drawn a line."""
        await eventually(lambda: re.search(pattern, self.shown) is not None, timeout_s=SHOWN_S)

    def press(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    async def open_log(self, line: str) -> None:
        """Press the key of the log until a line of it is drawn. What is typed while a view resumes may be lost."""
        begin = len(self.shown)
        with anyio.fail_after(SHOWN_S):
            while line not in self.shown[begin:]:
                self.press(b"5")
                await anyio.sleep(AGAIN_S)

    @property
    def modes(self) -> list[Any]:
        """The modes of the terminal, such as whether it passes keys on before Enter."""
        return termios.tcgetattr(self._terminal)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._terminal)


@contextmanager
def watching(run: Run) -> Generator[Watching]:
    terminal, other = pty.openpty()
    termios.tcsetwinsize(other, (24, 80))
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    modes = termios.tcgetattr(terminal)
    command = [sys.executable, "-P", str(ROOT / "bin" / "physarum.py"), "watch", str(run.directory)]
    process = subprocess.Popen(
        command, stdin=other, stdout=other, stderr=other, env=environment, start_new_session=True
    )
    os.close(other)
    made = Watching(process, terminal, modes)
    try:
        yield made
    finally:
        made.close()


async def ended(watch: Watching) -> int:
    await eventually(lambda: watch.process.poll() is not None, timeout_s=SHOWN_S)
    return watch.process.wait()


async def test_a_view_shows_a_killed_process_and_the_run_notices_no_view(tmp_path: Path) -> None:
    graders = Path(__file__).with_name("graders.py")
    run = Run(tmp_path, num_steps=8, overrides=(f"data.0.rm_type={graders}:slowly",))
    async with run.started() as command:
        with watching(run) as killed, watching(run) as stopped, watching(run) as watch:
            for one in (killed, stopped, watch):
                await one.until(r"step \d+ of 8; .*live")
            await command.log.until_trained(1)
            killed.process.kill()
            stopped.process.send_signal(signal.SIGSTOP)
            command.log.kill("rollout")
            await command.log.until_restarted("rollout")
            await watch.until(r"rollout +up +\d\S* +1 ")
            await command.log.until(lambda event: isinstance(event, GroupsIssued))
            watch.press(b"\x03")
            assert await ended(watch) == 130
            stopped.process.send_signal(signal.SIGCONT)
            await stopped.open_log("rollout restarted")
            stopped.process.send_signal(signal.SIGTSTP)  # as Ctrl-Z does
            await eventually(lambda: psutil.Process(stopped.process.pid).status() == psutil.STATUS_STOPPED)
            assert stopped.modes == stopped.first_modes
            stopped.process.send_signal(signal.SIGCONT)
            await stopped.open_log("rollout restarted")
            stopped.press(b"q")
            assert await ended(stopped) == 0
            assert stopped.modes == stopped.first_modes
        family = command.family()
        assert await command.end() == 0
        await run.gone(family)
    await audit(run, killed=["rollout"])
    with watching(run) as over:
        await over.until("finished: all steps trained")
        over.press(b"q")
        assert await ended(over) == 0
