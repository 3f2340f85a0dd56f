"""Sandbox settings of graders: environment variables, resource limits and hidden paths."""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import msgspec

from actors.reward.graders.code.grader import SECONDS
from runtime.process.user_limits import AGENT_MARK, PASSED_ON
from runtime.settings.plugins import file_of, is_plugin
from runtime.settings.slices import split_slice
from runtime.settings.tables.reward import GraderLimits, RewardConfig
from runtime.settings.topology import Topology
from runtime.util.secrets import make_private

ROOT: Final = Path(__file__).resolve().parents[2]  # import path of `actors`
RUN_DIR: Final = "PHYSARUM_RUN_DIR"


OF_A_RUN: Final = "topology.json"  # marks the directory of a run or a dump
OF_A_DUMP: Final = ("rollout_*", "topology.json", "run.json")


def files_of(topology: Topology) -> tuple[str, ...]:
    """Files and directories with labels, samples or credentials; some may not exist."""
    named = [topology.bus.credentials]
    named += [split_slice(item.path)[0] for item in (*topology.data, *topology.eval) if item.path is not None]
    named += [split_slice(path)[0] for item in topology.data for path in item.files.values()]
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    named += [topology.reward.rm_api_key_file]
    named += [judge.api_key_file for judge in topology.reward.judges.values()]
    return tuple(os.path.realpath(path) for path in (*named, runtime) if path)


def _variables(reward: RewardConfig) -> dict[str, str]:
    """Variables that built-in graders read: the data of `ifeval`, and the time that the tests of `code` have."""
    limits = reward.limits.get("code", GraderLimits())
    call_s = limits.timeout_s or reward.timeout_s
    found = {SECONDS: f"{max(call_s - 2.0, call_s / 2):g}"}  # the rest is for starting the sandbox
    return found if reward.nltk_data is None else {**found, "NLTK_DATA": os.path.realpath(reward.nltk_data)}


def dumps_of(topology: Topology) -> tuple[str, ...]:
    """Directories of dumps, both written and read."""
    return tuple(os.path.realpath(path) for path in (topology.run.dump_details, topology.run.load) if path)


def needed_of(topology: Topology) -> tuple[str, ...]:
    """Files of the graders that the topology names."""
    named = [*(item.rm_type for item in (*topology.data, *topology.eval)), *topology.reward.graders.values()]
    named += [judge.parser for judge in topology.reward.judges.values()]
    plugins = [file_of(name) for name in named if name is not None and is_plugin(name)]
    return tuple(place for place in plugins if place.endswith(".py"))


def hidden_now(runs: str, dumps: Sequence[str], files: Sequence[str], needed: Sequence[str]) -> Iterator[str]:
    """Yield the paths to hide from a process that starts now.

    A directory that contains something graders need stays visible; the runs and dumps inside it are hidden.

    Args:
        runs: the directory of runs.
        dumps: directories of dumps.
        files: data files, and data directories.
        needed: paths that graders need, in addition to the program and the current directory.
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


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    """Sandbox of a grader process. `process` guards against accidents, `isolated` also hides the run's data."""

    kind: Literal["none", "process", "isolated"] = "process"
    env: tuple[str, ...] = ()  # further variables that are passed on
    also: dict[str, str] = {}  # variables that are set
    memory_bytes: int = 8 << 30  # limit of data memory per process
    max_files: int = 1024  # open files per process
    max_processes: int = 64  # running descendants of a grader process
    hidden: tuple[str, ...] = ()  # files and directories that are hidden when isolated
    runs: str | None = None  # directory whose runs are hidden when isolated
    dumps: tuple[str, ...] = ()  # dump directories that are hidden when isolated
    files: tuple[str, ...] = ()  # files with labels or credentials that are hidden when isolated
    needed: tuple[str, ...] = ()  # files of graders; they stay visible

    def environment(self) -> dict[str, str]:
        """Environment of a grader process, filtered from this process's environment."""
        wanted = {*PASSED_ON, *self.env}
        if self.kind != "isolated":
            wanted.add(AGENT_MARK)
        kept = {name: value for name, value in os.environ.items() if name in wanted or name.startswith("LC_")}
        places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        # one thread each: parallelism comes from the number of processes
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        return {**threads, **kept, **self.also, "PYTHONPATH": os.pathsep.join(places)}

    def command(self) -> list[str]:
        """Command line that starts a grader process; its parent must be this process."""
        limited = self.kind != "none"
        settings = {
            "sandbox": self.kind,
            "memory_bytes": self.memory_bytes,
            "max_files": self.max_files,
            "max_processes": self.max_processes if limited else None,
            "hidden": self._hidden() if self.kind == "isolated" else (),
        }
        parent, settings_json = str(os.getpid()), msgspec.json.encode(settings).decode()
        return [sys.executable, "-P", "-m", "actors.reward.keeper", parent, settings_json]

    def _hidden(self) -> tuple[str, ...]:
        found = hidden_now(self.runs, self.dumps, self.files, self.needed) if self.runs is not None else ()
        return tuple(dict.fromkeys((*self.hidden, *found)))


def run_dir_of(topology: Topology) -> str:
    """The directory of the run."""
    return os.environ.get(RUN_DIR) or str(Path(topology.run.dir) / topology.run.name)


def sandbox_of(topology: Topology) -> Sandbox:
    """The sandbox that the topology configures."""
    reward = topology.reward
    if reward.sandbox == "isolated" and topology.run.dump_details is not None:
        with suppress(OSError):  # a missing directory cannot be hidden; the buffer reports the error
            make_private(Path(topology.run.dump_details))
    return Sandbox(
        kind=reward.sandbox,
        env=reward.env,
        also=_variables(reward),
        memory_bytes=reward.memory_bytes,
        max_files=reward.max_files,
        max_processes=reward.max_processes,
        hidden=(os.path.realpath(run_dir_of(topology)),),
        runs=os.path.realpath(topology.run.dir),
        dumps=dumps_of(topology),
        files=files_of(topology),
        needed=needed_of(topology),
    )
