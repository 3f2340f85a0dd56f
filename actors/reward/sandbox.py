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
from actors.reward.graders.code.running import WALL_TIMES
from runtime.functions.limits import UserLimits, environment
from runtime.functions.load import file_of, is_plugin
from runtime.settings.reading.schema import functions_in
from runtime.settings.slices import split_slice
from runtime.settings.tables.reward import GraderLimits, RewardConfig
from runtime.settings.topology import Topology
from runtime.util.secrets import make_private

CODE: Final = "code"  # the grader that runs programs
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


def call_s(reward: RewardConfig, grader: str) -> float:
    """Seconds that one call of a grader may take by the clock: more for `code`, whose programs may wait for a core."""
    limit_s = reward.limits.get(grader, GraderLimits()).timeout_s or reward.timeout_s
    return limit_s + (WALL_TIMES - 1) * _programs_s(reward) if grader == CODE else limit_s


def _programs_s(reward: RewardConfig) -> float:
    """Seconds that the tests of `code` have of their own; the rest of the limit is for starting the sandbox."""
    limit_s = reward.limits.get(CODE, GraderLimits()).timeout_s or reward.timeout_s
    return max(limit_s - 2.0, limit_s / 2)


def _variables(reward: RewardConfig) -> dict[str, str]:
    """Variables that built-in graders read: the data of `ifeval`, and the time that the tests of `code` have."""
    found = {SECONDS: f"{_programs_s(reward):g}"}
    return found if reward.nltk_data is None else {**found, "NLTK_DATA": os.path.realpath(reward.nltk_data)}


def dumps_of(topology: Topology) -> tuple[str, ...]:
    """Directories of dumps, both written and read."""
    return tuple(os.path.realpath(path) for path in (topology.run.dump_details, topology.run.load) if path)


def needed_of(topology: Topology) -> tuple[str, ...]:
    """Files of the graders that the topology names."""
    named = [name for _, name, function in functions_in(topology) if function.runs_in == "grader process"]
    plugins = [file_of(name) for name in named if is_plugin(name)]
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


class Sandbox(UserLimits, frozen=True, kw_only=True):
    """Limits and sandbox of a grader process.

    `process` guards against accidents, `isolated` also hides the run's data.
    """

    kind: Literal["none", "process", "isolated"] = "process"
    also: dict[str, str] = {}  # variables that are set
    max_processes: int = 64  # running descendants of a grader process
    hidden: tuple[str, ...] = ()  # files and directories that are hidden when isolated
    runs: str | None = None  # directory whose runs are hidden when isolated
    dumps: tuple[str, ...] = ()  # dump directories that are hidden when isolated
    files: tuple[str, ...] = ()  # files with labels or credentials that are hidden when isolated
    needed: tuple[str, ...] = ()  # files of graders; they stay visible

    def environment(self) -> dict[str, str]:
        """Environment of a grader process, filtered from this process's environment."""
        kept = environment((*self.env, "OMP_NUM_THREADS"), marked=self.kind != "isolated")
        return {**kept, **self.also, "PYTHONPATH": kept["PYTHONPATH"]}

    def command(self) -> list[str]:
        """Command line that starts a grader process; its parent must be this process."""
        limited = self.kind != "none"
        settings = {
            "works": "actors.reward.worker:work",
            "prefix": "physarum-grader-",
            "sandbox": self.kind,
            "memory_bytes": self.memory_bytes,
            "max_files": self.max_files,
            "max_processes": self.max_processes if limited else None,
            "hidden": self._hidden() if self.kind == "isolated" else (),
        }
        parent, settings_json = str(os.getpid()), msgspec.json.encode(settings).decode()
        return [sys.executable, "-P", "-m", "runtime.functions.keeper", parent, settings_json]

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
