"""What this machine lets a run have: open files and memory."""

import resource
from pathlib import Path
from typing import Final

from runtime.agent.preflight.findings import Findings
from runtime.settings.placement import num_ranks
from runtime.settings.reading.config import Problem
from runtime.settings.topology import Topology

FILES: Final = 128  # that one process of a run may have open, besides those below
FILES_OF_RANK: Final = 8
FILES_OF_SLOT: Final = 1  # a connection for each sample in flight
CGROUP: Final = Path("/sys/fs/cgroup")
CACHED: Final = ("active_file", "inactive_file")  # of files that were read, which the kernel gives back when asked
ROOM: Final = 4  # times the open files that are needed, where the limit can be raised


def needed_files(topology: Topology) -> int:
    """Files that the busiest process of a run has open at least."""
    slots = sum(engine.concurrency for engine in topology.engines.values())
    return FILES + FILES_OF_RANK * num_ranks(topology.trainer) + FILES_OF_SLOT * slots


def check_open_files(findings: Findings) -> None:
    """Whether the limit on open files leaves room for pipes and connections."""
    needed, (_, hard) = needed_files(findings.topology), resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        message = (
            f"a process may have {hard} files open here (ulimit -n), and this run needs {needed}: raise that limit"
        )
        findings.add(Problem(key="", message=message))


def raise_open_files(topology: Topology) -> None:
    """Raise the soft limit on open files as far as this run may need, for all its processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ROOM * needed_files(topology)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def free_memory_bytes(cgroup: Path = CGROUP) -> int:
    """Memory that this machine, or our share of it, has left.

    Args:
        cgroup: the directory that tells of our share.
    """
    info = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(info["MemAvailable"].split()[0]) * 1024
    try:
        most, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        uses = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        cached = sum(int(uses[name]) for name in CACHED)
    except (OSError, ValueError, KeyError):  # no limit, or another kind of cgroup
        return free
    return min(free, most - used + cached)
