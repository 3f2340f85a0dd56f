"""The process of a user's function: answers calls on its standard input. Each kind of the table with `answering`."""

import faulthandler
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NoReturn

import msgspec

from runtime.functions.frames import ANSWERED, RAISED, FrameBuffer, framed, read_frame, take_pipes, write_all
from runtime.functions.limits import UserLimits, limit
from runtime.functions.table import at
from runtime.util.exit_codes import EXIT_OK
from runtime.util.import_path import user_folder_last
from runtime.util.tracebacks import shown_error, user_frames, user_traceback

Answer = Callable[[bytes], bytes]

MAX_TEXT: Final = 1 << 16  # characters of an exception


def main(arguments: Sequence[str]) -> int:
    """Answer calls on standard input until it ends, then kill this process group. Return an exit code before that."""
    answering, key, name, limits = arguments
    fd_in, fd_out = take_pipes()
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)  # the stack of a call that is to be killed
    _end_with_parent(fd_in)
    limit(msgspec.json.decode(limits, type=UserLimits))
    user_folder_last()
    try:
        answer: Answer = at(answering)(key, name)
    except ValueError as error:
        write_all(fd_out, framed(RAISED + str(error).encode()))
        return EXIT_OK
    write_all(fd_out, framed(ANSWERED))
    calls = FrameBuffer()
    while (payload := read_frame(fd_in, calls)) is not None:
        write_all(fd_out, framed(_answered(answer, payload)))
    _end_group()


def _answered(answer: Answer, payload: bytes) -> bytes:
    try:
        return ANSWERED + answer(payload)
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything; the caller hears of it
        trace = user_traceback(error)
        with suppress(OSError):  # it may have closed its output
            os.write(2, f"{trace}\n".encode(errors="replace"))
        text = shown_error(error).replace("\0", "")[:MAX_TEXT]
        if user_frames(error) is None:  # an answer that is refused: no line of the user's code raised
            trace = ""
        return RAISED + f"{text}\0{trace}".encode(errors="replace")


def _end_with_parent(fd_in: int) -> None:
    """Kill this process and those that it started once the parent's end of a pipe is closed.

    Args:
        fd_in: the pipe that the parent writes to. The process must lead its own process group.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(fd_in, 0)  # only POLLHUP and POLLERR
        poll.poll()
        _end_group()

    threading.Thread(target=watch, daemon=True).start()


def _end_group() -> NoReturn:
    """Kill this process and those that it started."""
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("this process is dead")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
