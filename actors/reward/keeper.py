"""Supervisor of a grader process: enforces its limits, ends when it ends, and kills all descendants of the grader.

Run as `python -m actors.reward.keeper PARENT_PID SETTINGS`. Standard library only: its child imports the rest.
"""

import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from actors.reward import isolation
from runtime.util.exit_codes import EXIT_OK, EXIT_ORPHANED, EXIT_TOO_MANY_PROCESSES

POLL_S: Final = 0.1  # interval between counts of processes
MIN_HEADROOM: Final = 1024  # processes and threads left for the user outside graders
KILL_POLL_S: Final = 0.01
KILL_S: Final = 1.0  # time limit for killing a grader's descendants
MAX_FILE_BYTES: Final = 1 << 30  # largest file that a grader may write
WATCHED: Final = {signal.SIGCHLD, signal.SIGTERM}


def main(arguments: Sequence[str]) -> int:
    """Run a grader process until it ends, the parent ends or SIGTERM arrives; then end with the grader's status."""
    parent, settings = int(arguments[0]), json.loads(arguments[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to handle
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    isolation.set_subreaper()
    _raise_priority()
    folder = tempfile.mkdtemp(prefix="physarum-grader-")
    worker, status = 0, None
    try:
        worker = _start(settings, folder)
        isolation.set_parent_death_signal(signal.SIGTERM)
        if os.getppid() != parent:
            return EXIT_ORPHANED
        status = _watch(worker, settings["max_processes"])
    finally:
        _kill_descendants(worker)
        shutil.rmtree(folder, ignore_errors=True)
    if status is None:
        return EXIT_OK  # stopped on request
    return _end_like(_status_in(status) if settings["sandbox"] == "isolated" else status)


def _raise_priority() -> None:
    """Raise this process's priority, if permitted, so that it runs even among a thousand grader processes.

    Children keep the normal priority.
    """
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def _start(settings: dict[str, Any], folder: str) -> int:
    """Fork the grader process, or, when isolated, the init process of its PID namespace. Return its pid."""
    keeper = os.getpid()
    isolated = settings["sandbox"] == "isolated"
    refusal = isolation.attempted(isolation.enter_user_and_pid_namespaces) if isolated else None
    child = os.fork()
    if child == 0:
        code = 1
        try:
            isolation.set_parent_death_signal(signal.SIGKILL)
            os.setpgid(0, 0)  # so that one signal kills the whole group
            if isolated or os.getppid() == keeper:  # getppid() is 0 across PID namespaces
                code = _in_child(settings, folder, isolated=isolated, refusal=refusal)
        except BaseException:  # noqa: BLE001 - a forked child must never return into its parent's code
            traceback.print_exc()
        os._exit(code)
    with suppress(OSError):  # parent and child both call it: the order is undefined
        os.setpgid(child, child)
    os.close(0)
    os.close(1)
    return child


def _in_child(settings: dict[str, Any], folder: str, *, isolated: bool, refusal: str | None) -> int:
    with suppress(OSError):  # /proc may be read-only; makes the OOM killer choose this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    if isolated:
        refusal = refusal or isolation.attempted(
            lambda: isolation.enter_other_namespaces(folder, settings["hidden"], isolates=True)
        )
        if refusal is None and (status := _run_as_init()) is not None:
            return _exit_code_of(status)
    if settings["sandbox"] != "none":
        isolation.set_no_new_privileges()
        _limit(settings, isolated=isolated)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    os.environ.update(TMPDIR=folder)
    tempfile.tempdir = None  # makes tempfile read TMPDIR again
    from actors.reward.worker import work  # after the fork, so that the keeper stays small

    return work(refusal)


def _run_as_init() -> int | None:
    """Fork once more and act as init: return None in the child, and the child's wait status in the init process."""
    child = os.fork()
    if child == 0:
        isolation.set_parent_death_signal(signal.SIGKILL)
        return None
    os.close(0)
    os.close(1)
    while True:
        pid, status = os.wait()
        if pid == child:
            return status


def _exit_code_of(status: int) -> int:
    """Exit code for a wait status. An init process cannot die of its own signal, so use the shells' 128 + signal."""
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _status_in(status: int) -> int:
    """Wait status encoded in the exit code of a namespace's init process."""
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
    return code - 128 if code > 128 else status


def _limit(settings: dict[str, Any], *, isolated: bool) -> None:
    """Set resource limits, so that excess use raises MemoryError or OSError in the grader."""
    most = settings["max_processes"]
    limits = {
        resource.RLIMIT_DATA: settings["memory_bytes"],
        resource.RLIMIT_NOFILE: settings["max_files"],
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_CORE: 0,
        # the kernel counts per user namespace, or else all processes of this user: an upper bound
        resource.RLIMIT_NPROC: most + 4 if isolated else _num_tasks_of_user() + max(MIN_HEADROOM, 4 * most),
    }
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _num_tasks_of_user() -> int:
    """Number of this user's tasks; the kernel counts threads as processes."""
    uid, total = os.getuid(), 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == uid:
                total += os.stat(f"/proc/{name}/task").st_nlink - 2
    return total


def _watch(worker: int, max_processes: int | None) -> int | None:
    """Wait for the worker to end and return its wait status; None on SIGTERM."""
    while True:
        received = signal.sigwaitinfo(WATCHED) if max_processes is None else signal.sigtimedwait(WATCHED, POLL_S)
        if received is not None and received.si_signo == signal.SIGTERM:
            return None
        status = _reap(worker)
        if status is not None:
            return status
        if max_processes is not None and len(_descendants(max_processes + 2)) > max_processes + 1:
            return EXIT_TOO_MANY_PROCESSES << 8


def _reap(worker: int) -> int | None:
    """Reap ended children, including orphans of graders; return the worker's wait status if it ended."""
    found = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return found
            if pid == worker:
                found = status
    return found


def _kill_descendants(worker: int) -> None:
    """Kill all descendants: first the worker's process group, then processes that left it."""
    deadline = time.monotonic() + KILL_S
    if worker:
        with suppress(OSError):
            os.killpg(worker, signal.SIGKILL)
    while time.monotonic() < deadline and (alive := _descendants()):
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none can fork
            for pid in alive:
                with suppress(OSError):
                    os.kill(pid, number)
        _reap(-1)
        signal.sigtimedwait({signal.SIGCHLD}, KILL_POLL_S)
    _reap(-1)


def _descendants(at_most: int | None = None) -> list[int]:
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


def _end_like(status: int) -> int:
    """Pass on the worker's end: return its exit code, or end this process by the same signal."""
    if os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core dump is enough
    number = os.WTERMSIG(status)
    with suppress(OSError):  # SIGKILL and SIGSTOP have no handler to set
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return 128 + number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
