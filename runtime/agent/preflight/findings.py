"""What a look at this machine has found: why a start would be refused, and what is worth knowing."""

from collections.abc import Iterator

import msgspec

from runtime.agent.preflight.apart import Doing, unlimited
from runtime.agent.preflight.hub import HubModel, hub_models
from runtime.settings.load import LoadedTopology, places
from runtime.settings.reading.config import Problem


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out. Without problems, a start on this machine goes."""

    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()  # what is worth knowing
    left_out: tuple[str, ...] = ()  # what was not looked at, since the run is to be elsewhere


class Findings:
    """Collects problems, each with the file that wrote its key."""

    def __init__(self, loaded: LoadedTopology, doing: Doing = unlimited) -> None:
        self.topology = loaded.topology
        self.doing = doing
        self._whole = loaded
        self._loaded = loaded.loaded
        self._problems: list[Problem] = []
        self.notes: list[str] = []

    def add(self, problem: Problem) -> None:
        """Keep a problem."""
        self._problems.append(msgspec.structs.replace(problem, file=self._loaded.origin(problem.key)))

    def problem(self, key: str, value: object, message: str) -> None:
        """Keep what is wrong with the value of a key."""
        self.add(Problem.of(key, value, message))

    def missing(self, key: str, value: str, message: str) -> None:
        """Keep that a path is not there, and where it was looked for."""
        self.problem(key, value, f"{message} (looked in {', '.join(map(str, places(self._loaded, key)))})")

    def hub_models(self) -> Iterator[HubModel]:
        """Models that are named as on the hub, and no directories."""
        return hub_models(self._whole)

    def has(self, key: str) -> bool:
        """Whether something is wrong with a key already."""
        return any(problem.key == key for problem in self._problems)

    def checked(self, left_out: tuple[str, ...] = ()) -> Checked:
        """All of it."""
        return Checked(problems=tuple(self._problems), notes=tuple(self.notes), left_out=left_out)
