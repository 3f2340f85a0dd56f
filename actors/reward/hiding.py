"""What an isolated grader is not to see of this and other runs: labels, samples, logins, and what is stored of runs."""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from runtime.settings.plugins import is_plugin
from runtime.settings.slices import split_slice
from runtime.settings.topology import Topology

OF_A_RUN: Final = "topology.json"  # a directory that has it is that of a run, or a dump
OF_A_DUMP: Final = ("rollout_*", "topology.json", "run.json")


def files_of(topology: Topology) -> tuple[str, ...]:
    """Files and directories that hold labels, samples or logins, whichever of them are there."""
    named = [topology.bus.credentials]
    named += [split_slice(item.path)[0] for item in (*topology.data, *topology.eval) if item.path is not None]
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    return tuple(os.path.realpath(path) for path in (*named, runtime) if path)


def dumps_of(topology: Topology) -> tuple[str, ...]:
    """Directories of dumps, which are written and which are read."""
    return tuple(os.path.realpath(path) for path in (topology.run.dump_details, topology.run.load) if path)


def needed_of(topology: Topology) -> tuple[str, ...]:
    """Where graders are, and what they are run by and import from."""
    named = [*(item.rm_type for item in (*topology.data, *topology.eval)), *topology.reward.graders.values()]
    plugins = [name.rpartition(":")[0] for name in named if name is not None and is_plugin(name)]
    return tuple(place for place in plugins if place.endswith(".py"))


def hidden_now(runs: str, dumps: Sequence[str], files: Sequence[str], needed: Sequence[str]) -> Iterator[str]:
    """Paths to hide from a process that starts now.

    A directory that holds what graders need is not hidden; what it holds of runs is.

    Args:
        runs: the directory of runs.
        dumps: directories of dumps.
        files: files, and directories of data.
        needed: what graders need, beside the program and the current directory.
    """
    ours = [*_our_places(), *map(os.path.realpath, needed)]
    if not _holds_any(runs, ours):
        yield runs
    else:
        yield from (str(path.parent) for path in Path(runs).glob(f"*/{OF_A_RUN}") if not _holds_any(path.parent, ours))
    for dump in dumps:
        if not _holds_any(dump, ours):
            yield dump
        else:
            yield from (str(path) for pattern in OF_A_DUMP for path in Path(dump).glob(pattern))
    yield from (path for path in files if not _holds_any(path, ours))


def _our_places() -> list[str]:
    root = Path(__file__).resolve().parents[2]
    places = [root, os.getcwd(), sys.prefix, sys.base_prefix, os.path.dirname(sys.executable), tempfile.gettempdir()]
    places += [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    return [os.path.realpath(place) for place in places]


def _holds_any(directory: str | Path, places: Sequence[str]) -> bool:
    return any(Path(place).is_relative_to(directory) for place in places)
