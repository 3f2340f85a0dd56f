"""Checks GPUs, interpreters, packages and external engines on this machine."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from runtime.node.checks.findings import Findings
from runtime.node.checks.limits import check_open_files
from runtime.settings.devices import gpus_here, handed_out
from runtime.settings.topology import EngineConfig, Topology, answers_are_recorded

TRAINER: Final = ("torch", "megatron.core", "safetensors")
TINY_ENGINE: Final = ("torch", "safetensors")
ROUTER: Final = ("sglang_router",)
CONNECT_TIMEOUT_S: Final = 3.0
ASK_TIMEOUT_S: Final = 60.0  # an interpreter may import torch for the first time
HAS_SGLANG: Final = "import importlib.util as u, sys; sys.exit(u.find_spec('sglang') is None)"
HAS_GPU: Final = "import torch, sys; sys.exit(not torch.cuda.is_available())"


class Needed(NamedTuple):
    """Packages that a setting needs in our own interpreter."""

    key: str
    value: str
    packages: tuple[str, ...]
    extra: str  # our pip extra that installs them


def check_machine(findings: Findings, node: str) -> None:
    """Check what is installed and reachable.

    Args:
        node: the node that this machine is.
    """
    topology = findings.topology
    check_open_files(findings)
    findings.doing("trainer.device", topology.trainer.device, "asking torch for GPUs", limit_s=2 * ASK_TIMEOUT_S)
    _check_gpus(findings, node)
    for needed in _needed(topology):
        absent = [name for name in needed.packages if not _is_installed(name)]
        if absent:
            message = (
                f'needs {", ".join(absent)}, not installed here: bin/setup, or pip install "physarum[{needed.extra}]"'
            )
            findings.problem(needed.key, needed.value, message)
    for name, engine in topology.engines.items() if not answers_are_recorded(topology) else ():
        findings.doing(f"engines.{name}", engine.kind, "asking its interpreter or servers", limit_s=2 * ASK_TIMEOUT_S)
        _check_engine(findings, f"engines.{name}", engine)


def _check_gpus(findings: Findings, node: str) -> None:
    topology = findings.topology
    if node not in topology.nodes:
        return
    asked, found = topology.nodes[node].gpus, gpus_here()
    if asked > found:
        given = handed_out(os.environ)
        why = "" if given is None else f" for us: {', '.join(given) or 'none'}, by its environment"
        findings.problem(f"nodes.{node}.gpus", asked, f"this machine has {found} GPUs{why}")
    elif topology.trainer.device == "cuda" and _is_installed("torch") and not _answers(sys.executable, HAS_GPU):
        message = "torch finds no GPU here: its build is for the CPU, or the driver is missing"
        findings.problem("trainer.device", "cuda", message)


def _needed(topology: Topology) -> Iterator[Needed]:
    if topology.run.only != "rollout":
        yield Needed("trainer.device", topology.trainer.device, TRAINER, "trainer")
    if answers_are_recorded(topology):
        return
    for name, engine in topology.engines.items():
        key = f"engines.{name}.kind"
        yield Needed(key, engine.kind, ROUTER, "router")
        if engine.kind == "tiny" and not engine.urls:
            yield Needed(key, engine.kind, TINY_ENGINE, "engine")


def _check_engine(findings: Findings, key: str, engine: EngineConfig) -> None:
    for url in engine.urls:
        if (failure := _unreachable(url, 80)) is not None:
            findings.problem(f"{key}.urls", url, f"no engine answers there: {failure}")
    if engine.kind != "sglang":
        return
    findings.notes.append(
        f'{key}.kind = "sglang": tested on the CPU alone; docs/develop/verified.md says what was verified'
    )
    if engine.urls:
        return
    if engine.python is None:
        if not _is_installed("sglang"):
            message = f"SGLang is not installed beside us: name an interpreter that has it with {key}.python"
            findings.problem(f"{key}.kind", engine.kind, f'{message}; or kind = "tiny", for tiny models')
    elif shutil.which(engine.python) is None:
        findings.missing(f"{key}.python", engine.python, "no such interpreter")
    elif not _answers(engine.python, HAS_SGLANG, engine.env):
        findings.problem(f"{key}.python", engine.python, "SGLang is not installed in this interpreter")


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
