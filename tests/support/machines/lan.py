"""Several machines on one kernel, for tests: `machines(...)`.

A machine is a network, PID, mount, host-name, IPC and time namespace with disk, /dev/shm, /run and uptime of its own.
Machines share nothing but what a test names: the rest of the host's files is read-only. Addresses exist only inside
these namespaces, and no cable leads out of them.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Final

from tests.support.machines.machine import HOME, Machine

ROOT: Final = Path(__file__).resolve().parents[3]
HUB: Final = "import sys; sys.path.insert(0, {!r}); from tests.support.machines.hub import main; main()"
FIRST: Final = 10  # number of the first machine, which ends its addresses
NETWORKS: Final = (("10.77.0", "fd77:"), ("10.78.0", "fd78:"))  # of the first and of the second card
REQUEST_S: Final = 60.0
END_S: Final = 60.0
MAX_ANSWER: Final = 1 << 16
NSSWITCH: Final = "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nservices: files\nprotocols: files\n"


class NoMachines(Exception):
    """No machine can be made here; the text says why."""


class Lan:
    """Machines by name, on a network that a test can delay, lose frames on, and cut."""

    def __init__(self, hub: "_HubProcess", directory: Path, shared: Sequence[Path], own: Sequence[Path]) -> None:
        self._hub, self._directory, self._shared, self._own = hub, directory, shared, own
        self._machines: dict[str, Machine] = {}
        self._all: list[Machine] = []  # also those that are gone
        self._ends: dict[str, int] = {}  # the last number of each machine's addresses, also of those that are gone

    @property
    def pid(self) -> int:
        """Id of the process that is the switch and the parent of all machines."""
        return self._hub.pid

    def __getitem__(self, name: str) -> Machine:
        return self._machines[name]

    def add(
        self,
        name: str,
        *,
        address_of: str | None = None,
        hostname: str | None = None,
        clock: float = 0.0,
        hosts: Sequence[str] = (),
        second_card: bool = False,
    ) -> Machine:
        """Make a machine.

        Args:
            name: unique, also of machines that are gone.
            address_of: name of a machine, perhaps gone, whose addresses this one takes.
            hostname: its host name; the default is its name.
            clock: seconds by which its wall clock is ahead.
            hosts: lines of its /etc/hosts, after those of localhost.
            second_card: give it a card on another network, too.

        Raises:
            NoMachines: the kernel or this user's rights do not allow it.
        """
        assert name not in self._ends, f"there is, or was, a machine {name}"
        number = FIRST + len(self._ends)
        self._ends[name] = end = number if address_of is None else self._ends[address_of]
        directory = self._directory / name
        spec = {
            "name": name,
            "lab": self._hub.lab,
            "directory": str(directory),
            "number": number,
            "hostname": hostname or name,
            "uptime_s": number * 100_000,
            "cards": [_card(network, end) for network in range(1 + second_card)],
            **self._files(directory, hosts),
        }
        pid = self._hub.request({"make": spec})["pid"]
        self._machines[name] = machine = Machine(self, spec, pid, clock)
        self._all.append(machine)
        machine.set_hosts(*hosts)
        return machine

    def cut(self, *names: str) -> None:
        """Cut machines off. Their frames are dropped, those on their way included."""
        for name in names:
            self._hub.request({"cut": name})

    def heal(self, *names: str) -> None:
        """Connect machines again."""
        for name in names:
            self._hub.request({"heal": name})

    def delay(self, ms: float, *, jitter_ms: float = 0.0) -> None:
        """Delay each frame, in each direction, by ms, plus or minus up to jitter_ms."""
        self._hub.request({"delay_s": ms / 1000, "jitter_s": jitter_ms / 1000})

    def loss(self, share: float) -> None:
        """Drop a share of all frames, at random. A frame then is one packet: offloads are off until share is 0."""
        self._hub.request({"loss": share})

    def unplug(self, name: str) -> None:
        """Pull a machine's plug. All its processes have ended when this returns."""
        machine = self._machines.pop(name)
        self._hub.request({"cut": name})
        machine.end_stopped()
        self._hub.request({"unplug": name})
        machine.end_processes(END_S)

    def stats(self) -> dict[str, float]:
        """Numbers of the switch: frames and bytes delivered, frames dropped and waiting, cpu_s."""
        return self._hub.request({"stats": True})

    def describe(self) -> str:
        """Every program of every machine, with the end of its output."""
        return "\n".join(f"{one.name}: {process.describe()}" for one in self._all for process in one.processes)

    def end(self) -> None:
        """End all machines."""
        for machine in self._machines.values():
            machine.end_stopped()
        self._hub.end()
        for machine in self._machines.values():
            machine.end_processes(END_S)

    def _files(self, directory: Path, hosts: Sequence[str]) -> dict[str, Any]:
        """Directories and files of a machine, as bind mounts from the host."""
        disk = directory / "disk"
        temporary = {"/tmp", "/var/tmp", tempfile.gettempdir()}
        binds = [(str(disk / place.lstrip("/")), place) for place in sorted(temporary)]
        binds += [(str(disk / str(place).lstrip("/")), str(place)) for place in self._own]
        for source, target in binds:
            Path(source).mkdir(parents=True, exist_ok=True)
            Path(target).mkdir(parents=True, exist_ok=True)
        (disk / str(HOME).lstrip("/")).mkdir(exist_ok=True)
        (directory / "output").mkdir()
        needed = {ROOT, *(Path(place).resolve() for place in (sys.prefix, sys.base_prefix))}
        texts = {
            "hosts": ("/etc/hosts", ""),
            "resolv.conf": ("/etc/resolv.conf", "# no name server\n"),
            "nsswitch.conf": ("/etc/nsswitch.conf", NSSWITCH),
            "machine-id": ("/etc/machine-id", f"{uuid.uuid4().hex}\n"),
            "boot_id": ("/proc/sys/kernel/random/boot_id", f"{uuid.uuid4()}\n"),
        }
        files = [(name, target, text) for name, (target, text) in texts.items() if os.path.lexists(target)]
        for name, _, text in files:
            (directory / name).write_text(text)
        return {
            "binds": [*binds, *((str(place), str(place)) for place in self._shared)],
            "read_only": sorted(str(p) for p in needed if any(p.is_relative_to(place) for place in temporary)),
            "files": [(str(directory / name), target) for name, target, _ in files],
            "memory": [place for place in ("/dev/shm", "/run") if Path(place).is_dir()],
        }


def _card(network: int, end: int) -> dict[str, Any]:
    four, six = NETWORKS[network]
    return {"name": f"eth{network}", "network": network, "address": f"{four}.{end}", "address6": f"{six}:{end}"}


class _HubProcess:
    """The hub and the requests to it."""

    def __init__(self, directory: Path, *, is_temporary: bool) -> None:
        self.lab = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._numbers = count()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(REQUEST_S)
        self._log = directory / "hub.log"
        program = HUB.format(str(ROOT))
        arguments = [theirs.fileno(), os.getpid(), self.lab, directory if is_temporary else ""]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", program, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the test
            )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def request(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            number = next(self._numbers)
            self._socket.send(json.dumps({"number": number, **request}).encode())
            answer: dict[str, Any] = {}
            while answer.get("number") != number:  # the answer to an interrupted request may still be there
                data = self._socket.recv(MAX_ANSWER)
                if not data:
                    raise NoMachines(f"the switch has ended: {self._log.read_text()}")
                answer = json.loads(data)
        if "error" in answer:
            raise NoMachines(answer["error"])
        return answer

    def end(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a forked child of this process may hold a copy
        self._socket.close()
        try:
            self._process.wait(END_S)
        finally:
            self._process.kill()
            self._process.wait(END_S)


@cache
def why_not() -> str | None:
    """Why no machine can be made here, found by making one; None if it can."""
    try:
        with machines("probe") as lan:
            lan["probe"].run(["true"])
    except (NoMachines, OSError, AssertionError) as error:
        return str(error)
    return None


@contextmanager
def machines(
    *names: str,
    shared: Path | Sequence[Path] = (),
    own: Path | Sequence[Path] = (),
    clocks: Mapping[str, float] | None = None,
    hosts: Mapping[str, Sequence[str]] | None = None,
    hostnames: Mapping[str, str] | None = None,
    second_card: Sequence[str] = (),
    directory: Path | None = None,
) -> Generator[Lan]:
    """Make machines on one network; end them after the block, with all their processes.

    Args:
        names: of the machines.
        shared: directories of the host that all machines have, writable, at the same path.
        own: directories that each machine has for itself, empty at first. /tmp and /var/tmp are of this kind, too.
        clocks: seconds by which a machine's wall clock is ahead.
        hosts: lines of a machine's /etc/hosts.
        hostnames: host names that differ from the machine's name.
        second_card: machines with a card on another network, too.
        directory: directory of the host for the machines' disks and output. By default a temporary one.

    Raises:
        NoMachines: the kernel or this user's rights do not allow it.
    """
    place = Path(tempfile.mkdtemp(prefix="machines-")) if directory is None else directory
    place.mkdir(parents=True, exist_ok=True)
    clocks, hosts, hostnames = clocks or {}, hosts or {}, hostnames or {}
    try:
        lan = Lan(_HubProcess(place, is_temporary=directory is None), place, _paths(shared), _paths(own))
        try:
            for name in names:
                lan.add(
                    name,
                    clock=clocks.get(name, 0.0),
                    hosts=hosts.get(name, ()),
                    hostname=hostnames.get(name),
                    second_card=name in second_card,
                )
            yield lan
        except BaseException as error:
            error.add_note(lan.describe())  # the files are gone when a person reads the error
            raise
        finally:
            lan.end()
    finally:
        if directory is None:
            shutil.rmtree(place, ignore_errors=True)


def _paths(places: Path | Sequence[Path]) -> list[Path]:
    return [place.resolve() for place in ([places] if isinstance(places, Path) else places)]
