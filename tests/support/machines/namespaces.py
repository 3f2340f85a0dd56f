"""Makes one machine: its namespaces, its network cards, its files, and its process 1."""

import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.support.machines.switch import mac_of, open_tap

CLONE_NEWTIME, CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x80, 0x20000, 0x4000000, 0x8000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
SYS_MOUNT_SETATTR: Final = 442  # the same number on every architecture
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY: Final = 1
PR_SET_PDEATHSIG: Final = 1
LINK: Final = 3  # descriptor of the socket to the hub, in the processes of this file
MAX_FD: Final = 4096
REPLY_S: Final = 60.0  # longest time to make a machine
ERROR: Final = "error: "
PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"
CGROUPS: Final = "/sys/fs/cgroup"
BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
SYSCTLS: Final = {  # addresses work at once, and a machine that takes an address over announces it
    "ipv4/conf/{}/arp_notify": "1",
    "ipv6/conf/{}/ndisc_notify": "1",
    "ipv6/conf/{}/accept_dad": "0",
    "ipv6/conf/{}/accept_ra": "0",
}

_libc = ctypes.CDLL(None, use_errno=True)


class NotMade(Exception):
    """The kernel, or the rights of this user, do not allow a machine."""


def make(spec: dict[str, Any]) -> tuple[int, list[int], socket.socket]:
    """Fork a machine's process 1 into new namespaces.

    The machine ends when its process 1 is killed, when the caller ends, and when the returned socket is closed. The
    caller has one thread.

    Args:
        spec: as `Lan.add` writes it.

    Returns:
        The id of process 1, the descriptors of its network cards, and the socket.

    Raises:
        NotMade: the text says where it failed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        _outside(spec, theirs.fileno())
    theirs.close()
    ours.settimeout(REPLY_S)
    pid, cards = 0, list[int]()
    try:
        while not (pid and cards):
            data, fds, _, _ = socket.recv_fds(ours, 4096, 8)
            if not data or data.startswith(ERROR.encode()):
                raise NotMade(data.decode().removeprefix(ERROR) or "its process 1 ended at once")
            pid, cards = (pid, fds) if fds else (int(data), cards)
    except (OSError, NotMade) as error:
        ours.close()
        raise NotMade(str(error)) from error
    return pid, cards, ours


def _outside(spec: dict[str, Any], link: int) -> None:
    """Enter the namespaces, fork process 1, and wait for it. This process's own PID namespace stays the old one."""
    os.dup2(link, LINK)
    os.closerange(LINK + 1, MAX_FD)  # the cards of other machines, the hub's own socket
    hub = socket.socket(fileno=LINK)
    try:
        _die_with_parent()
        flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWTIME
        _checked(_libc.unshare(flags), "unshare")
        offset = f"{spec['uptime_s']} 0"
        Path("/proc/self/timens_offsets").write_text(f"monotonic {offset}\nboottime {offset}\n")
        pid = os.fork()
        if pid == 0:
            _process_1(spec, hub)
        hub.send(str(pid).encode())
        hub.close()
        os.waitpid(pid, 0)
    except BaseException as error:  # noqa: BLE001 - a forked process must not return into its caller's code
        _send_error(hub, error)
    os._exit(0)


def _process_1(spec: dict[str, Any], hub: socket.socket) -> None:
    """Set the machine up, then wait until the hub closes the socket."""
    try:
        _die_with_parent()
        cards = [_add_card(card) for card in spec["cards"]]
        _configure_network(spec["cards"], spec["number"])
        _mount_everything(spec)
        socket.sethostname(spec["hostname"])
        socket.send_fds(hub, [b"ready"], cards)
        for card in cards:
            os.close(card)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps orphans
        hub.recv(1)
    except BaseException as error:  # noqa: BLE001 - as above
        _send_error(hub, error)
    os._exit(0)


def _send_error(hub: socket.socket, error: BaseException) -> None:
    try:
        hub.send(f"{ERROR}{error or type(error).__name__}"[:4000].encode())
    except OSError:  # the hub has ended, or this process has closed the socket already
        pass


def _die_with_parent() -> None:
    _checked(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _add_card(card: dict[str, Any]) -> int:
    try:
        fd = open_tap(card["name"])
    except OSError as error:
        raise NotMade(f"no TAP device from /dev/net/tun: {error.strerror}") from error
    for path, value in SYSCTLS.items():
        place = Path("/proc/sys/net", path.format(card["name"]))
        if place.exists():  # a kernel without IPv6 lacks some
            place.write_text(value)
    return fd


def _configure_network(cards: Sequence[dict[str, Any]], number: int) -> None:
    lines = ["link set lo up"]
    for card in cards:
        name = card["name"]
        lines += [
            f"link set {name} address {mac_of(number, card['network']).hex(':')}",
            f"addr add {card['address']}/24 dev {name}",
            f"addr add {card['address6']}/64 dev {name} nodad",
            f"link set {name} up",
        ]
    lines += [f"route add default dev {cards[0]['name']}", f"route add ::/0 dev {cards[0]['name']}"]
    done = subprocess.run(
        ["ip", "-batch", "-"],
        input="\n".join(lines).encode(),
        capture_output=True,
        timeout=REPLY_S,
        check=False,
        env={"PATH": PATH},
    )
    if done.returncode:
        raise NotMade(f"ip: {done.stderr.decode().strip()}")


def _mount_everything(spec: dict[str, Any]) -> None:
    """Make all files of the host read-only, but those that the spec names.

    A bind mount takes its source through a descriptor, because the mounts before may have hidden its path.
    """
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    kept = [(path, path) for path in spec["read_only"]]
    folders = [(_opened(source), target) for source, target in sorted([*spec["binds"], *kept], key=_depth)]
    files = [(_opened(source), target) for source, target in spec["files"]]
    cgroups = [(_opened(CGROUPS), CGROUPS)] if os.path.isdir(CGROUPS) else []
    _mount("proc", "/proc", "proc")
    _mount("sysfs", "/sys", "sysfs")  # of this network namespace
    for place in spec["memory"]:
        _mount("tmpfs", place, "tmpfs")
    for fd, target in [*cgroups, *folders]:
        os.makedirs(target, exist_ok=True)
        _mount(f"/proc/self/fd/{fd}", target, None, MS_BIND | MS_REC)
    for fd, target in files:
        place = os.path.realpath(target)
        if not os.path.exists(place):  # a link into a directory that a tmpfs has hidden
            os.makedirs(os.path.dirname(place), exist_ok=True)
            Path(place).touch()
        _mount(f"/proc/self/fd/{fd}", place, None, MS_BIND)
    _set_read_only("/", True, AT_RECURSIVE)
    for place in ["/proc", *spec["memory"], *(target for _, target in spec["binds"])]:
        _set_read_only(place, False)
    for fd, _ in [*cgroups, *folders, *files]:
        os.close(fd)


def _depth(bind: Sequence[str]) -> int:
    return bind[1].count("/")


def _opened(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_CLOEXEC)


def _mount(source: str, target: str, kind: str | None, flags: int = 0) -> None:
    done = _libc.mount(source.encode(), target.encode(), kind and kind.encode(), flags, None)
    _checked(done, f"mount on {target}")


def _set_read_only(place: str, value: bool, flags: int = 0) -> None:
    attributes = (ctypes.c_uint64 * 4)(*((MOUNT_ATTR_RDONLY, 0) if value else (0, MOUNT_ATTR_RDONLY)), 0, 0)
    done = _libc.syscall(
        SYS_MOUNT_SETATTR, AT_FDCWD, place.encode(), flags, ctypes.byref(attributes), ctypes.sizeof(attributes)
    )
    _checked(done, f"mount_setattr of {place}")


def _checked(result: int, doing: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{doing}: {os.strerror(number)}")
