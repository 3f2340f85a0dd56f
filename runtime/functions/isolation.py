"""Sandbox system calls: namespaces, mounts and privileges. Standard library only."""

import ctypes
import fcntl
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from runtime.functions.seccomp import refuse_foreign_sockets

_CLONE_NEWNS: Final = 0x00020000
_CLONE_NEWIPC: Final = 0x08000000
_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWPID: Final = 0x20000000
_CLONE_NEWNET: Final = 0x40000000
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_BIND, _MS_MOVE, _MS_REC, _MS_PRIVATE = 4096, 8192, 16384, 1 << 18
_MOUNT_SETATTR: Final = 442  # the same number on every architecture
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 1, 2
_CAPABILITY_VERSION_3: Final = 0x20080522
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_DEVICES: Final = ("null", "zero", "full", "random", "urandom")
_OWN_PROC: Final = "/dev/proc"  # of an isolated process: a /proc that can be written, and has processes alone
SCRATCH: Final = b"size=1g,mode=700"  # mount options of a private temporary folder
_LAST_CAPABILITY: Final = 63
_CAP_SETFCAP: Final = 31

_libc = ctypes.CDLL(None, use_errno=True)


def set_traceable(traceable: bool) -> None:
    """Whether other processes of this user may trace this one, and read and write its memory."""
    _call("prctl", _PR_SET_DUMPABLE, int(traceable), 0, 0, 0)


def set_no_new_privileges() -> None:
    """Keep programs started from now on from gaining privileges, for example with a set-user-id bit."""
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def attempted(enter: Callable[[], None]) -> str | None:
    """Try a step; return the reason if it fails, or None."""
    try:
        enter()
    except OSError as error:
        return f"{error.filename or 'the kernel'}: {error.strerror}"
    return None


def enter_user_and_pid_namespaces() -> None:
    """Enter a user namespace with only this user, and a PID namespace for children. Privileges cover namespaces only.

    An isolated process can do so again, as the grader `code` does.

    Raises:
        OSError: the kernel refuses.
    """
    uid, gid = os.getuid(), os.getgid()
    own = Path(_OWN_PROC if os.path.isdir(_OWN_PROC) else "/proc", "self")
    _call("unshare", _CLONE_NEWUSER | _CLONE_NEWPID)
    (own / "setgroups").write_text("deny")
    (own / "uid_map").write_text(f"{uid} {uid} 1")
    (own / "gid_map").write_text(f"{gid} {gid} 1")


def enter_other_namespaces(
    folder: str, hidden: Sequence[str], scratch: bytes = SCRATCH, *, isolates: bool = False
) -> None:
    """Isolate this process: no network, no path sockets, no other processes, read-only files except one folder.

    Hidden paths appear empty, and privileges are dropped.

    Args:
        folder: the only writable directory.
        hidden: files and directories to hide.
        scratch: mount options of the folder.
        isolates: whether it can isolate further processes. For that, root keeps one privilege, to give files
            capabilities; nothing that runs later gains any from them.

    Raises:
        OSError: the kernel refuses.
    """
    _call("unshare", _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _set_read_only("/")
    _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, scratch)
    _mount_devices(os.path.join(folder, ".dev"))
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC | (0 if isolates else _MS_RDONLY))
    if isolates:
        Path("/proc/sys/user/max_cgroup_namespaces").write_text("0")  # in one, it could mount and freeze its cgroup
        _set_read_only("/proc")
        _mount_own_proc()
    for path in hidden:
        _hide(path)
    try:
        os.chdir(os.getcwd())  # enter it again by name: a hidden directory then appears empty
    except OSError:
        os.chdir(folder)
    _raise_loopback()
    _drop_privileges({_CAP_SETFCAP} if isolates and os.getuid() == 0 else set())
    refuse_foreign_sockets()


def refusal() -> str | None:
    """Why this machine cannot isolate graders, or None if it can. Tries it in a child process."""
    return _reason_of_child(_refusal_here)


def _refusal_here() -> str | None:
    if sys.platform != "linux":
        return "it is not Linux"
    with tempfile.TemporaryDirectory(prefix="physarum-grader-") as folder:
        if (reason := attempted(enter_user_and_pid_namespaces)) is not None:
            return reason
        return _reason_of_child(lambda: attempted(lambda: enter_other_namespaces(folder, (), isolates=True)))


def _reason_of_child(find: Callable[[], str | None]) -> str | None:
    """Call a function in a child process of this one; return the reason that it finds, or why the child failed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            os.write(writing, (_found(find) or "").encode()[:4096])
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        reason = answer.read().decode("utf-8", "replace")
    _, status = os.waitpid(child, 0)
    if status:
        return f"the process that tried it ended with exit code {os.waitstatus_to_exitcode(status)}"
    return reason or None


def _found(find: Callable[[], str | None]) -> str | None:
    try:
        return find()
    except Exception as error:  # noqa: BLE001 - whatever it is, this machine did not isolate
        return f"the attempt raised {error!r}"


def _mount_devices(stage: str) -> None:
    """Replace /dev by the few devices that programs need, and private shared memory."""
    os.mkdir(stage)
    _mount("tmpfs", stage, "tmpfs", _MS_NOSUID, b"size=256m,nr_inodes=10000,mode=755")
    for name in _DEVICES:
        node = os.path.join(stage, name)
        Path(node).touch()
        _mount(f"/dev/{name}", node, None, _MS_BIND)
    os.mkdir(os.path.join(stage, "shm"), 0o1777)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", os.path.join(stage, name))
    os.symlink("/proc/self/fd", os.path.join(stage, "fd"))
    _mount(stage, "/dev", None, _MS_MOVE)
    os.rmdir(stage)
    os.close(os.open(os.devnull, os.O_WRONLY))  # fails where a file took the place of the machine's device


def _mount_own_proc() -> None:
    """Mount a writable /proc without the settings of the kernel, which root could write without a privilege.

    A namespace of further processes gets a whole writable /proc only if it sees one already. This one does not count,
    because a part of it is covered, as in containers. The part is of the namespace's first process, and stays with it.
    """
    os.mkdir(_OWN_PROC)
    _mount("proc", _OWN_PROC, "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, b"subset=pid")
    _mount("tmpfs", f"{_OWN_PROC}/1/task", "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, b"size=4k,mode=555")


def _hide(path: str) -> None:
    if os.path.isdir(path):
        _mount("tmpfs", path, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, b"size=4k,mode=555")
    elif os.path.exists(path):
        _mount("/dev/null", path, None, _MS_BIND)


def _set_read_only(path: str) -> None:
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    number = ctypes.c_long(_MOUNT_SETATTR)
    if _libc.syscall(number, _AT_FDCWD, path.encode(), _AT_RECURSIVE, attributes, len(attributes)) == -1:
        raise _error(f"mount_setattr read-only {path}")


def _raise_loopback() -> None:
    """Bring up the loopback interface, so that a grader can talk to its own children."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle, suppress(OSError):
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def _drop_privileges(kept: Collection[int]) -> None:
    """Drop all privileges but these capabilities, whose numbers are below 32."""
    for capability in range(_LAST_CAPABILITY + 1):
        if capability not in kept and _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == -1:
            break  # the kernel has no further capabilities
    mask = sum(1 << capability for capability in kept)
    _call("capset", struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), struct.pack("=IIIIII", mask, mask, 0, 0, 0, 0))
    set_no_new_privileges()


def _mount(source: str, target: str, kind: str | None, flags: int, options: bytes | None = None) -> None:
    done = _libc.mount(source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options)
    if done == -1:
        raise _error(f"mount {kind or source} on {target}")


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) == -1:
        raise _error(name)


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)
