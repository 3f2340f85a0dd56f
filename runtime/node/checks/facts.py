"""Facts about one node of a run, which home compares with those of the others."""

import hashlib
import os
import socket
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import msgspec

from runtime.settings.devices import gpus_here
from runtime.settings.placement import roles_of
from runtime.settings.reading.config import Problem
from runtime.settings.tables.engines import EngineConfig
from runtime.settings.topology import Topology
from runtime.util.import_path import OURS, ROOT

OWN: Final = "physarum"
TORCH: Final = "torch"
SGLANG: Final = "sglang."  # followed by the name of a pool, because pools may have interpreters of their own
SGLANG_VERSION: Final = "import importlib.metadata as m; print(m.version('sglang'))"
ASK_TIMEOUT_S: Final = 60.0
DIGITS: Final = 12  # of the digest of our source files


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one node. Every field has a default: another version may not know it."""

    host: str = ""
    address: str = ""
    gpus: int = 0
    versions: dict[str, str] = {}  # by package, of those that the node needs; see OWN, TORCH, SGLANG
    clock_ahead_s: float | None = None  # of the bus's clock; for people alone
    common_file: str = ""  # sha256 of home's file in the run directory; "": the node does not see it
    settings: dict[str, Any] = {}  # the resolved topology
    problems: tuple[Problem, ...] = ()  # of the node's own checks
    gives: dict[str, str] = {}  # in a check, of home: number and size of the files of each setting that nodes may fetch
    lacks: tuple[str, ...] = ()  # in a check: settings whose files the node would fetch


def facts_here(topology: Topology, node: str, *, problems: Iterable[Problem] = (), address: str = "") -> NodeFacts:
    """Collect the facts about this machine.

    Args:
        topology: the topology.
        node: the node that this machine is.
        problems: results of its own checks.
        address: at which its servers listen.
    """
    return NodeFacts(
        host=socket.gethostname(),
        address=address,
        gpus=gpus_here(),
        versions=dict(_versions(topology, node)),
        settings=msgspec.json.decode(msgspec.json.encode(topology)),
        problems=tuple(problems),
    )


def common_file_hash(file: Path) -> str:
    """Return the sha256 of home's file in the run directory; "" if it cannot be read here."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def _versions(topology: Topology, node: str) -> Iterator[tuple[str, str]]:
    roles = roles_of(topology, node)
    pools = {name: topology.engines[name] for name in roles.pools}
    yield OWN, own_version()
    if roles.trains or any(engine.kind == "tiny" for engine in pools.values()):
        yield TORCH, _installed(TORCH) or "none"
    for name, engine in pools.items():
        if engine.kind == "sglang":
            yield f"{SGLANG}{name}", _sglang_version(engine) or "none"


@cache
def own_version() -> str:
    """Return our version, with a digest of our source files: two checkouts of one version may differ."""
    digest = hashlib.sha256()
    for path in sorted(path for package in OURS for path in (ROOT / package).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT)}\0".encode())
        digest.update(path.read_bytes())
    return f"{_installed(OWN) or _in_checkout()}, source {digest.hexdigest()[:DIGITS]}"


def _in_checkout() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return str(project["project"]["version"])


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _sglang_version(engine: EngineConfig) -> str | None:
    if engine.python is None:
        return _installed("sglang")
    return printed([engine.python, "-c", SGLANG_VERSION], engine.env) or None


def printed(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Return what a command prints, with more environment variables; empty if it fails."""
    environment = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
