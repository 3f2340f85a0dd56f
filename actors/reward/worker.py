"""Grader process: reads samples from stdin, writes grades to stdout, and dies with its keeper.

Imports little, so that a killed process is replaced quickly.
"""

import io
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from actors.reward.frames import GATHER_S, Grade, Graded, GraderSpec, Hello, encode_frame, gathers
from actors.reward.graders.calling import Call, grade_group, grade_sample, is_async, resolve_grader
from runtime.functions.frames import (
    ANSWERED,
    RAISED,
    FrameBuffer,
    FrameError,
    framed,
    read_frame,
    take_pipes,
    write_all,
)
from runtime.util.exit_codes import EXIT_NO_HELLO, EXIT_OK
from runtime.util.import_path import user_folder_last

if TYPE_CHECKING:
    import asyncio


class CpuLimitError(Exception):
    """A grader call exceeded its CPU time."""


class Waiter:
    """Runs awaitables in one event loop, created on first use because most graders are plain functions."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def __call__(self, awaitable: Awaitable[Any]) -> Any:
        import asyncio  # takes as long to import as everything else here

        async def wait() -> Any:
            return await awaitable

        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(wait())


class Worker:
    """Grades the samples of Grade frames with the graders of this process."""

    def __init__(self, hello: Hello, fd_out: int) -> None:
        self._hello = hello
        self._fd_out = fd_out
        self._base_dirs = [Path(base) for base in hello.base_dirs]
        self._graders: dict[GraderSpec, Call] = {}
        self._wait = Waiter()

    def check(self) -> bytes:
        """Resolve the graders named in the first frame; return the content of the answer: those that are async."""
        try:
            found = tuple(spec for spec in self._hello.graders if is_async(self.grader(spec)))
        except ValueError as error:
            return RAISED + str(error).encode()
        return ANSWERED + msgspec.msgpack.encode(found)

    def answer(self, grade: Grade) -> None:
        """Grade samples and write their grades: those of a user's function one by one, since it may end this process.

        Grades of a built-in grader are written together, but no later than GATHER_S after the first of them was begun.
        """
        try:
            grader = self.grader(grade.grader)
        except ValueError as error:
            self._write(*(Graded(error=str(error), cause="refused") for _ in grade.samples))
            return
        hello, cpu_s = self._hello, self._hello.cpu_s
        if grade.grader.group:
            _limit_cpu(cpu_s)
            self._write(*grade_group(grader, grade.samples, reward_key=hello.reward_key, wait=self._wait))
            return
        gathered, until = list[Graded](), 0.0
        gather_s = GATHER_S if gathers(grade.grader) else 0.0
        for sample in grade.samples:
            if not gathered:
                _limit_cpu(cpu_s)
                until = time.monotonic() + gather_s
            gathered.append(grade_sample(grader, sample, reward_key=hello.reward_key, wait=self._wait))
            if time.monotonic() >= until:
                self._write(*gathered)
                gathered.clear()
        self._write(*gathered)

    def grader(self, spec: GraderSpec) -> Call:
        """The function of a grader.

        Raises:
            ValueError: it cannot be used.
        """
        grader = self._graders.get(spec)
        if grader is None:
            grader = self._graders[spec] = resolve_grader(spec, self._base_dirs)
        return grader

    def _write(self, *grades: Graded) -> None:
        write_all(self._fd_out, b"".join(map(_framed, grades)))


def _framed(graded: Graded) -> bytes:
    try:
        return encode_frame(graded)
    except FrameError as error:
        too_large = Graded(error=f"the answer is too large: {error}", cause="bad_answer", took_s=graded.took_s)
        return encode_frame(too_large)


def work(refusal: str | None) -> int:
    """Grade until the input ends. With `refusal`, report that the sandbox is unavailable and return.

    Returns:
        The exit code.
    """
    user_folder_last()
    fd_in, fd_out = take_pipes()
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), line_buffering=True)  # stderr, which is logged
    buffer = FrameBuffer()
    frame = read_frame(fd_in, buffer)
    if frame is None:
        return EXIT_NO_HELLO
    if refusal is not None:
        problem = f'reward.sandbox = "isolated": this machine cannot isolate graders: {refusal}'
        write_all(fd_out, framed(RAISED + problem.encode()))
        return EXIT_OK
    signal.signal(signal.SIGXCPU, _end_call)
    hello = msgspec.msgpack.decode(frame, type=Hello)
    worker = Worker(hello, fd_out)
    write_all(fd_out, framed(worker.check()))
    if hello.at_once:
        from actors.reward.overlapping import grade_overlapping  # imports asyncio

        return grade_overlapping(worker.grader, hello, fd_in, fd_out, buffer)
    decoder = msgspec.msgpack.Decoder(Grade)
    while (frame := read_frame(fd_in, buffer)) is not None:
        worker.answer(decoder.decode(frame))
    return EXIT_OK


def _end_call(_signal: int, _frame: FrameType | None) -> None:
    raise CpuLimitError("reward.cpu_s")


def _limit_cpu(cpu_s: float | None) -> None:
    """Limit the CPU time of the next call. The kernel's limit is a total per process, in whole seconds."""
    if cpu_s is not None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(usage.ru_utime + usage.ru_stime + cpu_s), hard))
