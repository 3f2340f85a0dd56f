"""What a kind of users' functions gives to its process: what answers calls. Imports little."""

import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple

from runtime.functions.frames import RAISED
from runtime.util.tracebacks import shown_error, user_frames, user_traceback

MAX_TEXT: Final = 1 << 16  # characters of an exception

Answer = Callable[[bytes], bytes | Iterator[bytes]]  # of several parts each is sent once it is there
AnswerTogether = Callable[[bytes], Coroutine[Any, Any, bytes]]


class Answers(NamedTuple):
    """What answers the calls of a process, and what it says of itself once it is ready."""

    one_by_one: Answer
    greeting: bytes = b""
    together: AnswerTogether | None = None  # in place of `one_by_one`: calls run together, in one event loop


def raised(error: BaseException) -> bytes:
    """Print the traceback of an exception of a user's function. Return the content of the answer's frame."""
    trace = user_traceback(error)
    with suppress(OSError):  # it may have closed its output
        os.write(2, f"{trace}\n".encode(errors="replace"))
    text = shown_error(error).replace("\0", "")[:MAX_TEXT]
    if user_frames(error) is None:  # an answer that is refused: no line of the user's code raised
        trace = ""
    return RAISED + f"{text}\0{trace}".encode(errors="replace")
