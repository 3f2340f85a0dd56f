"""One machine: start programs in it, see what listens, pull its plug."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import psutil

from tests.support.machines.hub import LAB

CLOCK: Final = Path(__file__).parent / "clock"  # its sitecustomize shifts the clock of a Python process
SHIFT: Final = "PHYSARUM_TEST_CLOCK_SHIFT_S"
OF_THE_HOST: Final = (
    "TMPDIR",
    *(f"XDG_{name}" for name in ("CACHE_HOME", "RUNTIME_DIR", "CONFIG_HOME", "DATA_HOME", "STATE_HOME")),
)
HOME: Final = Path("/tmp/home")  # in the machine's own directory
START_S: Final = 60.0
SHOWN: Final = 4000  # characters of a program's output in an error
LISTEN: Final = "0A"  # state of a socket in /proc/net/tcp


@dataclass(frozen=True, order=True)
class Listening:
    """A TCP socket that accepts connections."""

    address: str
    port: int
    process: str  # command line


class Process:
    """A program in a machine. Its output, both streams, goes to a file."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], output: Path) -> None:
        self.output_file = output
        self._command = command
        with output.open("wb") as file:
            self._nsenter = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        self.pid = self._find_pid()  # outside of the machine

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while the program runs."""
        return self._nsenter.poll()

    def wait(self, timeout_s: float) -> int:
        """Wait for the end; return the exit code.

        Raises:
            TimeoutError: it still runs after timeout_s. The text has the end of its output.
        """
        try:
            return self._nsenter.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self._nsenter.args} runs after {timeout_s:g} s:\n{self.output()[-SHOWN:]}") from None

    def signal(self, number: int) -> None:
        """Send a signal to the program, not to its children."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
            if number == signal.SIGCONT:
                self._nsenter.send_signal(number)  # it stops with its child

    def kill(self) -> None:
        """Send SIGKILL."""
        self.signal(signal.SIGKILL)

    def pause(self) -> None:
        """Send SIGSTOP."""
        self.signal(signal.SIGSTOP)
        nsenter = psutil.Process(self._nsenter.pid)
        for _ in polled(START_S, lambda: f"{self._nsenter.args} did not stop"):
            if nsenter.status() == psutil.STATUS_STOPPED:
                break

    def resume(self) -> None:
        """Send SIGCONT."""
        self.signal(signal.SIGCONT)

    def end_if_stopped(self) -> None:
        """Kill a stopped program. Its nsenter has stopped, too, and would not reap it."""
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(self._nsenter.pid).status() == psutil.STATUS_STOPPED:
                self.kill()
                self.resume()

    def output(self) -> str:
        """All that the program has written so far."""
        return self.output_file.read_text(errors="replace")

    def describe(self) -> str:
        """Command, exit code, and the end of the output, for a failed test."""
        code = "running" if self.returncode is None else f"exit code {self.returncode}"
        return f"{' '.join(self._command)}: {code}\n{self.output()[-SHOWN:]}"

    def wait_for(self, text: str, timeout_s: float) -> str:
        """Wait until the program has written `text`; return its output.

        Raises:
            AssertionError: it ended without.
            TimeoutError: it has not within timeout_s.
        """
        for _ in polled(timeout_s, lambda: f"no {text!r} within {timeout_s:g} s in:\n{self.output()[-SHOWN:]}"):
            ended = self.returncode is not None
            if text in (output := self.output()):
                break
            assert not ended, f"exit code {self.returncode} without {text!r}:\n{output[-SHOWN:]}"
        return self.output()

    def _find_pid(self) -> int:
        for _ in polled(START_S, lambda: f"{self._nsenter.args} did not start within {START_S:g} s"):
            with suppress(psutil.NoSuchProcess):
                if children := psutil.Process(self._nsenter.pid).children():
                    return children[0].pid
            if self._nsenter.poll() is not None:
                break
        return self._nsenter.pid  # it has ended


class Machine:
    """One machine of a `Lan`, which makes it."""

    def __init__(self, lan: Any, spec: Mapping[str, Any], pid: int, clock_shift_s: float) -> None:
        self.name: str = spec["name"]
        self.hostname: str = spec["hostname"]
        self.addresses: list[str] = [card["address"] for card in spec["cards"]]
        self.addresses6: list[str] = [card["address6"] for card in spec["cards"]]
        self.pid = pid  # of its process 1, outside of the machine
        self.clock_shift_s = clock_shift_s
        self.directory = Path(spec["directory"])  # on the host: what the test reads of this machine
        self._lan = lan
        self._binds: list[tuple[str, str]] = spec["binds"]
        self._lab: str = spec["lab"]
        self.processes: list[Process] = []  # all that were started

    @property
    def address(self) -> str:
        """IPv4 address of the first card."""
        return self.addresses[0]

    @property
    def address6(self) -> str:
        """IPv6 address of the first card."""
        return self.addresses6[0]

    def start(
        self, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path | str = "/"
    ) -> Process:
        """Start a program in the machine.

        Args:
            command: program and arguments.
            env: variables in addition to those of this process.
            cwd: working directory, in the machine.
        """
        output = self.directory / "output" / f"{len(self.processes)}-{Path(command[0]).name}.log"
        enter = ["nsenter", "--target", str(self.pid), *"--net --pid --mount --uts --ipc --time".split()]
        whole = [*enter, "--", "env", "--chdir", str(cwd), *map(str, command)]
        process = Process(whole, self._environment(env or {}), output)
        self.processes.append(process)
        return process

    def run(
        self,
        command: Sequence[str | Path],
        *,
        timeout_s: float = 30.0,
        env: Mapping[str, str] | None = None,
        cwd: Path | str = "/",
    ) -> str:
        """Run a program to its end; return its output.

        Raises:
            AssertionError: it ended with another code than 0.
            TimeoutError: it still ran after timeout_s, and was killed.
        """
        process = self.start(command, env=env, cwd=cwd)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        assert code == 0, f"{[*map(str, command)]} on {self.name}: exit code {code}:\n{process.output()[-SHOWN:]}"
        return process.output()

    def set_hosts(self, *lines: str) -> None:
        """Write /etc/hosts: these lines after those of localhost. Without more, the machine's own name is unknown."""
        text = "\n".join(["127.0.0.1 localhost", "::1 localhost", *lines]) + "\n"
        (self.directory / "hosts").write_text(text)  # in place: a rename would leave the old file mounted

    def path(self, place: Path | str) -> Path:
        """Where a file of the machine is on the host. The file is in a directory of its own, or a shared one."""
        best = max(
            ((source, target) for source, target in self._binds if Path(place).is_relative_to(target)),
            key=lambda bind: len(bind[1]),
        )
        return Path(best[0]) / Path(place).relative_to(best[1])

    def listening(self) -> list[Listening]:
        """TCP sockets that accept connections, sorted."""
        names = self._names_by_inode()
        found: list[Listening] = []
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN:
                    place, _, port = fields[1].partition(":")
                    found.append(Listening(_address(place), int(port, 16), names.get(fields[9], "")))
        return sorted(found)

    def unplug(self) -> None:
        """Pull the plug: its network is gone first, then all its processes die at once."""
        self._lan.unplug(self.name)

    def end_processes(self, timeout_s: float) -> None:
        """Wait for all programs of a machine that has ended."""
        for process in self.processes:
            process.wait(timeout_s)

    def end_stopped(self) -> None:
        """Kill stopped programs, so that the machine can end."""
        for process in self.processes:
            process.end_if_stopped()

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        whole = {key: value for key, value in os.environ.items() if key not in OF_THE_HOST}
        whole |= {"HOME": str(HOME), LAB: self._lab, "PHYSARUM_TEST_MACHINE": self.name, **env}
        if self.clock_shift_s:
            places = [str(CLOCK), *filter(None, [whole.get("PYTHONPATH")])]
            whole |= {"PYTHONPATH": os.pathsep.join(places), SHIFT: repr(self.clock_shift_s)}
        return whole

    def _names_by_inode(self) -> dict[str, str]:
        network = os.readlink(f"/proc/{self.pid}/ns/net")
        names: dict[str, str] = {}
        for process in psutil.process_iter():
            place = f"/proc/{process.pid}"
            with suppress(OSError, psutil.Error):  # it has ended meanwhile
                if os.readlink(f"{place}/ns/net") == network:
                    name = " ".join(process.cmdline()).strip()
                    for fd in os.listdir(f"{place}/fd"):
                        with suppress(OSError):
                            names[os.readlink(f"{place}/fd/{fd}").removeprefix("socket:[").rstrip("]")] = name
        return names


def _address(text: str) -> str:
    """Decode an address of /proc/net/tcp: words of four bytes, each in the machine's byte order."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    return str(ip_address(b"".join(words)))


def polled(timeout_s: float, message: Callable[[], str]) -> Iterator[None]:
    """Yield every 5 ms for conditions that no event reports.

    Raises:
        TimeoutError: the caller's loop did not end within timeout_s.
    """
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        yield
        time.sleep(0.005)
    raise TimeoutError(message())
