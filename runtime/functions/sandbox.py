"""Limits of users' code behind a keeper: it is isolated, its processes are counted, and all of them end with it."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from runtime.functions.hidden_files import hidden_now
from runtime.functions.limits import UserLimits, environment, keeper_command


class Sandbox(UserLimits, frozen=True, kw_only=True):
    """Limits and sandbox of a process behind a keeper.

    `process` guards against accidents, `isolated` also hides the run's data.
    """

    is_kept: ClassVar[bool] = True

    kind: Literal["none", "process", "isolated"] = "process"
    also: dict[str, str] = {}  # variables that are set
    max_processes: int = 64  # running descendants of the process
    hidden: tuple[str, ...] = ()  # files and directories that are hidden when isolated
    runs: str | None = None  # directory whose runs are hidden when isolated
    dumps: tuple[str, ...] = ()  # dump directories that are hidden when isolated
    files: tuple[str, ...] = ()  # files with labels or credentials that are hidden when isolated
    needed: tuple[str, ...] = ()  # files of the function; they stay visible

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the process, filtered from those of this process."""
        kept = environment((*self.env, "OMP_NUM_THREADS"), marked=self.kind != "isolated")
        return {**kept, **self.also, "PYTHONPATH": kept["PYTHONPATH"]}

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command line of the process; its parent must be this process. Arguments as of `UserLimits`."""
        return keeper_command(
            {
                "words": words,
                "refused": 'reward.sandbox = "isolated": this machine cannot isolate graders',
                "prefix": "physarum-grader-",
                "sandbox": self.kind,
                "memory_bytes": self.memory_bytes,
                "max_files": self.max_files,
                "max_processes": None if self.kind == "none" else self.max_processes,
                "hidden": self._hidden() if self.kind == "isolated" else (),
            }
        )

    def _hidden(self) -> tuple[str, ...]:
        found = hidden_now(self.runs, self.dumps, self.files, self.needed) if self.runs is not None else ()
        return tuple(dict.fromkeys((*self.hidden, *found)))
