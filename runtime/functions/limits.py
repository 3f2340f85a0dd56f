"""Environment and limits of a process that runs users' code."""

import math
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, ClassVar, Final

import msgspec

from runtime.util.import_path import ROOT

PASSED_ON: Final = (  # environment variables that users' functions get
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    *("PYTHONHASHSEED", "PYTHONUNBUFFERED", "SSL_CERT_FILE", "SSL_CERT_DIR", "NLTK_DATA"),
)
AGENT_MARK: Final = "PHYSARUM_AGENT"  # lets a node daemon find leftover processes of its run; no secret


class CpuLimitError(Exception):
    """A call exceeded its CPU time."""


class UserLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a user's process."""

    is_kept: ClassVar[bool] = False  # whether a keeper starts it; runtime/functions/sandbox.py

    memory_bytes: int = 8 << 30  # of data, per process
    max_files: int = 1024  # open at a time
    env: tuple[str, ...] = ()  # further environment variables that it gets

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the process, filtered from those of this process."""
        return environment(self.env)

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command line of the process.

        Args:
            words: `answering` of the function's kind, and its first arguments: the setting's key and the function's
                name.
        """
        limits = msgspec.json.encode(self).decode()
        return [sys.executable, "-P", "-m", "runtime.functions.worker", *words, limits]


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


def keeper_command(settings: Mapping[str, Any]) -> list[str]:
    """Return the command line of a keeper with these settings; its parent must be this process."""
    return [
        *(sys.executable, "-P", "-m", "runtime.functions.keeper", str(os.getpid())),
        msgspec.json.encode(settings).decode(),
    ]


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


class CpuLimit:
    """Limits the CPU time of each call. One that exceeds it gets a CpuLimitError with the setting's key."""

    def __init__(self, cpu_s: float, key: str) -> None:
        self._cpu_s, self._key = cpu_s, key
        signal.signal(signal.SIGXCPU, self._end_call)

    def begin(self) -> None:
        """Limit the next call. The kernel's limit is a total per process, in whole seconds."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(usage.ru_utime + usage.ru_stime + self._cpu_s), hard))

    def _end_call(self, _signal: int, _frame: FrameType | None) -> None:
        raise CpuLimitError(self._key)
