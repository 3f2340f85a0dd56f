"""Sandbox settings of graders: environment variables, resource limits and hidden paths."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import msgspec

from actors.reward.hiding import dumps_of, files_of, hidden_now, needed_of
from runtime.settings.topology import Topology
from runtime.util.secrets import make_private

ROOT: Final = Path(__file__).resolve().parents[2]  # import path of `actors`
PASSED_ON: Final = (  # environment variables that every grader gets
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    *("PYTHONHASHSEED", "PYTHONUNBUFFERED", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
AGENT_MARK: Final = "PHYSARUM_AGENT"  # lets a node daemon find leftover processes of its run; no secret
RUN_DIR: Final = "PHYSARUM_RUN_DIR"


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    """Sandbox of a grader process. `process` guards against accidents, `isolated` also hides the run's data."""

    kind: Literal["none", "process", "isolated"] = "process"
    env: tuple[str, ...] = ()  # further variables that are passed on
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
        return {**threads, **kept, "PYTHONPATH": os.pathsep.join(places)}

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


def sandbox_of(topology: Topology) -> Sandbox:
    """The sandbox that the topology configures."""
    reward = topology.reward
    run_dir = os.environ.get(RUN_DIR) or str(Path(topology.run.dir) / topology.run.name)
    if reward.sandbox == "isolated" and topology.run.dump_details is not None:
        with suppress(OSError):  # a missing directory cannot be hidden; the buffer reports the error
            make_private(Path(topology.run.dump_details))
    return Sandbox(
        kind=reward.sandbox,
        env=reward.env,
        memory_bytes=reward.memory_bytes,
        max_files=reward.max_files,
        max_processes=reward.max_processes,
        hidden=(os.path.realpath(run_dir),),
        runs=os.path.realpath(topology.run.dir),
        dumps=dumps_of(topology),
        files=files_of(topology),
        needed=needed_of(topology),
    )
