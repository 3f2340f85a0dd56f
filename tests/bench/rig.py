"""What benchmarks of whole pipelines share: a bus, processes with their logs, CPU times, figures."""

import os
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil

from actors.processes import process_specs
from runtime.bus.addresses import BUS_URL_VARIABLE
from runtime.bus.bus import Bus
from runtime.bus.limits import StreamLimits
from runtime.settings.processes import OURS, ProcessSpec
from runtime.settings.topology import SOLE_NODE, Topology

ROOT = Path(__file__).parents[2]
NATS = "nats-server"
END_TIMEOUT_S = 10.0


@asynccontextmanager
async def connected(url: str, topology: Topology) -> AsyncGenerator[Bus]:
    async with Bus.connect(url, topology.run.name, name="bench") as bus:
        await bus.ensure_streams(StreamLimits())
        yield bus


def specs_of(topology: Topology, run_dir: Path) -> list[ProcessSpec]:
    return process_specs(topology, SOLE_NODE, run_dir)


@contextmanager
def processes(commands: Mapping[str, list[str]], run_dir: Path, bus_url: str) -> Iterator[dict[str, psutil.Process]]:
    """Processes for the duration of a block, their output in files of the run directory."""
    environment = {**os.environ, **OURS, BUS_URL_VARIABLE: bus_url}
    running: dict[str, psutil.Process] = {}
    try:
        for name, command in commands.items():
            with (run_dir / f"{name}.log").open("wb") as output:
                running[name] = psutil.Popen(command, stdout=output, stderr=output, env=environment, cwd=ROOT)
        yield running
    finally:
        for process in running.values():
            process.terminate()
        _, alive = psutil.wait_procs(running.values(), timeout=END_TIMEOUT_S)
        for process in alive:
            process.kill()


@contextmanager
def showing_logs(run_dir: Path) -> Iterator[None]:
    """On failure, show how the log of each process ends."""
    try:
        yield
    except BaseException:
        for path in sorted(run_dir.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()
            print(f"{path.name}:", *lines[-8:], sep="\n  ", file=sys.stderr)
        raise


def nats_process() -> psutil.Process:
    return next(child for child in psutil.Process().children() if child.name() == NATS)


def check_alive(watched: Mapping[str, psutil.Process]) -> None:
    """Raises RuntimeError if a process has ended."""
    ended = [name for name, process in watched.items() if not is_alive(process)]
    if ended:
        raise RuntimeError(f"ended during the measurement: {', '.join(ended)}")


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def cpu_seconds(watched: Mapping[str, psutil.Process]) -> dict[str, float]:
    """User and system time of processes and their children so far."""
    times = {name: [member.cpu_times() for member in family(process)] for name, process in watched.items()}
    return {name: sum(each.user + each.system for each in members) for name, members in times.items()}


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process] if process.pid == os.getpid() else [process, *process.children(recursive=True)]


def difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after}


def rounded(value: Any) -> Any:
    """Three digits are as many as such a measurement has."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value
