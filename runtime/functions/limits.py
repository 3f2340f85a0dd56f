"""Environment and limits of a process that runs users' code."""

import os
import resource
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from runtime.util.import_path import ROOT

PASSED_ON: Final = (  # environment variables that users' functions get
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    *("PYTHONHASHSEED", "PYTHONUNBUFFERED", "SSL_CERT_FILE", "SSL_CERT_DIR", "NLTK_DATA"),
)
AGENT_MARK: Final = "PHYSARUM_AGENT"  # lets a node daemon find leftover processes of its run; no secret


class UserLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a user's process."""

    memory_bytes: int = 8 << 30  # of data, per process
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


def limit(limits: UserLimits, further: Mapping[int, int] | None = None) -> None:
    """Limit this process's data and open files, so that excess use raises MemoryError or OSError, and dump no core.

    Args:
        limits: the limits.
        further: further limits, by the number of their resource.
    """
    bounds = {resource.RLIMIT_DATA: limits.memory_bytes, resource.RLIMIT_NOFILE: limits.max_files}
    for kind, wanted in {**bounds, resource.RLIMIT_CORE: 0, **(further or {})}.items():
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
