"""Supervisor of a process that runs users' code: enforces its limits, ends as it does, and kills all its descendants.

It forks a process of a user's function, or runs the program of an agent.

Run as `python -m runtime.functions.keeper PARENT_PID SETTINGS`. Standard library only: its child imports the rest.
"""

import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from runtime.functions import isolation
from runtime.functions.door import Door
from runtime.util.descendants import (
    descendants,
    end_like,
    kill_descendants,
    reap,
    set_parent_death_signal,
    set_subreaper,
)
from runtime.util.exit_codes import EXIT_INPUT_ERROR, EXIT_OK, EXIT_ORPHANED, EXIT_TOO_MANY_PROCESSES

POLL_S: Final = 0.1  # interval between counts of processes
MIN_HEADROOM: Final = 1024  # processes and threads left for the user outside graders
MAX_FILE_BYTES: Final = 1 << 30  # largest file that a grader may write
WATCHED: Final = {signal.SIGCHLD, signal.SIGTERM}


def main(arguments: Sequence[str]) -> int:
    """Run a grader process until it ends, the parent ends or SIGTERM arrives; then end with the grader's status."""
    parent, settings = int(arguments[0]), json.loads(arguments[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to handle
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    set_subreaper()
    _raise_priority()
    folder = tempfile.mkdtemp(prefix=str(settings["prefix"]))
    worker, status, most = 0, None, settings["max_processes"]
    try:
        door = Door(*settings["door"]) if settings.get("door") else None
        if door is not None:
            door.start_outside()
            most = most and most + 1  # this one is none of the program's
        worker = _start(settings, folder, door)
        set_parent_death_signal(signal.SIGTERM)
        if os.getppid() != parent:
            return EXIT_ORPHANED
        status = _watch(worker, most)
    finally:
        if worker:
            with suppress(OSError):
                os.killpg(worker, signal.SIGKILL)  # all at once, before the rest
        kill_descendants()
        shutil.rmtree(folder, ignore_errors=True)
    if status is None:
        return EXIT_OK  # stopped on request
    return _end(_status_in(status) if settings["sandbox"] == "isolated" else status)


def _raise_priority() -> None:
    """Raise this process's priority, if permitted, so that it runs even among a thousand grader processes.

    Children keep the normal priority.
    """
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def _start(settings: dict[str, Any], folder: str, door: Door | None) -> int:
    """Fork the grader process, or, when isolated, the init process of its PID namespace. Return its pid."""
    keeper = os.getpid()
    isolated = settings["sandbox"] == "isolated"
    refusal = isolation.attempted(isolation.enter_user_and_pid_namespaces) if isolated else None
    child = os.fork()
    if child == 0:
        code = 1
        try:
            set_parent_death_signal(signal.SIGKILL)
            os.setpgid(0, 0)  # so that one signal kills the whole group
            if isolated or os.getppid() == keeper:  # getppid() is 0 across PID namespaces
                code = _in_child(settings, folder, door, isolated=isolated, refusal=refusal)
        except BaseException:  # noqa: BLE001 - a forked child must never return into its parent's code
            traceback.print_exc()
        os._exit(code)
    with suppress(OSError):  # parent and child both call it: the order is undefined
        os.setpgid(child, child)
    if door is not None:
        door.close()
    os.close(0)
    os.close(1)
    return child


def _in_child(settings: dict[str, Any], folder: str, door: Door | None, *, isolated: bool, refusal: str | None) -> int:
    with suppress(OSError):  # /proc may be read-only; makes the OOM killer choose this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    if isolated:
        refusal = refusal or isolation.attempted(
            lambda: isolation.enter_other_namespaces(folder, settings["hidden"], isolates=True)
        )
        if refusal is None and door is not None:
            refusal = isolation.attempted(door.open_inside)
        if refusal is None and (status := _run_as_init()) is not None:
            return _exit_code_of(status)
    if settings["sandbox"] != "none":
        isolation.set_no_new_privileges()
        _limit(settings, isolated=isolated)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    if settings.get("program"):
        return _run_program(settings, folder, refusal)
    os.environ.update(TMPDIR=folder)
    tempfile.tempdir = None  # makes tempfile read TMPDIR again
    from runtime.functions.worker import work  # after the fork, so that the keeper stays small

    return work(refusal and f"{settings['refused']}: {refusal}", settings["words"])


def _run_program(settings: dict[str, Any], folder: str, refusal: str | None) -> int:
    """Run the program of an agent in a copy of its directory.

    The first line that is read here is in a file of its own; what follows is what the program reads itself.
    """
    if refusal is not None:
        sys.stderr.write(f"this machine cannot isolate a program: {refusal}\n")
        sys.stderr.flush()  # before os._exit
        return EXIT_INPUT_ERROR
    place, given, own, temporary = (Path(folder, name) for name in ("work", "row.json", "home", "tmp"))
    given.touch(mode=0o600)
    line, _, rest = sys.stdin.buffer.read().partition(b"\n")
    given.write_bytes(line)
    reading, writing = os.pipe()
    os.write(writing, rest)  # a key, which fits into the pipe
    os.close(writing)
    os.dup2(reading, 0)
    temporary.mkdir(mode=0o700)
    if settings["directory"] is None:
        place.mkdir(mode=0o700)
    else:
        shutil.copytree(settings["directory"], place, symlinks=True)
    os.environ.update({"TMPDIR": str(temporary), settings["given"]: str(given)})
    if settings["sandbox"] == "isolated":  # where nothing else can be written
        own.mkdir(mode=0o700)
        os.environ.update(HOME=str(own))
    os.environ.pop("PYTHONPATH", None)  # it was for this module
    os.chdir(place)
    os.execvp(settings["program"][0], settings["program"])


def _run_as_init() -> int | None:
    """Fork once more and act as init: return None in the child, and the child's wait status in the init process."""
    child = os.fork()
    if child == 0:
        set_parent_death_signal(signal.SIGKILL)
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
    from runtime.functions.limits import UserLimits, limit  # after the fork

    most = settings["max_processes"]
    # the kernel counts per user namespace, or else all processes of this user: an upper bound
    num_tasks = most + 4 if isolated else _num_tasks_of_user() + max(MIN_HEADROOM, 4 * most)
    limits = UserLimits(memory_bytes=settings["memory_bytes"], max_files=settings["max_files"])
    limit(limits, {resource.RLIMIT_FSIZE: MAX_FILE_BYTES, resource.RLIMIT_NPROC: num_tasks})


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
        status = reap(worker)
        if status is not None:
            return status
        if max_processes is not None and len(descendants(max_processes + 2)) > max_processes + 1:
            return EXIT_TOO_MANY_PROCESSES << 8


def _end(status: int) -> int:
    """Pass on the worker's end: return its exit code, or end this process by the same signal."""
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else end_like(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
