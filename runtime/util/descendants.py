"""Descendants of a process: adopts orphans and kills the rest, so that no daemonized child stays behind.

Standard library only: the keepers of graders stay small.
"""

import ctypes
import os
import resource
import signal
import time
from contextlib import suppress
from typing import Final, NoReturn

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
KILL_POLL_S: Final = 0.01
KILL_S: Final = 1.0  # time limit for killing the descendants of a process
STOPS: Final = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGINT})

_libc = ctypes.CDLL(None, use_errno=True)


def set_parent_death_signal(number: int) -> None:
    """Have the kernel send this signal when the thread that forked this process ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def set_subreaper(*, is_one: bool = True) -> None:
    """Become the parent of orphaned descendants, or with `is_one` false of no further ones."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(is_one))


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "prctl")


def continue_in_kept_child(*, forwards: bool) -> None:
    """Fork, and return in the child alone. This process kills all that the child leaves, and ends as the child did.

    The child dies with this process, which must have no other children.

    Args:
        forwards: whether SIGTERM, SIGHUP and SIGINT go to the child. Otherwise the first two kill it, and SIGINT does
            nothing.
    """
    _keep_child(forwards=forwards, dies_by=signal.SIGKILL, outlives=False)


def continue_in_watched_child() -> None:
    """As `continue_in_kept_child` with signals that go on, also if this process is killed, or its process group.

    A keeper in a process group of its own stands between this process and the child: each of them kills all
    descendants when the other is gone.
    """
    _keep_child(forwards=True, dies_by=signal.SIGTERM, outlives=False)
    _keep_child(forwards=True, dies_by=signal.SIGKILL, outlives=True)


def _keep_child(*, forwards: bool, dies_by: signal.Signals, outlives: bool) -> None:
    """Fork, and return in the child alone.

    Args:
        dies_by: signal that the child gets when this process ends.
        outlives: whether this process stays to kill the child and all that it leaves, if its own parent ends.
    """
    keeper, watched, parent = os.getpid(), {signal.SIGCHLD, *STOPS}, os.getppid() if outlives else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    set_subreaper()
    child = os.fork()
    if child == 0:
        set_parent_death_signal(dies_by)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if os.getppid() != keeper:
            os._exit(1)
        return
    status: int | None = 1 << 8
    try:
        if outlives:
            os.setpgid(0, 0)  # a signal for the group of the command does not end this process
        status = _ended(child, watched, forwards=forwards, parent=parent)
    finally:
        kill_descendants()
        end_like(128 + signal.SIGTERM << 8 if status is None else status)


def _ended(child: int, watched: set[signal.Signals], *, forwards: bool, parent: int | None) -> int | None:
    """Wait for the child, and return its wait status; None if it is to be killed."""
    while (status := reap(child)) is None:
        received = signal.sigwaitinfo(watched)
        number = received.si_signo
        if (not forwards and number in (signal.SIGTERM, signal.SIGHUP)) or parent not in (None, os.getppid()):
            return None
        is_for_both = number != signal.SIGTERM and received.si_code > 0  # a terminal signals the whole group
        if forwards and number in STOPS and not is_for_both:
            with suppress(ProcessLookupError):
                os.kill(child, number)
    return status


def end_like(status: int) -> NoReturn:
    """End as another process did: with its exit code, or by the same signal."""
    if not os.WIFEXITED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core dump is enough
        number = os.WTERMSIG(status)
        with suppress(OSError):  # SIGKILL and SIGSTOP have no handler to set
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        os._exit(128 + number)
    os._exit(os.WEXITSTATUS(status))


def reap(wanted: int) -> int | None:
    """Reap ended children, including adopted orphans; return the wait status of one of them if it ended."""
    found = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return found
            if pid == wanted:
                found = status
    return found


def kill_descendants() -> None:
    """Kill all descendants, those too that left their process group or session. SIGCHLD must be blocked."""
    deadline = time.monotonic() + KILL_S
    while time.monotonic() < deadline and (alive := descendants()):
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none can fork
            for pid in alive:
                with suppress(OSError):
                    os.kill(pid, number)
        reap(-1)
        signal.sigtimedwait({signal.SIGCHLD}, KILL_POLL_S)
    reap(-1)


def descendants(at_most: int | None = None) -> list[int]:
    """Descendants of this process; the search stops once it has found `at_most`."""
    found, waiting = list[int](), [os.getpid()]
    while waiting and (at_most is None or len(found) < at_most):
        children = children_of(waiting.pop())
        found += children
        waiting += children
    return found


def children_of(pid: int) -> list[int]:
    """Children of a process, including adopted orphans."""
    children = list[int]()
    with suppress(OSError):  # the process has ended
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                children += map(int, file.read().split())
    return children
