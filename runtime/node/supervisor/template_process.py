"""The template process: imports what a node's processes need, once, and forks them. Started by template.py.

It has one thread, no port, no device and no secret: a forked process gets its environment from the node daemon itself.
It loads nothing but the standard library, and of this project what needs nothing else: the processes load more anyway.
"""

import ctypes
import fcntl
import gc
import importlib
import importlib.util
import json
import mmap
import os
import runpy
import select
import signal
import socket
import sys
from typing import Any, Final, NamedTuple

from runtime.util.descendants import set_parent_death_signal
from runtime.util.proc import stat_of

MALLOPT: Final = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_ARENA_MAX": -8}  # malloc.h
PR_SET_MM: Final = 35
PR_SET_MM_MAP: Final = 14
MAX_DESCRIPTORS: Final = 16  # of one message
MAX_PRELOAD_BYTES: Final = 1 << 16
READY: Final = b"ready"
FORKABLE: Final = "may_be_forked"  # what a sitecustomize.py sets to True if it needs to run once only

_libc = ctypes.CDLL(None, use_errno=True)
_search_path = list(sys.path)
_memory_of_arguments: list[Any] = []  # the kernel reads it for as long as the process lives


class Unfit(Exception):
    """This process cannot be a template; the text says why."""


class _MemoryMap(ctypes.Structure):
    """The kernel's struct prctl_mm_map."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


class _Request(NamedTuple):
    command: list[str]
    environment: dict[str, str]
    kept: list[int]  # the numbers of the inherited descriptors
    descriptors: list[int]  # the output, then those


def main(control: int) -> None:
    """Serve the node daemon until it closes the socket; in a forked process, run its command.

    Args:
        control: file descriptor of the socket.
    """
    command = _serve(socket.socket(fileno=control), os.getppid())
    if command is not None:
        sys.argv[:] = ["-m", *command[4:]]
        runpy._run_module_as_main(command[3])  # type: ignore[attr-defined]


def _serve(control: socket.socket, daemon: int) -> list[str] | None:
    """Answer requests; return None at the end, and in a forked process its command."""
    environment = dict(os.environ)
    gc.disable()  # a collection would write to the pages that the forked processes share
    if customized := _customized():
        control.send(f"{customized} runs code of its own in each process, and does not set {FORKABLE} = True".encode())
        return None
    try:
        _show_as([], environment, try_only=True)
    except OSError as error:
        control.send(f"the kernel does not let a process set its command line: {error}".encode())
        return None
    control.send(READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_PRELOAD_BYTES, MAX_DESCRIPTORS)
        if descriptors:
            command = _forked(control, daemon, socket.socket(fileno=descriptors[0]))
            if command is not None:
                return command
        elif message:
            control.send(_preloaded(json.loads(message), environment))
        else:
            return None


def _customized() -> str:
    """The file that Python runs at each start, where it is not of the distribution: it may look at the process.

    It can say that it does not: may_be_forked = True.
    """
    for module in map(sys.modules.get, ("sitecustomize", "usercustomize")):
        file = module and module.__file__
        if file and os.path.dirname(file) != os.path.dirname(os.__file__) and not getattr(module, FORKABLE, False):
            return file
    return ""


def _preloaded(command: list[str], environment: dict[str, str]) -> bytes:
    """Import what a command needs; return READY, or why it cannot be forked."""
    name = _main_module(command[3])
    try:
        module = importlib.import_module(name)
        preload = getattr(module, "preload", None)
        if preload is not None:
            preload(command[4:])
        _raise_unfit(environment)
    except Exception as error:  # noqa: BLE001 - the process itself will report it
        return f"{type(error).__name__}: {error}".encode()
    finally:
        sys.modules.pop(name, None)  # it runs as __main__
        sys.path[:] = _search_path
    gc.freeze()
    return READY


def _main_module(name: str) -> str:
    spec = importlib.util.find_spec(name)
    return f"{name}.__main__" if spec is not None and spec.submodule_search_locations else name


def _raise_unfit(environment: dict[str, str]) -> None:
    """Raise Unfit after an import that did what a forked process does not inherit."""
    if len(os.listdir("/proc/self/task")) > 1:
        raise Unfit("an import started a thread")
    changed = {name for name, _ in os.environ.items() ^ environment.items()}
    if changed:
        raise Unfit(f"an import changed environment variables: {', '.join(sorted(changed))}")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise Unfit("an import used a GPU")


def _forked(control: socket.socket, daemon: int, gate: socket.socket) -> list[str] | None:
    """Fork a process whose parent is the node daemon. Return None in the template, and the command in the process.

    A process in between ends at once, so that the kernel gives its child to the daemon.
    """
    between = os.fork()
    if between:
        gate.close()
        os.waitpid(between, 0)
        return None
    own = os.pidfd_open(os.getpid())
    if os.fork():
        os._exit(0)
    try:
        control.close()
        _wait_for_parent(own, daemon)
        gate.send(str(os.getpid()).encode())
        request = _received(gate)
        if request is None:  # the daemon gave up
            os._exit(0)
        _become(request, gate)
    except BaseException as error:  # noqa: BLE001 - no exception may run the template's own code in this process
        try:
            gate.send(f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(1)
    return request.command


def _wait_for_parent(between: int, daemon: int) -> None:
    """Wait until the parent is the daemon, and be killed when that ends.

    Args:
        between: process descriptor of the present parent, which ends.
        daemon: process id.
    """
    select.select([between], [], [])
    os.close(between)
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != daemon:
        os._exit(1)


def _received(gate: socket.socket) -> _Request | None:
    """Receive the request: its length with the descriptors, then JSON."""
    head, received, _, _ = socket.recv_fds(gate, 8, MAX_DESCRIPTORS)
    content = bytearray()
    while head and len(content) < int.from_bytes(head):
        part = gate.recv(1 << 16)
        if not part:
            return None
        content += part
    if not head:
        return None
    return _Request(*json.loads(content), descriptors=list(received))


def _become(request: _Request, gate: socket.socket) -> None:
    """Make this process what a started command would be, and tell the daemon."""
    os.setsid()
    floor = max([2, *request.kept]) + 1
    telling = fcntl.fcntl(gate.fileno(), fcntl.F_DUPFD_CLOEXEC, floor)
    given = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, floor) for descriptor in request.descriptors]
    gate.close()
    for descriptor in request.descriptors:
        os.close(descriptor)
    for number, descriptor in zip((1, *request.kept), given, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.dup2(1, 2)
    _set_malloc(request.environment)
    os.environ.clear()
    os.environ.update(request.environment)
    _show_as(request.command, request.environment)
    sys.orig_argv[:] = request.command
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # Python's own generator has done it
    gc.enable()
    socket.socket(fileno=telling).send(READY)


def _set_malloc(environment: dict[str, str]) -> None:
    """Do what the C library does with these variables when a process starts."""
    for name, parameter in MALLOPT.items():
        value = environment.get(name)
        if value != os.environ.get(name) and not _libc.mallopt(parameter, int(value or "")):
            raise Unfit(f"the C library takes no {name}={value}")


def _show_as(command: list[str], environment: dict[str, str], *, try_only: bool = False) -> None:
    """Let /proc show a command line and an environment as those of this process, as after a start.

    Args:
        command: the command line.
        environment: all environment variables.
        try_only: change nothing, to find out whether the kernel allows it.

    Raises:
        OSError: it does not.
    """
    fields = [0, *map(int, stat_of("self")[1:])]  # 0 for the state, a letter
    _libc.sbrk.restype = ctypes.c_void_p
    layout = _MemoryMap(
        *fields[23:25],  # code
        *fields[42:44],  # data
        fields[44],
        _libc.sbrk(0),
        fields[25],  # stack
        *fields[45:49],  # arguments, environment
        0,  # keep the auxiliary vector
        0,
        0xFFFFFFFF,  # the program stays
    )
    if not try_only:
        arguments = b"".join(os.fsencode(word) + b"\0" for word in command)
        variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
        size = max(1, len(arguments) + len(variables))
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory[: len(arguments) + len(variables)] = arguments + variables
        place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        _memory_of_arguments.append(memory)
        layout.arg_start = place
        layout.arg_end = layout.env_start = place + len(arguments)
        layout.env_end = place + len(arguments) + len(variables)
    size = ctypes.sizeof(layout)
    if _libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(layout), ctypes.c_ulong(size), ctypes.c_ulong(0)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
