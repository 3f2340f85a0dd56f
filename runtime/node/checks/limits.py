"""Limits of this machine: open files and memory."""

import resource
from pathlib import Path
from typing import Final

from runtime.node.checks.findings import Findings
from runtime.settings.placement import num_ranks
from runtime.settings.reading.config import Problem
from runtime.settings.topology import Topology

FILES: Final = 128  # open files of one process, besides those below
FILES_OF_RANK: Final = 8
FILES_OF_SLOT: Final = 1  # a connection per sample in flight
CGROUP: Final = Path("/sys/fs/cgroup")
CACHED: Final = ("active_file", "inactive_file")  # page cache, which the kernel frees on demand
ROOM: Final = 4  # times the needed open files, if the limit can be raised


def needed_files(topology: Topology) -> int:
    """Return the least number of open files that the busiest process needs."""
    slots = sum(engine.concurrency for engine in topology.engines.values())
    return FILES + FILES_OF_RANK * num_ranks(topology.trainer) + FILES_OF_SLOT * slots


def check_open_files(findings: Findings) -> None:
    """Check that the open file limit allows the needed pipes and connections."""
    needed, (_, hard) = needed_files(findings.topology), resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        message = (
            f"a process may have {hard} files open here (ulimit -n), and this run needs {needed}: raise that limit"
        )
        findings.add(Problem(key="", message=message))


def raise_open_files(topology: Topology) -> None:
    """Raise the soft limit on open files to the need of this run, for all its processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ROOM * needed_files(topology)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def free_memory_bytes(cgroup: Path = CGROUP) -> int:
    """Return the free memory of this machine, or of our cgroup, in bytes.

    Args:
        cgroup: directory of our cgroup.
    """
    info = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(info["MemAvailable"].split()[0]) * 1024
    try:
        most, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        uses = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        cached = sum(int(uses[name]) for name in CACHED)
    except (OSError, ValueError, KeyError):  # no limit, or not cgroup v2
        return free
    return min(free, most - used + cached)
