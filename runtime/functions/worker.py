"""The process of a user's function: answers calls on its standard input. Each kind of the table with `answering`.

It is started by its parent, or forked by a keeper. Imports little, so that a killed process is replaced quickly.
"""

import faulthandler
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import NoReturn

import msgspec

from runtime.functions.answers import Answer, Answers, raised
from runtime.functions.frames import ANSWERED, RAISED, FrameBuffer, framed, read_frame, take_pipes, write_all
from runtime.functions.limits import UserLimits, limit
from runtime.functions.table import at
from runtime.util.exit_codes import EXIT_OK
from runtime.util.import_path import user_folder_last


def main(arguments: Sequence[str]) -> int:
    """Answer calls on standard input until it ends, then kill this process group. Return an exit code before that."""
    *words, limits = arguments
    fd_in, fd_out = take_pipes()
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)  # the stack of a call that is to be killed
    _end_with_parent(fd_in)
    limit(msgspec.json.decode(limits, type=UserLimits))
    if _serve(fd_in, fd_out, words):
        _end_group()
    return EXIT_OK


def work(refusal: str | None, words: Sequence[str]) -> int:
    """Answer calls until standard input ends, behind a keeper, which limits and ends this process.

    Args:
        refusal: why the process cannot be isolated as its limits ask for, which is then all that it says; None: it is.
        words: as of `command` of its limits.

    Returns:
        The exit code.
    """
    _serve(*take_pipes(), words, refusal)
    return EXIT_OK


def _serve(fd_in: int, fd_out: int, words: Sequence[str], refusal: str | None = None) -> bool:
    """Answer calls until the input ends. Return False if the function cannot be used; the parent gets the reason."""
    user_folder_last()
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), line_buffering=True)  # stderr, which is logged
    calls = FrameBuffer()
    hello = read_frame(fd_in, calls)
    if hello is None:
        return True
    try:
        answers = _answers(words, hello, refusal)
    except ValueError as error:
        write_all(fd_out, framed(RAISED + str(error).encode()))
        return False
    write_all(fd_out, framed(ANSWERED + answers.greeting))
    if answers.together is not None:
        from runtime.functions.overlapping import serve_together  # imports asyncio

        serve_together(answers.together, fd_in, fd_out, calls)
    while (payload := read_frame(fd_in, calls)) is not None:
        for part in _parts(answers.one_by_one, payload):
            write_all(fd_out, framed(part))
    return True


def _answers(words: Sequence[str], hello: bytes, refusal: str | None) -> Answers:
    """Load the function: `answering` gets its arguments, and what the parent sends first if that is anything.

    Raises:
        ValueError: it cannot be used.
    """
    if refusal is not None:
        raise ValueError(refusal)
    answering, *named = words
    found = at(answering)(*named, *([hello] if hello else []))
    return found if isinstance(found, Answers) else Answers(found)


def _parts(answer: Answer, payload: bytes) -> Iterator[bytes]:
    """Yield the contents of the frames that answer a call."""
    try:
        answered = answer(payload)
        if isinstance(answered, bytes):
            yield ANSWERED + answered
        else:
            for part in answered:
                yield ANSWERED + part
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything; the caller hears of it
        yield raised(error)


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
