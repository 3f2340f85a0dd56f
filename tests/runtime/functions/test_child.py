"""A process of a user's function: what outlives it, and what it may print."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from runtime.functions.child import PRINTED_BYTES, UserProcess
from runtime.functions.limits import UserLimits
from runtime.functions.table import FILTER

PARENT = """
import sys, anyio
from runtime.functions.child import UserProcess
from runtime.functions.limits import UserLimits
from runtime.functions.table import FILTER

async def main():
    process = UserProcess(FILTER, "k", sys.argv[1], UserLimits())
    await process.start()
    print("started", flush=True)
    await anyio.sleep(60)

anyio.run(main)
"""


def test_what_a_function_started_dies_with_the_parent_of_its_process(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import subprocess, pathlib\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "(pathlib.Path(__file__).parent / 'pid').write_text(str(child.pid))\n"
        "def judge(group): return True\n"
    )
    command = [sys.executable, "-c", PARENT, f"{file}:judge"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        child = psutil.Process(int((tmp_path / "pid").read_text()))
        assert child.is_running()
        os.kill(parent.pid, signal.SIGKILL)
    with suppress(psutil.NoSuchProcess):
        child.wait(10)


@pytest.mark.anyio
async def test_the_output_of_a_call_is_logged_up_to_a_limit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text("print('loaded')\ndef judge(group): return True\nprint('y' * 200_000)\n")
    process = UserProcess(FILTER, "k", f"{file}:judge", UserLimits())
    try:
        await process.start()
    finally:
        await process.kill()
    printed = capfd.readouterr().err
    assert printed.startswith("loaded\nyyy")
    assert printed.count("y") == PRINTED_BYTES - len("loaded\n")
    left_out = len("loaded\n") + 200_001 - PRINTED_BYTES
    assert printed.endswith(f"(further output is left out: {left_out} B)\n")


@pytest.mark.anyio
async def test_a_printed_line_is_logged_although_its_process_is_killed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # as in a command; the processes of a run have it
    file = tmp_path / "mine.py"
    file.write_text("print('loaded')\ndef judge(group): return True\n")
    process = UserProcess(FILTER, "k", f"{file}:judge", UserLimits())
    try:
        await process.start()
    finally:
        await process.kill()
    assert capfd.readouterr().err == "loaded\n"
