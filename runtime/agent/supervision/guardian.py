"""Leaves no process behind: a small process that outlives the node agent by a moment and kills what it left.

Direct children die with the agent (PR_SET_PDEATHSIG); what they started themselves does not. The guardian holds the
read end of a pipe. When the agent is gone, however it went, the pipe ends, and every process that carries the
agent's mark in its environment or belongs to one of its sessions is killed. Standard library only: it is run by path,
isolated, to stay small.
"""

import os
import signal
import sys
import time
from collections.abc import Container
from pathlib import Path

MARK_VARIABLE = "PHYSARUM_AGENT"  # "<token>@<run directory>" in the environment of every supervised process
SWEEPS = 200  # at most 2 s of killing: a process may fork while it is looked for
SWEEP_INTERVAL_S = 0.01


def mark_of(token: str, run_dir: Path) -> str:
    """The value that the processes of one agent carry; a token is used by one agent only."""
    return f"{token}@{run_dir.resolve()}"


def find(mark: str, sessions: Container[int] = ()) -> list[int]:
    """Process ids that carry the mark or are in a session; "@<run directory>" is the mark of any agent of that run.

    The environment alone is not enough: a process may overwrite it (setproctitle does).
    """
    own = os.getpid()
    entries = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in entries if pid != own and (_carries(pid, mark) or _session(pid) in sessions)]


def kill(mark: str, sessions: Container[int] = ()) -> int:
    """Kill all that `find` finds, until it finds nothing more; return how many were killed."""
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
        time.sleep(SWEEP_INTERVAL_S)  # the kernel needs a moment; there is nothing to wait on for foreign processes
    return len(killed)


def kill_session(session: int) -> int:
    """Kill what is left of one session."""
    return kill("", {session})


def _carries(pid: int, mark: str) -> bool:
    if not mark:
        return False
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone meanwhile, a zombie, or somebody else's
        return False
    name = f"{MARK_VARIABLE}=".encode()
    for item in environment.split(b"\0"):
        if item.startswith(name):
            value = os.fsdecode(item[len(name) :])
            return value.endswith(mark) if mark.startswith("@") else value == mark
    return False


def _session(pid: int) -> int:
    """Session of a live process; -1 for a dead one."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return -1
    state, _parent, _group, session = stat.rpartition(")")[2].split()[:4]  # the name before may hold spaces
    return -1 if state in "ZX" else int(session)


def main(argv: list[str]) -> int:
    """Follow the agent's sessions on standard input ("+id", "-id" lines) to its end, then kill what is left."""
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
