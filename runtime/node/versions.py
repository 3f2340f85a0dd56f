"""Versions of what a run uses, which each node records in the run directory when it starts.

A line is added when they differ from those of the node's last start, so that a report of a resumed run names all.
"""

import platform
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

from runtime.bus.nats.server import BINARY, server_binary
from runtime.node.checks.facts import OWN, own_version, printed
from runtime.settings.placement import bus_node, roles_of
from runtime.settings.topology import Topology
from runtime.util.files import write_atomically
from runtime.util.import_path import ROOT

VERSIONS_FILE: Final = "versions-{}.jsonl"  # of a node
PACKAGES: Final = ("torch", "megatron-core", "transformers", "nats-py", "msgspec")
POOL_PACKAGES: Final = ("sglang", "torch", "transformers")
PYTHON: Final = "Python"
UNKNOWN: Final = "unknown"
KEPT: Final = 8  # newest records of a node
MAX_CHARS: Final = 200  # of a version
ASK: Final = """
import importlib.metadata as m, json, platform, sys
found = {"Python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file: the versions of a node since a start."""

    node: str
    since: float  # Unix time
    versions: dict[str, str]  # by name; those of an engine pool with an interpreter of its own begin with its key


def record_versions(run_dir: Path, topology: Topology, node: str) -> None:
    """Record the versions of this node, if they differ from those of its last start.

    Raises:
        OSError: the run directory cannot be written.
    """
    found, path = dict(_versions(topology, node)), run_dir / VERSIONS_FILE.format(node)
    known = _records(path)
    if not known or known[-1].versions != found:
        kept = [*known, Recorded(node=node, since=time.time(), versions=found)][-KEPT:]
        write_atomically(path, b"".join(msgspec.json.encode(record) + b"\n" for record in kept))


def versions_in(run_dir: Path) -> dict[str, str]:
    """Return the versions that nodes recorded in a run directory, by node and name, the newest first.

    Nodes with a directory of their own are missing. A file or line that cannot be read is left out.
    """
    shown: dict[str, str] = {}
    for path in sorted(run_dir.glob(VERSIONS_FILE.format("*"))):
        records = _records(path)
        for name in dict.fromkeys(name for record in reversed(records) for name in record.versions):
            values = [record.versions.get(name, "none")[:MAX_CHARS] for record in reversed(records)]
            newest, *earlier = dict.fromkeys(values)
            shown[f"{records[-1].node}: {name}"] = f"{newest} (earlier {', '.join(earlier)})" if earlier else newest
    return shown


def _records(path: Path) -> list[Recorded]:
    """Return the newest records of a file. A line that cannot be read is left out."""
    records: list[Recorded] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    for line in lines[-KEPT:]:
        try:
            records.append(msgspec.json.decode(line, type=Recorded))
        except (ValueError, RecursionError):
            continue
    return records


def _versions(topology: Topology, node: str) -> Iterator[tuple[str, str]]:
    commit = printed(["git", "-C", str(ROOT), "rev-parse", "HEAD"]) if (ROOT / ".git").exists() else ""
    yield OWN, own_version() + (f", commit {commit}" if commit else "")
    yield PYTHON, platform.python_version()
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue  # as on a node without the trainer
    if bus_node(topology) == node:
        yield BINARY, _server_version()
    for pool in roles_of(topology, node).pools:
        engine = topology.engines[pool]
        if engine.kind == "sglang":
            for name, value in _of_interpreter(engine.python or sys.executable, engine.env).items():
                yield f"engines.{pool}: {name}", value


def _server_version() -> str:
    try:
        return printed([str(server_binary()), "--version"]).rpartition(" ")[2] or UNKNOWN
    except FileNotFoundError:
        return UNKNOWN


def _of_interpreter(python: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the versions that an engine pool's interpreter finds."""
    try:
        return msgspec.json.decode(printed([python, "-c", ASK, *POOL_PACKAGES], env), type=dict[str, str])
    except ValueError:
        return {"sglang": UNKNOWN}
