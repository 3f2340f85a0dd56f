"""SGLang's own server, unpatched, on the CPU; the tiny engine with the same interface; servers kept over tests."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import psutil

from runtime.node.supervisor.ports import LOWEST, TRIES, free_port, is_free
from tests.support.tiny_engine import get, post

ROOT: Final = Path(__file__).parents[2]
PYTHON_VARIABLE: Final = "PHYSARUM_SGLANG_PYTHON"
SHIM: Final = Path(__file__).parent / "shim"
SGLANG_START_S: Final = 600.0  # 22 s on an idle machine; imports took 240 s on one with six busy processes
TINY_START_S: Final = 120.0
STOP_S: Final = 15.0
POLL_S: Final = 0.2  # a server does not report when it is up
MAX_KEPT: Final = 2  # SGLang servers kept at once, 3 GB each

TINY: Final = "tiny"
TP1: Final = "sglang"
TWO_PROCESSES: Final = "sglang, two processes"

NUM_SLOTS: Final = 6  # --max-running-requests: further requests wait in the queue
STREAM_INTERVAL: Final = 4
SIZES: Final = {"max-running-requests": NUM_SLOTS, "stream-interval": STREAM_INTERVAL, "max-total-tokens": 4096}
CPU_FLAGS: Final = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle"),
)


def sglang_python() -> str:
    """Path of the interpreter with SGLang."""
    return os.environ.get(PYTHON_VARIABLE, str(ROOT / ".venv-sglang" / "bin" / "python"))


def sglang_environment() -> dict[str, str]:
    """Environment for SGLang's processes without a GPU: the shim, which is only in tests/."""
    path = os.pathsep.join(filter(None, [str(SHIM), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}


@dataclass
class Server:
    """One engine, with one or several processes."""

    layout: str
    url: str
    log: Path
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    @property
    def is_sglang(self) -> bool:
        return self.layout != TINY

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def tree(self) -> list[psutil.Process]:
        """All its running processes."""
        found: list[psutil.Process] = []
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                root = psutil.Process(process.pid)
                found += [root, *root.children(recursive=True)]
        return found

    def schedulers(self) -> list[psutil.Process]:
        """Processes that hold the model. For the tiny engine that is the whole server."""
        if not self.is_sglang:
            return self.tree()
        return [process for process in self.tree() if "scheduler" in "".join(process.cmdline())]

    def kill(self) -> None:
        """Send SIGKILL to all its processes at once."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        tree = self.tree()
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.resume()
                process.send_signal(number)
        _, left = psutil.wait_procs(tree, timeout=STOP_S)
        for process in left:
            process.kill()
        for process in self.processes:
            process.wait(STOP_S)

    @cached_property
    def version(self) -> str:
        """Version that the server reports."""
        info: dict[str, Any] = get(f"{self.url}/server_info")[1]
        return str(info["version"])

    def loads(self) -> dict[str, Any]:
        """Load that the server reports."""
        load: dict[str, Any] = get(f"{self.url}/v1/loads")[1]["loads"][0]
        return load

    def slow_down(self, seconds: float) -> None:
        """Add a delay to every forward step."""
        assert post(f"{self.url}/slow_down", {"forward_sleep_time": seconds})[0] == 200


def port_for_slow_start() -> int:
    """Return a free port below those of `free_port`: no other test takes it in the minute until SGLang listens."""
    for _ in range(TRIES):
        port = LOWEST - 1 - secrets.randbelow(LOWEST // 2)
        if is_free("127.0.0.1", port):
            return port
    raise AssertionError(f"no free port from {LOWEST // 2} to {LOWEST - 1} in {TRIES} tries")


def start(layout: str, model: Path, directory: Path, *flags: str) -> Server:
    """Start an engine without its weights, like a run with random_init. `wait_until_up` waits for it."""
    port = free_port() if layout == TINY else port_for_slow_start()
    server = Server(layout, f"http://127.0.0.1:{port}", directory / f"{layout.replace(' ', '-')}-{port}.log")
    common = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy"]
    common += ["--incremental-streaming-output", *flags]
    for name, value in SIZES.items():
        common += [f"--{name}", str(value)]
    if layout == TINY:
        _spawn(server, [sys.executable, "-m", "actors.tiny_engine", *common], {})
        return server
    command = [sglang_python(), "-m", "sglang.launch_server", *common, *CPU_FLAGS]
    if layout == TP1:
        _spawn(server, command, {})
        return server
    address = f"127.0.0.1:{free_port()}"
    for rank in (0, 1):
        parts = ["--nnodes", "2", "--node-rank", str(rank), "--tp-size", "2", "--dist-init-addr", address]
        parts += ["--port", str(free_port())] if rank else []  # only reports that the process is alive
        _spawn(server, [*command, *parts], {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"})
    return server


def _spawn(server: Server, command: list[str], extra: dict[str, str]) -> None:
    environment = sglang_environment() if server.is_sglang else {**os.environ, "OMP_NUM_THREADS": "1"}
    with server.log.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment | extra, cwd=ROOT)
    server.processes.append(process)


def wait_until_up(server: Server) -> None:
    """Wait until the server accepts requests.

    Raises:
        AssertionError: The server ended, or was not up in time. The text has the end of its log.
    """
    limit_s = SGLANG_START_S if server.is_sglang else TINY_START_S
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and server.alive:
        with contextlib.suppress(OSError):
            if get(f"{server.url}/ready")[0] == 200:
                return
        time.sleep(POLL_S)
    server.kill()
    raise AssertionError(f"{server.layout} was not up within {limit_s} s:\n{server.log.read_text()[-3000:]}")


class Servers:
    """Servers kept over tests: one per layout, started once, and again when a test has killed it."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._model = model
        self._directory = directory
        self._kept: dict[str, Server] = {}
        self.num_starts: dict[str, int] = {}

    def get(self, layout: str) -> Server:
        """Return the running server of a layout."""
        server = self._kept.get(layout)
        if server is None or not server.alive:
            if server is not None:
                server.kill()
            self._make_room(layout)
            self.num_starts[layout] = self.num_starts.get(layout, 0) + 1
            server = self._kept[layout] = start(layout, self._model, self._directory)
        wait_until_up(server)
        return server

    def pids(self) -> set[int]:
        """Process ids of all kept servers."""
        return {process.pid for server in self._kept.values() for process in server.tree()}

    def stop(self, layout: str | None = None) -> None:
        """Stop the server of one layout, or all."""
        for name in [name for name in self._kept if layout in (None, name)]:
            self._kept.pop(name).stop()

    def _make_room(self, layout: str) -> None:
        running = [name for name, server in self._kept.items() if server.is_sglang and name != layout]
        if layout != TINY and len(running) >= MAX_KEPT:
            self.stop(running[0])


@contextlib.contextmanager
def kept_servers(model: Path, directory: Path) -> Iterator[Servers]:
    """Keep servers for a session of tests."""
    servers = Servers(model, directory)
    try:
        yield servers
    finally:
        servers.stop()


def checksum_of(server: Server) -> str:
    """Return the server's own checksum of its weights."""
    status, body = post(f"{server.url}/weights_checker", {"action": "checksum"})
    assert status == 200, body
    return str(body["per_engine_checksum"])


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
