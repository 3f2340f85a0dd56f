"""Tracebacks of exceptions that users' functions raise. Imports little."""

import traceback
from types import TracebackType
from typing import Final

MAX_CHARS: Final = 8000
OURS: Final = (  # modules that call or import users' functions
    "actors.",
    "runtime.",
    "anyio.",
    "asyncio.",
    "importlib.",
    "_frozen_importlib.",
    "_frozen_importlib_external.",
    "__main__.",
)


def user_traceback(error: BaseException) -> str:
    """Format the traceback of a user's function, from its own first frame on; the middle of a long one is left out.

    If no frame is the user's, such as for wrong arguments, all frames are shown.
    """
    text = "".join(traceback.format_exception(type(error), error, user_frames(error) or error.__traceback__)).rstrip()
    half = MAX_CHARS // 2
    return text if len(text) <= MAX_CHARS else f"{text[:half]}\n  ...\n{text[-half:]}"


def user_frames(error: BaseException) -> TracebackType | None:
    """The traceback of an exception from the first frame on that is not ours; None: there is none."""
    own = error.__traceback__
    while own is not None and f"{own.tb_frame.f_globals.get('__name__', '')}.".startswith(OURS):
        own = own.tb_next
    return own


def shown_error(error: BaseException) -> str:
    """The repr of an exception, or its type if the repr raises."""
    try:
        return repr(error)
    except Exception:  # noqa: BLE001 - a user's __repr__ may raise anything
        return type(error).__name__


def places_in(text: str) -> tuple[str, ...]:
    """The places in a traceback, which two exceptions of one cause have in common."""
    return tuple(line.strip() for line in text.splitlines() if line.lstrip(" |").startswith('File "'))
