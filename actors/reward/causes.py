"""Why a sample has no reward: the named causes, and the cause of an exception. Imports little."""

import math
import time
from collections.abc import Mapping
from email.message import Message
from email.utils import mktime_tz, parsedate_tz
from typing import Any, Final, Literal, cast, get_args

Cause = Literal["timeout", "worker_lost", "sandbox_lost", "rate_limited", "refused", "bad_answer", "raised"]
CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)

_BUSY: Final = frozenset({408, 425, 429})
_TIMEOUTS: Final = frozenset({"TimeoutError", "CpuLimitError", "TimeoutException", "APITimeoutError", "Timeout"})
_LOST: Final = frozenset(
    {
        "ConnectionError", "ClientConnectionError", "ClientPayloadError", "NetworkError", "RemoteProtocolError",
        "APIConnectionError", "ChunkedEncodingError", "IncompleteRead",
    }
)  # fmt: skip

_OF_MACHINE: Final = frozenset({"SubprocessError"})


def cause_of(error: BaseException) -> Cause:
    """Classify an exception of a grader, so that a server's failure is not taken for a mistake in the function.

    HTTP clients are known by the names of their classes and by the status of the response: aiohttp, httpx, requests,
    urllib and openai.

    Args:
        error: raised by a grader.

    Returns:
        "rate_limited" for status 429, "timeout" for 408, 425 and timeouts, "refused" for other statuses below 500,
        "worker_lost" for the others and for lost connections; else "raised". An exception whose attribute `cause` has
        one of the names has that cause.
    """
    if (named := getattr(error, "cause", None)) in CAUSES:
        return named
    status = _status_of(error) if isinstance(error, Exception) else None
    if status is not None and status >= 400:
        if status in _BUSY:
            return "rate_limited" if status == 429 else "timeout"
        return "refused" if status < 500 else "worker_lost"
    names = {base.__name__ for base in type(error).__mro__}
    if names & _TIMEOUTS or isinstance(getattr(error, "reason", None), TimeoutError):  # the latter: urllib
        return "timeout"
    if names & _LOST or isinstance(getattr(error, "reason", None), ConnectionError):
        return "worker_lost"
    return "raised"


def is_of_machine(error: BaseException) -> bool:
    """Return whether an exception is the machine's or a server's, and so may be absent elsewhere or later.

    Such are missing files, programs, modules and environment variables, lost connections, and exceptions that follow
    from one of these.

    Args:
        error: raised by a grader.
    """
    seen, found = set[int](), error
    while id(found) not in seen:
        seen.add(id(found))
        names = {base.__name__ for base in type(found).__mro__}
        if isinstance(found, OSError | ImportError | MemoryError) or names & _OF_MACHINE or cause_of(found) != "raised":
            return True
        if isinstance(found, KeyError) and _raised_in(found) == "os":  # os.environ
            return True
        found = found.__cause__ or found.__context__ or found
    return False


def _raised_in(error: BaseException) -> str:
    """The name of the module that raised an exception."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return "" if frame is None else str(frame.tb_frame.f_globals.get("__name__", ""))


def retry_after_s(error: BaseException) -> float:
    """Return the seconds after which a server wants the next request, from the header Retry-After; 0 without one.

    The header is looked for where HTTP clients have it: in `headers` of the exception or of its response.

    Args:
        error: raised by a grader.
    """
    for holder in (error, getattr(error, "response", None)):
        headers: Any = getattr(holder, "headers", None)
        known = isinstance(headers, Mapping | Message)
        found = cast("Mapping[str, object]", headers).get("Retry-After") if known else None
        if isinstance(found, str):
            return seconds_of(found)
    return 0.0


def seconds_of(retry_after: str) -> float:
    """Return the seconds from now that a Retry-After header says, as a number or a date; 0 for anything else."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            date = parsedate_tz(retry_after)
            seconds = mktime_tz(date) - time.time() if date else 0.0
        except (ValueError, OverflowError):
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def late(timeout_s: float) -> str:
    """The error of a score whose call took longer than its timeout."""
    return f"timeout: no answer within {timeout_s:g} s (timeout_s)"


def _status_of(error: BaseException) -> int | None:
    """The HTTP status in an exception: of its response, or its own. None: it has none."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status", "status_code", "code"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and not isinstance(status, bool) and 100 <= status <= 599:
                return status
    return None
