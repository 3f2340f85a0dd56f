"""Checks GPUs, interpreters, packages, external engines, and limits of open files and memory on this machine."""

import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from runtime.node.checks.context import ASKING_LIMIT_S, CheckContext
from runtime.settings.devices import gpus_here, handed_out
from runtime.settings.placement import NodeRoles, num_trainer_processes
from runtime.settings.reading.config import Problem
from runtime.settings.tables.engines import EngineConfig
from runtime.settings.tables.observe import OPENTELEMETRY, python_of
from runtime.settings.topology import POLICY, Topology, answers_are_recorded
from runtime.util.secrets import read_private

TRAINER: Final = ("torch", "megatron.core", "safetensors")
TINY_ENGINE: Final = ("torch", "safetensors")
ROUTER: Final = ("sglang_router",)
CONNECT_TIMEOUT_S: Final = 3.0
ASK_TIMEOUT_S: Final = 60.0  # an interpreter may import torch for the first time
HAS_SGLANG: Final = "import importlib.util as u, sys; sys.exit(u.find_spec('sglang') is None)"
HAS_PACKAGE: Final = (  # a folder of that name, such as W&B's own, has no origin
    "import importlib.util as u, sys; found = u.find_spec('{}'); sys.exit(found is None or found.origin is None)"
)
OTLP_PACKAGE: Final = "opentelemetry.exporter.otlp.proto.http"
HAS_GPU: Final = "import torch, sys; sys.exit(not torch.cuda.is_available())"

FILES: Final = 128  # open files of one process, besides those below
FILES_OF_RANK: Final = 8
FILES_OF_SLOT: Final = 1  # a connection per sample in flight
CGROUP: Final = Path("/sys/fs/cgroup")
CACHED: Final = ("active_file", "inactive_file")  # page cache, which the kernel frees on demand
ROOM: Final = 4  # times the needed open files, if the limit can be raised


def needed_files(topology: Topology) -> int:
    """Return the least number of open files that the busiest process needs."""
    slots = sum(engine.concurrency for engine in topology.engines.values())
    return FILES + FILES_OF_RANK * num_trainer_processes(topology) + FILES_OF_SLOT * slots


def check_open_files(context: CheckContext) -> Iterator[Problem]:
    """Check that the open file limit allows the needed pipes and connections."""
    needed, (_, hard) = needed_files(context.topology), resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        message = (
            f"a process may have {hard} files open here (ulimit -n), and this run needs {needed}: raise that limit"
        )
        yield Problem(key="", message=message)


def raise_open_files(topology: Topology) -> None:
    """Raise the soft limit on open files to the need of this run, for all its processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ROOM * needed_files(topology)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def free_memory_bytes(cgroup: Path = CGROUP) -> int:
    """Return the free memory of this machine, or of our cgroup, in bytes.

    Args:
        cgroup: directory of our cgroup.
    """
    info = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(info["MemAvailable"].split()[0]) * 1024
    try:
        most, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        uses = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        cached = sum(int(uses[name]) for name in CACHED)
    except (OSError, ValueError, KeyError):  # no limit, or not cgroup v2
        return free
    return min(free, most - used + cached)


class Needed(NamedTuple):
    """Packages that a setting needs in our own interpreter."""

    key: str
    value: str
    packages: tuple[str, ...]
    extra: str  # our pip extra that installs them


def check_machine(context: CheckContext) -> Iterator[Problem]:
    """Check what is installed and reachable."""
    topology, roles = context.topology, context.roles
    yield from check_open_files(context)
    context.doing("trainer.device", topology.trainer.device, "counting GPUs with torch", limit_s=ASKING_LIMIT_S)
    yield from _check_gpus(context)
    for needed in _needed(topology, roles):
        absent = [name for name in needed.packages if not _is_installed(name)]
        if absent:
            missing = ", ".join(absent)
            message = f'needs {missing}, not installed here: run bin/setup, or pip install "physarum[{needed.extra}]"'
            yield Problem.of(needed.key, needed.value, message)
    for name, engine in topology.engines.items() if not answers_are_recorded(topology) else ():
        if name not in roles.pools and not (engine.urls and roles.is_home):
            continue  # other nodes start these engines
        context.doing(f"engines.{name}", engine.kind, "querying its interpreter or servers", limit_s=ASKING_LIMIT_S)
        yield from _check_engine(context, f"engines.{name}", engine)
    if roles.is_home:
        yield from _check_trackers(context)


def _check_trackers(context: CheckContext) -> Iterator[Problem]:
    """Check that trackers have their packages and keys. No server is contacted."""
    observe = context.topology.observe
    for name, tracker in observe.trackers().items():
        yield from _check_tracker(context, f"observe.{name}.enabled", True, name, name, tracker.python)
    if observe.otlp.endpoint is not None:
        key, endpoint = "observe.otlp.endpoint", observe.otlp.endpoint
        yield from _check_tracker(context, key, endpoint, OPENTELEMETRY, OTLP_PACKAGE, observe.otlp.python)
    for key, on, path in (
        ("observe.wandb.key_file", observe.wandb.enabled, observe.wandb.key_file),
        ("observe.swanlab.key_file", observe.swanlab.enabled, observe.swanlab.key_file),
    ):
        try:
            if on and path is not None:
                read_private(Path(path))
        except (OSError, ValueError) as error:
            yield Problem.of(key, path, str(error))


def _check_tracker(
    context: CheckContext, key: str, value: str | bool, name: str, package: str, set_python: str | None
) -> Iterator[Problem]:
    """Check that a tracker's interpreter has its package."""
    python = python_of(name, set_python)
    context.doing(key, python, "looking for its package", limit_s=ASKING_LIMIT_S)
    if shutil.which(python) is None:
        yield context.missing(f"{key.rpartition('.')[0]}.python", python, "no such interpreter")
    elif not _answers(python, HAS_PACKAGE.format(package)):
        yield Problem.of(key, value, f"needs {name}, not installed in {python}: run bin/setup --with {name}")


def _check_gpus(context: CheckContext) -> Iterator[Problem]:
    topology, node = context.topology, context.node
    if node not in topology.nodes:
        return
    wanted, found = topology.nodes[node].gpus, gpus_here()
    if wanted > found:
        given = handed_out(os.environ)
        why = "" if given is None else f" for this process: {', '.join(given) or 'none'}, by its environment variables"
        yield Problem.of(f"nodes.{node}.gpus", wanted, f"this machine has {found} GPUs{why}")
    elif (
        context.roles.trains
        and topology.trainer.device == "cuda"
        and _is_installed("torch")
        and not _answers(sys.executable, HAS_GPU)
    ):
        message = "torch finds no GPU here: it is a CPU build, or the driver is missing"
        yield Problem.of("trainer.device", "cuda", message)


def _needed(topology: Topology, roles: NodeRoles) -> Iterator[Needed]:
    if roles.trains:
        yield Needed("trainer.device", topology.trainer.device, TRAINER, "trainer")
    if answers_are_recorded(topology):
        return
    for name, engine in topology.engines.items():
        key = f"engines.{name}.kind"
        if roles.generates and name == POLICY and engine.router == "sglang-router" and engine.router_url is None:
            yield Needed(f"engines.{name}.router", engine.router, ROUTER, "router")
        if engine.kind == "tiny" and name in roles.pools:
            yield Needed(key, engine.kind, TINY_ENGINE, "engine")


def _check_engine(context: CheckContext, key: str, engine: EngineConfig) -> Iterator[Problem]:
    for url in engine.urls:
        if (failure := _unreachable(url, 80)) is not None:
            yield Problem.of(f"{key}.urls", url, f"no engine answers there: {failure}")
    if engine.kind != "sglang":
        return
    context.notes.append(
        f'{key}.kind = "sglang": tested on the CPU alone; docs/results/verified.md says what was verified'
    )
    if engine.urls:
        return
    if engine.python is None:
        if not _is_installed("sglang"):
            message = f"SGLang is not installed in this interpreter: name one that has it with {key}.python"
            yield Problem.of(f"{key}.kind", engine.kind, f'{message}; or kind = "tiny", for tiny models')
    elif shutil.which(engine.python) is None:
        yield context.missing(f"{key}.python", engine.python, "no such interpreter")
    elif not _answers(engine.python, HAS_SGLANG, engine.env):
        yield Problem.of(f"{key}.python", engine.python, "SGLang is not installed in this interpreter")


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _answers(python: str, code: str, env: Mapping[str, str] | None = None) -> bool:
    """Return whether an interpreter runs this code with exit code 0."""
    environment = {**os.environ, **(env or {})}
    try:
        asked = subprocess.run(
            [python, "-c", code], env=environment, capture_output=True, timeout=ASK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


def _unreachable(url: str, default_port: int) -> str | None:
    """Return why no connection to a URL is possible, or None."""
    parts = urlsplit(url)
    try:
        port = parts.port or {"https": 443, "wss": 443, "ws": 80}.get(parts.scheme, default_port)
        with socket.create_connection((parts.hostname or "", port), timeout=CONNECT_TIMEOUT_S):
            return None
    except (OSError, ValueError) as error:
        return str(error)
