"""What graders may use and see: the environment that is passed on, limits, and what is hidden from them."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import msgspec

from actors.reward.hiding import dumps_of, files_of, hidden_now, needed_of
from runtime.secrets import make_private
from runtime.settings.topology import Topology

ROOT: Final = Path(__file__).resolve().parents[2]  # where `actors` can be imported from
PASSED_ON: Final = (  # of the environment, to every grader
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    *("PYTHONHASHSEED", "PYTHONUNBUFFERED", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
AGENT_MARK: Final = "PHYSARUM_AGENT"  # by which an agent finds what a process of its run left; no secret
RUN_DIR: Final = "PHYSARUM_RUN_DIR"


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    """How a grader process is kept. `process` guards against accidents, `isolated` also against curiosity."""

    kind: Literal["none", "process", "isolated"] = "process"
    env: tuple[str, ...] = ()  # variables that are passed on beside PASSED_ON
    memory_bytes: int = 8 << 30  # of data, of each process
    max_files: int = 1024  # open at a time, in each process
    max_processes: int = 64  # that a grader process has started and that still run
    hidden: tuple[str, ...] = ()  # files and directories, when isolated
    runs: str | None = None  # the directory of runs, whose runs are hidden when isolated
    dumps: tuple[str, ...] = ()  # directories whose samples are
    files: tuple[str, ...] = ()  # with labels or logins, which are too
    needed: tuple[str, ...] = ()  # files of graders, which are not

    def environment(self) -> dict[str, str]:
        """What of this process's environment a grader process gets."""
        wanted = {*PASSED_ON, *self.env}
        if self.kind != "isolated":
            wanted.add(AGENT_MARK)
        kept = {name: value for name, value in os.environ.items() if name in wanted or name.startswith("LC_")}
        places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        # one thread each: there are as many processes as wanted, and more threads only get in their way
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        return {**threads, **kept, "PYTHONPATH": os.pathsep.join(places)}

    def command(self) -> list[str]:
        """Starts a grader process, to be run by its parent."""
        limited = self.kind != "none"
        settings = {
            "sandbox": self.kind,
            "memory_bytes": self.memory_bytes,
            "max_files": self.max_files,
            "max_processes": self.max_processes if limited else None,
            "hidden": self._hidden() if self.kind == "isolated" else (),
        }
        parent, told = str(os.getpid()), msgspec.json.encode(settings).decode()
        return [sys.executable, "-P", "-m", "actors.reward.keeper", parent, told]

    def _hidden(self) -> tuple[str, ...]:
        found = hidden_now(self.runs, self.dumps, self.files, self.needed) if self.runs is not None else ()
        return tuple(dict.fromkeys((*self.hidden, *found)))


def sandbox_of(topology: Topology) -> Sandbox:
    """What the topology says of graders."""
    reward = topology.reward
    run_dir = os.environ.get(RUN_DIR) or str(Path(topology.run.dir) / topology.run.name)
    if reward.sandbox == "isolated" and topology.run.dump_details is not None:
        with suppress(OSError):  # what is not there yet cannot be hidden; the buffer says why it cannot be made
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
