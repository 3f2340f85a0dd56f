"""The files and directories of a run that isolated processes do not see: runs, dumps, labels, credentials."""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from runtime.settings.slices import split_slice
from runtime.settings.topology import Topology
from runtime.util.secrets import make_private

RUN_DIR: Final = "PHYSARUM_RUN_DIR"
OF_A_RUN: Final = "topology.json"  # marks the directory of a run or a dump
OF_A_DUMP: Final = ("rollout_*", "topology.json", "run.json")


def run_dir_of(topology: Topology) -> Path:
    """Return the directory of the run on this node."""
    return Path(os.environ.get(RUN_DIR) or Path(topology.run.dir) / topology.run.name)


def files_of(topology: Topology) -> tuple[str, ...]:
    """Files and directories with labels, samples or credentials; some may not exist."""
    named = [topology.bus.credentials]
    named += [split_slice(item.path)[0] for item in (*topology.data, *topology.eval) if item.path is not None]
    named += [split_slice(path)[0] for item in topology.data for path in item.files.values()]
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    named += [topology.reward.rm_api_key_file]
    named += [judge.api_key_file for judge in topology.reward.judges.values()]
    return tuple(os.path.realpath(path) for path in (*named, runtime) if path)


def dumps_of(topology: Topology) -> tuple[str, ...]:
    """Directories of dumps, both written and read."""
    return tuple(os.path.realpath(path) for path in (topology.run.dump_details, topology.run.load) if path)


def make_dumps(topology: Topology) -> None:
    """Make the directory of the dumps that the run writes: one that is missing cannot be hidden."""
    if topology.run.dump_details is not None:
        with suppress(OSError):  # the buffer reports the error
            make_private(Path(topology.run.dump_details))


def hidden_of(topology: Topology, needed: Sequence[str]) -> tuple[str, ...]:
    """Return the paths of a run to hide from a process that starts now; `needed` as of `hidden_now`."""
    runs = os.path.realpath(topology.run.dir)
    found = hidden_now(runs, dumps_of(topology), files_of(topology), needed)
    return tuple(dict.fromkeys((os.path.realpath(run_dir_of(topology)), *found)))


def hidden_now(runs: str, dumps: Sequence[str], files: Sequence[str], needed: Sequence[str]) -> Iterator[str]:
    """Yield the paths to hide from a process that starts now.

    A directory that contains something that the process needs stays visible; the runs and dumps inside it are hidden.

    Args:
        runs: the directory of runs.
        dumps: directories of dumps.
        files: data files, and data directories.
        needed: paths that the process needs, in addition to the program and the current directory.
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
