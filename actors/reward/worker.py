"""A grader process: samples come in by standard input, grades go out by standard output; it dies with its parent.

Started by the pool as `python -m actors.reward.worker PARENT_PID`. Imports little: a killed one is soon replaced.
"""

import ctypes
import io
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from actors.reward.frames import (
    FrameBuffer,
    Grade,
    Graded,
    GraderSpec,
    Hello,
    Ready,
    encode_frame,
    read_frame,
    write_all,
)
from actors.reward.graders.calling import Call, grade_group, grade_sample, resolve_grader
from runtime.import_path import user_folder_last

if TYPE_CHECKING:
    import asyncio

PR_SET_PDEATHSIG = 1
EXIT_ORPHANED = 3
EXIT_NO_HELLO = 4


class Waiter:
    """Runs awaitables in one event loop, which is made at the first one: most graders are plain functions."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def __call__(self, awaitable: Awaitable[Any]) -> Any:
        import asyncio  # costs as much as everything else here together

        async def wait() -> Any:
            return await awaitable

        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(wait())


class Worker:
    """Answers Grade frames."""

    def __init__(self, hello: Hello, fd_out: int) -> None:
        self._hello = hello
        self._fd_out = fd_out
        self._base_dirs = [Path(base) for base in hello.base_dirs]
        self._graders: dict[GraderSpec, Call] = {}
        self._wait = Waiter()

    def check(self) -> Ready:
        """Resolve the graders that are known at start."""
        try:
            for spec in self._hello.graders:
                self._grader(spec)
        except ValueError as error:
            return Ready(error=str(error))
        return Ready()

    def answer(self, grade: Grade) -> None:
        """Grade and write one frame per sample, each as soon as it is known: the pool times them one by one."""
        try:
            grader = self._grader(grade.grader)
        except ValueError as error:
            self._write(*(Graded(error=str(error)) for _ in grade.samples))
            return
        if grade.grader.group:
            self._write(*grade_group(grader, grade.samples, reward_key=self._hello.reward_key, wait=self._wait))
            return
        for sample in grade.samples:
            self._write(grade_sample(grader, sample, reward_key=self._hello.reward_key, wait=self._wait))

    def _grader(self, spec: GraderSpec) -> Call:
        grader = self._graders.get(spec)
        if grader is None:
            grader = self._graders[spec] = resolve_grader(spec, self._base_dirs)
        return grader

    def _write(self, *grades: Graded) -> None:
        write_all(self._fd_out, b"".join(map(encode_frame, grades)))


def main(arguments: Sequence[str]) -> int:
    """Answer until the input ends."""
    if not _die_with(int(arguments[0])):
        return EXIT_ORPHANED
    fd_in, fd_out = _take_pipes()
    buffer = FrameBuffer()
    frame = read_frame(fd_in, buffer)
    if frame is None:
        return EXIT_NO_HELLO
    hello = msgspec.msgpack.decode(frame, type=Hello)
    _limit_memory(hello.memory_limit_bytes)
    worker = Worker(hello, fd_out)
    write_all(fd_out, encode_frame(worker.check()))
    decoder = msgspec.msgpack.Decoder(Grade)
    while (frame := read_frame(fd_in, buffer)) is not None:
        worker.answer(decoder.decode(frame))
    return 0


def _die_with(parent: int) -> bool:
    """Be killed when the parent ends, whatever a grader is doing then; False if it has ended already."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to handle
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent


def _take_pipes() -> tuple[int, int]:
    """Keep the pipes to the parent, and give graders other ones: what they print goes to the log."""
    fd_in, fd_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), line_buffering=True)
    return fd_in, fd_out


def _limit_memory(limit_bytes: int | None) -> None:
    """Turn a grader's greed into its own MemoryError; if memory still ends, this process goes before the others."""
    if limit_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))
    with suppress(OSError):  # where /proc may not be written
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    user_folder_last()
    raise SystemExit(main(sys.argv[1:]))
