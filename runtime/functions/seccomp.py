"""Seccomp filter for system calls that bypass a sandbox's namespaces. Standard library only.

Mount and network namespaces do not guard sockets with a path. A process with write permission on the file may
connect, even on a read-only mount. It could then use docker.sock, D-Bus or an SSH agent outside the sandbox. So an
isolated process may not create AF_UNIX sockets, except connected pairs, which have no path. No namespace guards the
kernel's keyrings either: they hold the user's keys, and any program of the user could leave messages there. Programs
that a model wrote may start no processes either, nor choose to get less of a core, nor keep memory beyond the limit of
their process.
"""

import ctypes
import errno
import platform
import struct
from typing import Final

_PR_SET_SECCOMP: Final = 22
_MODE_FILTER: Final = 2
_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _JUMP_IF_ANY_BIT = 0x20, 0x15, 0x35, 0x45
_AND, _RETURN = 0x54, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24  # offsets in seccomp_data; of arguments, the lower half
_FAMILIES: Final = (2, 10, 16)  # AF_INET, AF_INET6, AF_NETLINK: limited to the process's network namespace
_PAIRS: Final = (1, 5)  # SOCK_STREAM, SOCK_SEQPACKET: stay connected. Datagram sockets can send elsewhere
_KIND: Final = 0xF  # mask of a socket's type, without its flags
_X32: Final = 0x40000000  # x86-64 call numbers from here on belong to the x32 ABI
_IO_URING_SETUP: Final = 425  # its rings create and connect sockets without passing the filter
_CALLS: Final = {  # audit architecture, and call numbers of socket and socketpair
    "x86_64": (0xC000003E, 41, 53),
    "aarch64": (0xC00000B7, 198, 199),
}
_STARTS: Final = {  # call number of clone, and those of fork, vfork, execve, execveat and unshare, as far as they exist
    "x86_64": (56, (57, 58, 59, 322, 272)),
    "aarch64": (220, (221, 281, 97)),
}
_SHARES: Final = {  # of setpriority, sched_setparam, sched_setscheduler, sched_setaffinity and sched_setattr
    "x86_64": (141, 142, 144, 203, 314),
    "aarch64": (140, 118, 119, 122, 274),
}
_MEMORY: Final = {"x86_64": (319, 29), "aarch64": (279, 194)}  # of memfd_create and shmget
_KEYRINGS: Final = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}  # of add_key, request_key and keyctl
_CLONE3: Final = 435  # its flags are in memory, where a filter cannot read; libraries fall back to clone
_CLONE_THREAD: Final = 0x00010000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse_foreign_sockets() -> None:
    """Limit this process and its children to sockets of their own network namespace, and to no keys. Irreversible.

    Raises:
        OSError: the kernel refuses, or the call numbers of this architecture are not in _CALLS.
    """
    machine = _machine()
    _install(b"".join(_instructions(*_CALLS[machine], _KEYRINGS[machine])))


def refuse_new_processes() -> None:
    """Keep this process from starting processes and programs, and from entering namespaces. Threads work. Irreversible.

    It cannot change its share of a core either: a program that waits for a core is not judged by its time. Nor can it
    make files in memory, whose size no limit bounds, or use keyrings.

    Raises:
        OSError: the kernel refuses, or the call numbers of this architecture are not in _CALLS.
    """
    machine = _machine()
    clone, refused = _STARTS[machine]
    _install(
        b"".join(
            _of_processes(
                _CALLS[machine][0], clone, (*refused, *_SHARES[machine], *_MEMORY[machine], *_KEYRINGS[machine])
            )
        )
    )


def _machine() -> str:
    machine = platform.machine()
    if machine not in _CALLS:
        raise OSError(errno.ENOSYS, f"system calls can be filtered only on {', '.join(_CALLS)}", machine)
    return machine


def _install(code: bytes) -> None:
    program = _Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program)) == -1:
        raise OSError(ctypes.get_errno(), "refuses a filter for system calls", "seccomp")


def _instructions(architecture: int, socket: int, socketpair: int, keyrings: tuple[int, ...]) -> list[bytes]:
    """BPF program of the filter; each jump skips the given number of instructions."""
    of_socket = [_step(_LOAD, _FIRST), *_allow_any(_FAMILIES), _refuse(errno.EACCES)]
    of_pair = [_step(_LOAD, _SECOND), _step(_AND, _KIND), *_allow_any(_PAIRS), _refuse(errno.EACCES)]
    return [
        _step(_LOAD, _ARCHITECTURE),
        _step(_JUMP_IF_EQUAL, architecture, 1, 0),
        _step(_RETURN, _KILL_PROCESS),  # a 32-bit program, with different call numbers
        _step(_LOAD, _NUMBER),
        _step(_JUMP_IF_AT_LEAST, _X32, 0, 1),
        _refuse(errno.ENOSYS),
        _step(_JUMP_IF_EQUAL, _IO_URING_SETUP, 0, 1),
        _refuse(errno.EPERM),
        *(step for call in keyrings for step in (_step(_JUMP_IF_EQUAL, call, 0, 1), _refuse(errno.EPERM))),
        _step(_JUMP_IF_EQUAL, socket, 0, len(of_socket)),
        *of_socket,
        _step(_JUMP_IF_EQUAL, socketpair, 0, len(of_pair)),
        *of_pair,
        _step(_RETURN, _ALLOW),
    ]


def _of_processes(architecture: int, clone: int, refused: tuple[int, ...]) -> list[bytes]:
    return [
        _step(_LOAD, _ARCHITECTURE),
        _step(_JUMP_IF_EQUAL, architecture, 1, 0),
        _step(_RETURN, _KILL_PROCESS),
        _step(_LOAD, _NUMBER),
        _step(_JUMP_IF_AT_LEAST, _X32, 0, 1),
        _refuse(errno.ENOSYS),
        *(step for call in refused for step in (_step(_JUMP_IF_EQUAL, call, 0, 1), _refuse(errno.EPERM))),
        _step(_JUMP_IF_EQUAL, _CLONE3, 0, 1),
        _refuse(errno.ENOSYS),
        _step(_JUMP_IF_EQUAL, clone, 0, 3),
        _step(_LOAD, _FIRST),
        _step(_JUMP_IF_ANY_BIT, _CLONE_THREAD, 1, 0),
        _refuse(errno.EPERM),
        _step(_RETURN, _ALLOW),
    ]


def _allow_any(values: tuple[int, ...]) -> list[bytes]:
    return [step for value in values for step in (_step(_JUMP_IF_EQUAL, value, 0, 1), _step(_RETURN, _ALLOW))]


def _refuse(number: int) -> bytes:
    return _step(_RETURN, _ERRNO | number)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
