"""A process that tells what it is, or ends as its arguments say: python -m tests.support.probe WHAT [ARGUMENT]."""

import ctypes
import gc
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.random

PR_GET_PDEATHSIG = 2
FROM_TEMPLATE = "runtime.node.supervisor.template_process"
OF_STATUS = ("Umask", "SigBlk", "SigIgn", "SigCgt", "NoNewPrivs", "Threads", "Name")


def preload(arguments: Sequence[str]) -> None:
    """Import as an actor would, or do what no template may do."""
    if arguments[0] == "thread":
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    if arguments[0] == "variable":
        os.environ["OF_AN_IMPORT"] = "1"
    if arguments[0] == "hang":
        time.sleep(600)
    if arguments[0] == "raise":
        raise ImportError("no module of that name")


def facts() -> dict[str, Any]:
    """What must be the same, however the process came about."""
    signal_of_parent = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(signal_of_parent), 0, 0, 0)
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    spec = sys.modules["__main__"].__spec__
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "flags": list(sys.flags),
        "path": sys.path,
        "main": [__name__, spec and spec.name],
        "environment": dict(os.environ),
        "shown_environment": Path("/proc/self/environ").read_bytes().decode(errors="replace"),
        "command_line": Path("/proc/self/cmdline").read_bytes().decode(errors="replace"),
        "program": str(Path("/proc/self/exe").readlink()),
        "descriptors": sorted(_descriptors()),
        "leads_session": os.getpid() == os.getsid(0) == os.getpgrp(),
        "parent": os.getppid(),
        "dies_with_parent": signal_of_parent.value == signal.SIGKILL,
        "status": {name: status[name].strip() for name in OF_STATUS},
        "handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
        "limits": Path("/proc/self/limits").read_text(),
        "core": resource.getrlimit(resource.RLIMIT_CORE),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "score": Path("/proc/self/oom_score_adj").read_text(),
        "folder": os.getcwd(),
        "mapped": [_is_mapped(size_bytes) for size_bytes in (64 << 20, 256 << 20)],
        "gc": [gc.isenabled(), gc.get_threshold()],
        "streams": [
            [stream.encoding, stream.errors, stream.isatty()] for stream in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "imported": [
            name for name in (__spec__.name if __spec__ else "", "tests.support.probe") if name in sys.modules
        ],
    }


class _MemoryInfo(ctypes.Structure):
    """The C library's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usm fsm used free kept".split()
    )


def _is_mapped(size_bytes: int) -> bool:
    """Whether the C library maps a block of this size, rather than taking it from its heap."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype, libc.malloc.restype = _MemoryInfo, ctypes.c_void_p
    before = libc.mallinfo2().hblks
    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size_bytes)))
    is_mapped = libc.mallinfo2().hblks > before
    libc.free(block)
    return is_mapped


def _descriptors() -> list[tuple[int, str, bool]]:
    found: list[tuple[int, str, bool]] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}").partition(":")[0]
            found.append((int(name), target, os.get_inheritable(int(name))))
        except OSError:  # that of the listing
            continue
    return found


def main(what: str, *arguments: str) -> int:
    """Do what the first argument says; return the exit code."""
    if what == "facts":
        told = {"forked": FROM_TEMPLATE in sys.modules, "drawn": [random.random(), float(numpy.random.rand())]}
        Path(arguments[0]).write_text(json.dumps(told | {"facts": facts()}))
    if what == "exit":
        return int(arguments[0])
    sys.stdout.write(f"up forked={FROM_TEMPLATE in sys.modules}\n")
    sys.stdout.flush()
    time.sleep(60)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
