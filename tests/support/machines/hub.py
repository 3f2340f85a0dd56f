"""The process behind a `Lan`: parent of its machines, and the switch between them.

It ends with the process that started it, however that ends, and takes every machine with it.
"""

import json
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, Final

from tests.support.machines.namespaces import NotMade, make
from tests.support.machines.switch import Card, Switch, mac_of

LAB: Final = "PHYSARUM_TEST_MACHINES"  # in the environment of every process that a test starts in a machine
LOOK_S: Final = 0.2  # between two looks at whether the parent lives
END_S: Final = 30.0  # for killed machines to end
MAX_REQUEST: Final = 1 << 16


class Hub:
    """Machines by name, and their switch."""

    def __init__(self, lab: str) -> None:
        self.switch = Switch()
        self._lab = lab
        self._machines: dict[str, tuple[int, socket.socket]] = {}  # process 1 and the socket to it

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request."""
        match request:
            case {"make": spec}:
                return {"pid": self._make(spec)}
            case {"unplug": str(name)}:
                self._unplug(name)
            case {"cut": str(name)}:
                self.switch.cut(name)
            case {"heal": str(name)}:
                self.switch.heal(name)
            case {"delay_s": delay_s, "jitter_s": jitter_s}:
                self.switch.delay(delay_s, jitter_s)
            case {"loss": share}:
                self.switch.lose(share)
            case {"stats": _}:
                switch, cpu = self.switch, os.times()
                counts = {"frames": switch.frames, "bytes": switch.bytes, "dropped": switch.dropped}
                return {**counts, "waiting": switch.waiting, "cpu_s": cpu.user + cpu.system}
            case _:
                raise ValueError(f"unknown request: {request}")
        return {}

    def end(self) -> None:
        """Kill all machines and wait for them."""
        for name in self._machines:
            self.switch.remove(name)
        kill_lab(self._lab)
        errors: list[str] = []
        for name in list(self._machines):
            try:
                self._unplug(name)
            except TimeoutError as error:
                errors.append(str(error))
        if errors:
            raise TimeoutError("; ".join(errors))

    def _make(self, spec: dict[str, Any]) -> int:
        name = spec["name"]
        pid, fds, link = make(spec)
        for fd, card in zip(fds, spec["cards"], strict=True):
            self.switch.add(Card(fd, name, card["network"], mac_of(spec["number"], card["network"])))
        self._machines[name] = (pid, link)
        return pid

    def _unplug(self, name: str) -> None:
        """Pull the plug: first the cables, so that no dying socket sends a farewell, then process 1."""
        self.switch.remove(name)
        pid, link = self._machines.pop(name)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        link.close()
        until = time.monotonic() + END_S
        while Path(f"/proc/{pid}").exists():
            if time.monotonic() > until:
                raise TimeoutError(f"{name}: process 1 ({pid}) has not ended {END_S:g} s after SIGKILL")
            _reap()
            time.sleep(0.002)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def kill_lab(lab: str) -> None:
    """Kill every process that a test started in a machine, and the nsenter outside that waits for it."""
    mark = f"{LAB}={lab}".encode()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:  # it has ended, or belongs to another user
            continue


def serve(control: socket.socket, parent: int, lab: str) -> None:
    """Forward frames and answer requests until the other end of `control` is closed or the parent has ended."""
    hub = Hub(lab)
    try:
        while os.getppid() == parent:
            if hub.switch.step([control], LOOK_S):
                data = control.recv(MAX_REQUEST)
                if not data:
                    break
                request = json.loads(data)
                try:
                    answer = hub.answer(request)
                except (NotMade, ValueError, KeyError, TimeoutError) as error:
                    answer = {"error": str(error)}
                control.send(json.dumps({"number": request["number"], **answer}).encode())
            _reap()
    finally:
        hub.end()


def main() -> None:
    """Start from the command line: descriptor of the socket, id of the parent, name and directory of the lab."""
    fd, parent, lab, directory = sys.argv[1:]
    try:
        serve(socket.socket(fileno=int(fd)), int(parent), lab)
    finally:
        if directory:
            shutil.rmtree(directory, ignore_errors=True)
