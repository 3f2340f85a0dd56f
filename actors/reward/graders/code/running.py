"""Starts a program in namespaces of its own, and reads what it writes, within limits."""

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from actors.reward.causes import Cause

LAUNCHER: Final = Path(__file__).with_name("launcher.py")
SANDBOX_S: Final = 30.0  # time for the sandbox to stand, beyond that of the program
READ_BYTES: Final = 1 << 16
LENGTH_BYTES: Final = 8
MORE_OUTPUT_BYTES: Final = 1 << 20
KILLED: Final = "the sandbox of a program was killed"


class SandboxError(OSError):
    """This machine cannot isolate a program, or the sandbox was killed. Says which system call the kernel refuses."""

    cause: Cause = "sandbox_lost"


class Limits(NamedTuple):
    """Limits of one program."""

    cpu_s: int = 4
    memory_bytes: int = 1 << 30  # address space
    scratch_bytes: int = 64 << 20  # of its folder, the only one that it may write


LIMITS: Final = Limits()


class Ran(NamedTuple):
    """How a program ended, and what it wrote to standard output."""

    code: int  # 128 + the signal that ended it; -1: it was ended at its time limit, or wrote too much
    output: bytes


def run_program(
    program: str,
    given: bytes = b"",
    *,
    function: str | None = None,
    calls: Sequence[Sequence[Any]] = (),
    wall_s: float = 8.0,
    max_output_bytes: int = MORE_OUTPUT_BYTES,
    limits: Limits = LIMITS,
) -> Ran:
    """Run a Python program without network, processes of its own, other files to write, or environment.

    Args:
        program: its source.
        given: what it reads from standard input.
        function: called after the program has run; its values are the output, a line of JSON each.
        calls: arguments of each call; JSON values.
        wall_s: seconds after which it is killed, from the time the sandbox stands.
        max_output_bytes: it is killed when it writes more.
        limits: of the program.

    Raises:
        TimeoutError: it was killed after `wall_s`, and was ready to run, but got less than half of that time.
        SandboxError: this machine cannot isolate it, and nothing ran; or something else killed the sandbox.
    """
    order = {"program": program, "function": function, "calls": calls, "inputs": None, **limits._asdict()}
    with _launched(order, given) as (process, reading):
        ran = _read(process, wall_s, max_output_bytes)
        if process.returncode is not None and (process.returncode < 0 or os.read(reading, 1)):
            raise SandboxError(KILLED)
        return ran


def run_inputs(
    program: str, inputs: Sequence[tuple[str, int]], *, wall_s: float = 8.0, limits: Limits = LIMITS
) -> Generator[Ran]:
    """Run a Python program once for each input, in a sandbox of its own each time, and yield how it ended.

    One interpreter starts them all, which takes a sixth of the CPU time of as many calls of `run_program`.

    Args:
        program: its source.
        inputs: what it reads from standard input, and the bytes of output after which it is killed.
        wall_s: seconds after which it is killed, for all inputs, from the time the first sandbox stands.
        limits: of each run.

    Yields:
        One for each input. A run whose code is not 0 is the last.

    Raises:
        TimeoutError: as `run_program`.
        SandboxError: as `run_program`; the runs before it have ended.
    """
    order = {"program": program, "function": None, "calls": (), "inputs": inputs, **limits._asdict()}
    with _launched(order, b"") as (process, reading):
        received, deadline = bytearray(), time.monotonic() + wall_s
        for _ in inputs:
            ran = _next_run(process, received, deadline)
            if ran is None or ran.code != 0:
                _check_alive(reading)
            if ran is None:
                raise SandboxError(KILLED)
            yield ran
            if ran.code != 0:
                return


@contextmanager
def _launched(order: dict[str, Any], given: bytes) -> Generator[tuple[subprocess.Popen[bytes], int]]:
    """Start the launcher, and wait until its sandbox stands; the second value reads its status. Then end it."""
    with tempfile.TemporaryDirectory(prefix="physarum-code-", ignore_cleanup_errors=True) as folder:
        reading, status = os.pipe()
        memory = _sealed(json.dumps(order).encode("utf-8", "surrogatepass"), given)
        command = [sys.executable, "-I", str(LAUNCHER), folder, str(status)]
        try:
            process = subprocess.Popen(
                command, stdin=memory, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=(status,),
                env={"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(memory)
            os.close(status)
        try:
            _await_sandbox(reading)
            yield process, reading
        finally:
            os.close(reading)
            _end(process)


def _next_run(process: subprocess.Popen[bytes], received: bytearray, deadline: float) -> Ran | None:
    """The next run that the launcher reports; None if the launcher has ended."""
    assert process.stdout is not None
    wall_s = deadline - time.monotonic()
    while (ran := _taken(received)) is None:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
            if is_starved(_stat_of_program(_only_child(str(process.pid))), wall_s):
                raise TimeoutError(f"this machine was too busy to run a program for {wall_s:g} s")
            return Ran(-1, b"")
        read = os.read(process.stdout.fileno(), READ_BYTES)
        if not read:
            return None
        received += read
    return ran


def _taken(received: bytearray) -> Ran | None:
    """Take the first run from what the launcher wrote; None if it is not complete."""
    if len(received) < 2 * LENGTH_BYTES:
        return None
    code, size = (
        int.from_bytes(received[place : place + LENGTH_BYTES], "big", signed=True) for place in (0, LENGTH_BYTES)
    )
    end = 2 * LENGTH_BYTES + size
    if len(received) < end:
        return None
    output = bytes(received[2 * LENGTH_BYTES : end])
    del received[:end]
    return Ran(code, output)


def _check_alive(reading: int) -> None:
    """Raise SandboxError if the launcher said that a sandbox does not stand, or was killed."""
    said = os.read(reading, 4096).decode("utf-8", "replace") if select.select([reading], [], [], 0)[0] else ""
    _check_status(said)


def _check_status(said: str) -> None:
    problem = said.strip("+")
    if problem:
        killed = problem.endswith("!")
        raise SandboxError(KILLED if killed else f"this machine cannot isolate a program: {problem}")


def _sealed(order: bytes, given: bytes) -> int:
    """A sealed file in memory with the order and the input."""
    memory = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    content = len(order).to_bytes(8, "big") + order + given
    while content:
        content = content[os.write(memory, content) :]
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    os.lseek(memory, 0, os.SEEK_SET)
    return memory


def _await_sandbox(reading: int) -> None:
    readable, _, _ = select.select([reading], [], [], SANDBOX_S)
    said = os.read(reading, 4096).decode("utf-8", "replace") if readable else f"not ready within {SANDBOX_S:g} s"
    _check_status(said or "the launcher ended")


def _read(process: subprocess.Popen[bytes], wall_s: float, max_bytes: int) -> Ran:
    assert process.stdout is not None
    output, deadline = bytearray(), time.monotonic() + wall_s
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
            if is_starved(_stat_of_program(str(process.pid)), wall_s):
                raise TimeoutError(f"this machine was too busy to run a program for {wall_s:g} s")
            break
        read = os.read(process.stdout.fileno(), READ_BYTES)
        output += read
        if len(output) > max_bytes:
            break
        if not read:
            with suppress(subprocess.TimeoutExpired):
                return Ran(process.wait(max(0.0, deadline - time.monotonic())), bytes(output))
            break
    return Ran(-1, bytes(output[:max_bytes]))


def _stat_of_program(launcher: str) -> str:
    """The line of /proc/PID/stat of the program; empty if it has ended."""
    with suppress(OSError):
        init = _only_child(launcher)
        if program := init and _only_child(init):
            return Path(f"/proc/{program}/stat").read_text(encoding="utf-8", errors="replace")
    return ""


def _only_child(pid: str) -> str:
    """The child of a process with one thread; empty if it has none, or has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").partition(" ")[0]
    return ""


def is_starved(stat: str, wall_s: float) -> bool:
    """Whether a program could run, and got less than half of the time; from its line of /proc/PID/stat."""
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 13:
        return False
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return fields[0] == "R" and cpu_s < wall_s / 2


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the launcher. The kernel then kills the first process of the namespace, and with it all others."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
