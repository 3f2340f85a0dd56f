"""Environment, limits, calls, output and end of a process that runs a user's filter, selection or data source."""

import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import BinaryIO, Final, NoReturn

import msgspec

from runtime.util.exit_codes import EXIT_OK
from runtime.util.formatting import signal_name
from runtime.util.import_path import ROOT

PASSED_ON: Final = (  # environment variables that users' functions get
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    *("PYTHONHASHSEED", "PYTHONUNBUFFERED", "SSL_CERT_FILE", "SSL_CERT_DIR", "NLTK_DATA"),
)
AGENT_MARK: Final = "PHYSARUM_AGENT"  # lets a node daemon find leftover processes of its run; no secret
PRINTED_BYTES: Final = 64 << 10  # of a call's output that is logged, so that it cannot fill a disk
LENGTH_BYTES: Final = 4  # in front of a call or an answer
LEFT_OUT: Final = b"\n(further output of this call is left out)\n"


class UserLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a user's process."""

    memory_bytes: int = 8 << 30  # of its data
    max_files: int = 1024  # open at a time
    env: tuple[str, ...] = ()  # further environment variables that it gets


def environment(names: Sequence[str], *, marked: bool = True) -> dict[str, str]:
    """Environment variables of a process that runs a user's function. It has one thread: several run beside each other.

    Args:
        names: further variables of this process that it gets.
        marked: whether it gets AGENT_MARK.
    """
    wanted = {*PASSED_ON, *names, *((AGENT_MARK,) if marked else ())}
    kept = {name: value for name, value in os.environ.items() if name in wanted or name.startswith("LC_")}
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONPATH": os.pathsep.join(places)}


def forward(data: bytes, printed: int) -> int:
    """Write a function's output to stderr, up to PRINTED_BYTES of each call. Blocks.

    Args:
        data: the output.
        printed: bytes of this call's output before.

    Returns:
        Bytes of this call's output so far.
    """
    kept = data[: max(0, PRINTED_BYTES - printed)]
    total = printed + len(data)
    if printed <= PRINTED_BYTES < total:
        kept += LEFT_OUT
    sys.stderr.flush()
    while kept:
        kept = kept[os.write(2, kept) :]
    return total


def take_pipes() -> tuple[int, int]:
    """Move stdin and stdout to other descriptors, and the output of the user's code to stderr."""
    fd_in, fd_out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return fd_in, fd_out


def read_call(calls: BinaryIO) -> bytes | None:
    """Read the next call, behind its length; None once the parent's end of the pipe is closed."""
    length = calls.read(LENGTH_BYTES)
    call = calls.read(int.from_bytes(length, "big"))
    return call if len(length) == LENGTH_BYTES and len(call) == int.from_bytes(length, "big") else None


def how_ended(code: int | None) -> str:
    """Say how a process ended.

    Args:
        code: its exit code, or the negative number of the signal that killed it; None: it runs.
    """
    if code is None:
        return "its process closed its output"
    if code < 0:
        return f"its process was killed by {signal_name(-code)}"
    return "its process ended" if code == EXIT_OK else f"its process exited with code {code}"


def end_with_parent(fd_in: int) -> None:
    """Kill this process and those that it started once the parent's end of a pipe is closed.

    Args:
        fd_in: the pipe that the parent writes to. The process must lead its own process group.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(fd_in, 0)  # only POLLHUP and POLLERR
        poll.poll()
        end_group()

    threading.Thread(target=watch, daemon=True).start()


def end_group() -> NoReturn:
    """Kill this process and those that it started."""
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("this process is dead")


def limit(limits: UserLimits) -> None:
    """Limit this process's data and open files, and let it write no core dump."""
    bounds = {resource.RLIMIT_DATA: limits.memory_bytes, resource.RLIMIT_NOFILE: limits.max_files}
    for kind, wanted in {**bounds, resource.RLIMIT_CORE: 0}.items():
        _, hard = resource.getrlimit(kind)
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
