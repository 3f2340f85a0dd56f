"""A process of a user's function: what outlives it, and what it may print."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from runtime.process.user_limits import PRINTED_BYTES
from runtime.process.user_process import UserLimits, UserProcess

ADAPTER = "actors.filter.filters:answering"
PARENT = """
import sys, anyio
from runtime.process.user_process import UserLimits, UserProcess

async def main():
    process = UserProcess(sys.argv[1], sys.argv[2], UserLimits(memory_bytes=1 << 33))
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
    command = [sys.executable, "-c", PARENT, ADAPTER, f"{file}:judge"]
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
    process = UserProcess(ADAPTER, f"{file}:judge", UserLimits(memory_bytes=1 << 33))
    try:
        await process.start()
    finally:
        await process.kill()
    printed = capfd.readouterr().err
    assert printed.startswith("loaded\nyyy")
    assert printed.count("y") == PRINTED_BYTES - len("loaded\n")
    assert printed.endswith("(further output of this call is left out)\n")
