"""The guardian: a small process that outlives the node daemon briefly and kills the processes that it left.

Direct children die with the daemon (PR_SET_PDEATHSIG); their own children do not. The guardian holds the read end of a
pipe, which ends when the daemon does, for whatever reason. Then the guardian kills every process that has the daemon's
mark in its environment or belongs to one of its sessions. It uses only the standard library and is run by path,
isolated, to stay small.
"""

import os
import signal
import sys
import time
from collections.abc import Container
from pathlib import Path

MARK_VARIABLE = "PHYSARUM_AGENT"  # "<token>/<node>@<run directory>", set for every supervised process
SWEEPS = 200  # at most 2 s: a process may fork during a sweep
SWEEP_INTERVAL_S = 0.01


def mark_of(token: str, node: str, run_dir: Path) -> str:
    """Return the mark of one daemon's processes. A token is used by one daemon only; "" stands for any daemon."""
    return f"{token}/{node}@{run_dir.resolve()}"


def find(mark: str, sessions: Container[int] = ()) -> list[int]:
    """Return the ids of processes with the mark or in a session.

    "/<node>@<run directory>" matches any daemon of that node, and "@<run directory>" any daemon of that run.
    The environment alone is not enough: a process may overwrite it (setproctitle does).
    """
    own = os.getpid()
    entries = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in entries if pid != own and (_carries(pid, mark) or _is_in(pid, sessions))]


def kill(mark: str, sessions: Container[int] = ()) -> int:
    """Kill all processes that `find` returns, until it returns none; return the number of killed processes."""
    killed: set[int] = set()
    for _ in range(SWEEPS):
        found = find(mark, sessions)
        if not found:
            break
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
            killed.add(pid)
        time.sleep(SWEEP_INTERVAL_S)  # the kernel needs a moment; processes of others cannot be waited for
    return len(killed)


def kill_session(session: int) -> int:
    """Kill the remaining processes of one session."""
    return kill("", {session})


def _carries(pid: int, mark: str) -> bool:
    if not mark:
        return False
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it ended, is a zombie, or belongs to another user
        return False
    name = f"{MARK_VARIABLE}=".encode()
    for item in environment.split(b"\0"):
        if item.startswith(name):
            value = os.fsdecode(item[len(name) :])
            return value.endswith(mark) if mark.startswith(("/", "@")) else value == mark
    return False


def _is_in(pid: int, sessions: Container[int]) -> bool:
    """Whether a live process belongs to one of the sessions."""
    try:
        if os.getsid(pid) not in sessions:  # one system call for each of the many that do not
            return False
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"  # the process name may contain spaces


def main(argv: list[str]) -> int:
    """Read the daemon's sessions from standard input ("+id", "-id" lines) until it ends, then kill what remains."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        session = int(line[1:])
        if line.startswith("+"):
            sessions.add(session)
        else:
            sessions.discard(session)
    kill(argv[1], sessions)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
