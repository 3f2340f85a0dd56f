"""Starts a program in namespaces of its own, and reads what it writes, within limits."""

import fcntl
import json
import mmap
import os
import select
import signal
import struct
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
WALL_TIMES: Final = 5  # times its limit; a program that was not given its limit in this time is not judged
LOOK_S: Final = 0.02  # between two looks at its own time, at least
KILLED: Final = "the sandbox of a program was killed"
NOT_ISOLATED: Final = "this machine cannot isolate a program"


class SandboxError(OSError):
    """This machine cannot isolate a program, was too busy to run it, or the sandbox was killed. Says which."""

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
    checks: tuple[str, str] | None = None,
    limit_s: float = 8.0,
    max_output_bytes: int = MORE_OUTPUT_BYTES,
    limits: Limits = LIMITS,
) -> Ran:
    """Run a Python program without network, processes of its own, other files to write, or environment.

    Args:
        program: its source.
        given: what it reads from standard input.
        function: called after the program has run; its values are the output, a line of JSON each.
        calls: arguments of each call; JSON values.
        checks: code that runs after the program, in its names, and what is the output if it raises nothing.
        limit_s: seconds of its own, in which it ran, slept or read, after which it is killed. After WALL_TIMES as many
            by the clock the machine was too busy.
        max_output_bytes: it is killed when it writes more.
        limits: of the program.

    Raises:
        SandboxError: this machine cannot isolate it, and nothing ran; something else killed the sandbox; or this
            machine was too busy to give it `limit_s`.
    """
    order = _order(program, limits, function=function, calls=calls, checks=checks)
    with _launched(order, given) as (process, reading, own_time):
        ran = _read(process, _Clock(own_time, limit_s), max_output_bytes)
        if process.returncode is not None and (process.returncode < 0 or os.read(reading, 1)):
            raise SandboxError(KILLED)
        return ran


def run_inputs(
    program: str, inputs: Sequence[tuple[str, int]], *, limit_s: float = 8.0, limits: Limits = LIMITS
) -> Generator[Ran]:
    """Run a Python program once for each input, in a sandbox of its own each time, and yield how it ended.

    One interpreter starts them all, which takes a sixth of the CPU time of as many calls of `run_program`.

    Args:
        program: its source.
        inputs: what it reads from standard input, and the bytes of output after which it is killed.
        limit_s: as in `run_program`, for all inputs together.
        limits: of each run.

    Yields:
        One for each input. A run whose code is not 0 is the last.

    Raises:
        SandboxError: as `run_program`, with the time of all runs; the runs before it have ended.
    """
    order = _order(program, limits, inputs=inputs)
    with _launched(order, b"") as (process, reading, own_time):
        received, clock = bytearray(), _Clock(own_time, limit_s)
        for _ in inputs:
            ran = _next_run(process, received, clock)
            if ran is None or ran.code != 0:
                _check_alive(reading)
            if ran is None:
                raise SandboxError(KILLED)
            yield ran
            if ran.code != 0:
                return


def _order(program: str, limits: Limits, **what: Any) -> dict[str, Any]:
    nothing = {"function": None, "calls": (), "checks": None, "inputs": None}
    return {"program": program, **nothing, **what, **limits._asdict()}


@contextmanager
def _launched(order: dict[str, Any], given: bytes) -> Generator[tuple[subprocess.Popen[bytes], int, mmap.mmap]]:
    """Start the launcher, and wait until its sandbox stands. Then end it.

    Yields:
        The launcher, what reads its status, and the own time of its programs in nanoseconds.
    """
    with tempfile.TemporaryDirectory(prefix="physarum-code-", ignore_cleanup_errors=True) as folder:
        times = os.memfd_create("own time", os.MFD_CLOEXEC)
        os.ftruncate(times, 2 * LENGTH_BYTES)
        own_time = mmap.mmap(times, 2 * LENGTH_BYTES)
        reading, status = os.pipe()
        memory = _sealed(json.dumps(order).encode("utf-8", "surrogatepass"), given)
        command = [sys.executable, "-I", str(LAUNCHER), folder, str(status), str(times)]
        try:
            process = subprocess.Popen(
                command, stdin=memory, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=(status, times),
                env={"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(memory)
            os.close(status)
            os.close(times)
        try:
            _await_sandbox(reading)
            yield process, reading, own_time
        finally:
            os.close(reading)
            _end(process)
            own_time.close()


def _next_run(process: subprocess.Popen[bytes], received: bytearray, clock: "_Clock") -> Ran | None:
    """The next run that the launcher reports; None if the launcher has ended."""
    assert process.stdout is not None
    while (ran := _taken(received)) is None:
        if not clock.waits_for(process.stdout.fileno()):
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
        raise SandboxError(KILLED if killed else f"{NOT_ISOLATED}: {problem}")


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


def _read(process: subprocess.Popen[bytes], clock: "_Clock", max_bytes: int) -> Ran:
    assert process.stdout is not None
    output = bytearray()
    while clock.waits_for(process.stdout.fileno()):
        read = os.read(process.stdout.fileno(), READ_BYTES)
        output += read
        if len(output) > max_bytes:
            break
        if not read:
            return Ran(process.wait(), bytes(output)) if _ends(process, clock) else Ran(-1, bytes(output))
    return Ran(-1, bytes(output[:max_bytes]))


def _ends(process: subprocess.Popen[bytes], clock: "_Clock") -> bool:
    """Wait for the end of a launcher whose program has closed its output; False: its time was used up first."""
    ended = os.pidfd_open(process.pid)
    try:
        return clock.waits_for(ended)
    finally:
        os.close(ended)


class _Clock:
    """The time of a launcher's programs. It judges them by their own time, and the machine by the clock."""

    def __init__(self, own_time: mmap.mmap, limit_s: float) -> None:
        self._own_time = own_time
        self._limit_s = limit_s
        self._wall_s = WALL_TIMES * limit_s
        self._deadline = time.monotonic() + self._wall_s

    def waits_for(self, reading: int) -> bool:
        """Wait until a file can be read; False: the programs have used their time up.

        Raises:
            SandboxError: they have not, and this machine had WALL_TIMES as much time.
        """
        while True:
            own_s = struct.unpack("=qq", self._own_time[:])[0] / 1e9
            left_s, wall_left_s = self._limit_s - own_s, self._deadline - time.monotonic()
            if left_s <= 0:
                return False
            if wall_left_s <= 0:
                raise SandboxError(
                    f"this machine was too busy: in {self._wall_s:g} s, a program ran or slept for {own_s:.3g} s"
                )
            if select.select([reading], [], [], max(LOOK_S, min(left_s, wall_left_s)))[0]:
                return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the launcher. The kernel then kills the first process of the namespace, and with it all others."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
