"""Finds what another user of this machine can see of a run: files, processes and ports."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

_PROBE = r"""
import encodings.idna, json, os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
NATS = b'CONNECT {"verbose":true}\r\nSUB > 1\r\nPUB phy.r.event.x 1\r\nx\r\nPING\r\n'
BODY = b'{"input_ids":[3],"sampling_params":{"max_new_tokens":1}}'
HTTP = b"POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
HTTP += b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
run_dir, pids, ports = json.loads(sys.argv[1])
seen = {"files": [], "readable": [], "environments": [], "command_lines": [], "ports": {}}
for place, folders, names in os.walk(run_dir):
    seen["files"] += [os.path.join(place, name) for name in (*folders, *names)]
for path in sys.argv[2:]:
    try:
        open(path, "rb").close()
        seen["readable"].append(path)
    except OSError:
        pass
for pid in pids:
    try:
        seen["command_lines"].append(open(f"/proc/{pid}/cmdline").read().replace("\0", " "))
    except OSError:
        pass
    try:
        seen["environments"].append(open(f"/proc/{pid}/environ").read())
    except OSError:
        pass
for (host, port), sent in [(place, sent) for place in ports for sent in (NATS, HTTP)]:
    with socket.create_connection((host, port), timeout=1) as connection:
        connection.sendall(sent)
        said = b""
        try:
            while len(said) < 1 << 16 and (data := connection.recv(4096)):
                said += data
        except OSError:
            pass
        place = f"{host}:{port}"
        seen["ports"][place] = seen["ports"].get(place, "") + said.decode(errors="replace")
print(json.dumps(seen))
"""


class Seen(msgspec.Struct, frozen=True):
    """What the other user could see."""

    files: list[str]  # below the run directory
    readable: list[str]  # those of the given paths that could be opened
    environments: list[str]
    command_lines: list[str]
    ports: dict[str, str]  # answers of each port to a NATS client without login and to a generate request


def seen_by_nobody(run_dir: Path, pids: list[int], paths: list[Path], ports: list[tuple[str, int]]) -> Seen:
    """Inspect a run from a process of an unprivileged user. Needs root."""
    command = [sys.executable, "-I", "-S", "-c", _PROBE, json.dumps([str(run_dir), pids, ports]), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, timeout=200, check=False, cwd="/")
    assert done.returncode == 0, done.stderr.decode()
    return msgspec.json.decode(done.stdout, type=Seen)


@contextmanager
def open_directory() -> Iterator[Path]:
    """A directory that every user may enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def listening(pids: list[int]) -> list[tuple[str, int]]:
    """Addresses on which processes listen."""
    places = [place for pid in pids for place in psutil.Process(pid).net_connections("tcp")]
    return sorted({(place.laddr.ip, place.laddr.port) for place in places if place.status == psutil.CONN_LISTEN})


def files_with(secret: str, directory: Path) -> list[str]:
    """Files below a directory that contain a secret."""
    found = [path for path in directory.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    return sorted(str(path.relative_to(directory)) for path in found)
