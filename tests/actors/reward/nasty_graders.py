"""Reward functions that look around, take more than their share, or write where they should not."""

import ctypes
import multiprocessing
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def environment(sample: Any) -> dict[str, Any]:
    return {"score": 1.0, "names": " ".join(sorted(os.environ)), "value": os.environ.get(sample.response)}


def scratch(sample: Any) -> dict[str, Any]:
    path = Path(tempfile.mkdtemp()) / "file"
    path.write_text("x")
    return {"score": 1.0, "path": str(path)}


def status(sample: Any) -> dict[str, Any]:
    """A line of /proc/self/status, and a limit."""
    lines = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    return {
        "score": 1.0,
        "no_new_privs": lines["NoNewPrivs"].strip(),
        "capabilities": lines["CapEff"].strip(),
        "memory": resource.getrlimit(resource.RLIMIT_DATA)[0],
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def opens_files(sample: Any) -> float:
    kept = []
    while True:
        kept.append(open(os.devnull))


def writes_a_large_file(sample: Any) -> float:
    with tempfile.TemporaryFile() as file:
        file.truncate(2 << 30)
    return 1.0


def burns_processor_time(sample: Any) -> float:
    while True:
        pass


def forks_a_bomb(sample: Any) -> float:
    """Every process starts another and another; after 20 s they end by themselves, whatever becomes of this test."""
    signal.alarm(20)
    while True:
        if os.fork() == 0:
            signal.alarm(20)
        time.sleep(0.01)


def leaves_a_daemon(sample: Any) -> float:
    command = f"setsid sleep 30 & echo $! > {sample.metadata['file']}"
    subprocess.run(["sh", "-c", command], check=True, stdout=subprocess.DEVNULL)
    if sample.response == "die":
        os._exit(3)
    return 1.0


def prints_much(sample: Any) -> float:
    block = b"x" * (1 << 20)
    for descriptor in (1, 2):
        for _ in range(int(sample.response) >> 1):
            os.write(descriptor, block)
    return 1.0


def writes_to_the_pipe(sample: Any) -> float:
    """Garbage of the kind that the response names, to every descriptor that takes it."""
    garbage = {
        "length": b"\xff\xff\xff\xff",
        "no struct": b"\x00\x00\x00\x05hello",
        "deep": (200_000).to_bytes(4, "big") + b"\x81\xa7details" + b"\x91" * 199_991,
        "half": b"\x00\x00\x01\x00abc",
    }[sample.response]
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, garbage)
        except OSError:
            continue
    if sample.response == "half":
        os._exit(1)
    return 1.0


def looks_around(sample: Any) -> dict[str, Any]:
    """What of the machine can be seen: network, processes, files."""
    hidden, secret = sample.metadata["hidden"], sample.metadata["secret"]
    return {
        "score": 1.0,
        "connects": _tried(lambda: socket.create_connection(("127.0.0.1", sample.metadata["port"]), timeout=5).close()),
        "interfaces": " ".join(name for _, name in socket.if_nameindex()),
        "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
        "parent": _tried(lambda: Path(f"/proc/{sample.metadata['pid']}/environ").read_bytes()),
        "signals": _tried(lambda: os.kill(sample.metadata["pid"], 0)),
        "hidden": " ".join(os.listdir(hidden)),
        "secret": _tried(Path(secret).read_text),
        "writes": _tried(lambda: Path(sample.metadata["file"]).write_text("x")),
        "undoes": _tried(lambda: subprocess.run(["umount", hidden], check=True, stderr=subprocess.DEVNULL)),
        "settings": _tried(lambda: open("/proc/sys/kernel/hostname", "a").close()),
        "own_proc": " ".join(sorted(name for name in os.listdir("/dev/proc") if not name.isdigit())),
        "devices": " ".join(sorted(os.listdir("/dev"))),
        "scratch": _tried(lambda: scratch(sample)),
        "python": _tried(lambda: subprocess.run([sys.executable, "-c", "import json"], check=True)),
    }


def _tried(do: Any) -> str:
    try:
        do()
    except Exception as error:  # noqa: BLE001 - whichever way it is refused
        return type(error).__name__
    return "yes"


def isolates_itself(sample: Any) -> dict[str, Any]:
    """What a process can mount that has all privileges in namespaces of its own."""
    program = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def tried(name, *arguments):
    return "yes" if getattr(libc, name)(*arguments) == 0 else os.strerror(ctypes.get_errno())
uid, gid = os.getuid(), os.getgid()
print(tried("unshare", 0x10000000 | 0x20000000 | 0x00020000))  # CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNS
for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
    open(f"/dev/proc/self/{name}", "w").write(line)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for kind in (b"tmpfs", b"proc", b"sysfs"):
    print(tried("mount", b"none", sys.argv[1].encode(), kind, ctypes.c_ulong(14), None))
print(tried("unshare", 0x02000000))  # CLONE_NEWCGROUP
"""
    command = [sys.executable, "-u", "-c", program, tempfile.mkdtemp()]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {"score": 1.0, **dict(zip(("namespaces", "tmpfs", "proc", "sysfs", "cgroups"), said, strict=True))}


def connects(sample: Any) -> dict[str, Any]:
    """Every way to a socket with a path; and what a grader may do with sockets."""
    path = sample.metadata["path"]

    def stream() -> None:
        with socket.socket(socket.AF_UNIX) as handle:
            handle.connect(path)

    def datagram_of_a_pair() -> None:
        with socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0] as handle:
            handle.sendto(b"x", path)

    def pair_connected_elsewhere() -> None:
        one, other = socket.socketpair()
        with one, other:
            one.connect(path)

    def ring() -> None:
        if ctypes.CDLL(None, use_errno=True).syscall(425, 8, ctypes.create_string_buffer(120)) == -1:
            raise OSError(ctypes.get_errno(), "io_uring")

    def vsock() -> None:
        socket.socket(socket.AF_VSOCK).close()

    def keyring() -> None:  # keyctl(KEYCTL_GET_KEYRING_ID, KEY_SPEC_SESSION_KEYRING)
        if ctypes.CDLL(None, use_errno=True).syscall(250 if platform.machine() == "x86_64" else 219, 0, -3, 0) == -1:
            raise OSError(ctypes.get_errno(), "keyctl")

    tries = (stream, datagram_of_a_pair, pair_connected_elsewhere, ring, vsock, keyring)
    return {
        "score": 1.0,
        **{found.__name__: _tried(found) for found in tries},
        "pair": _tried(lambda: [handle.close() for handle in socket.socketpair()]),
        "own_network": _tried(lambda: socket.create_server(("127.0.0.1", 0)).close()),
        "pool": _tried(lambda: multiprocessing.get_context("fork").Pool(1).map(abs, [-1])),
    }


def reads(sample: Any) -> dict[str, Any]:
    """Which files can be read, and which directories have something in them."""
    files, folders = sample.metadata["files"], sample.metadata["folders"]
    return {
        "score": 1.0,
        "files": " ".join(Path(file).name for file in files if Path(file).is_file() and Path(file).read_bytes()),
        "folders": " ".join(Path(folder).name for folder in folders if Path(folder).is_dir() and os.listdir(folder)),
    }


def dies_by_signal(sample: Any) -> float:
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)
    return 1.0


def answers_much(sample: Any) -> dict[str, Any]:
    return {"score": 1.0} | {f"{number}{'k' * 100}": "v" * 900 for number in range(31)}
