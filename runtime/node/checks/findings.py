"""Findings of the pre-start checks: problems that refuse a start, and notes."""

from collections.abc import Iterator

import msgspec

from runtime.node.checks.apart import Doing, unlimited
from runtime.node.checks.hub import HubModel, hub_models
from runtime.settings.load import LoadedTopology, places
from runtime.settings.reading.config import Problem


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the pre-start checks. Without problems, the run can start on this machine."""

    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()  # useful to know
    left_out: tuple[str, ...] = ()  # skipped checks, if the run is to start elsewhere


class Findings:
    """Collects problems, each with the file that set its key."""

    def __init__(self, loaded: LoadedTopology, doing: Doing = unlimited) -> None:
        self.topology = loaded.topology
        self.doing = doing
        self._whole = loaded
        self._loaded = loaded.loaded
        self._problems: list[Problem] = []
        self.notes: list[str] = []

    def add(self, problem: Problem) -> None:
        """Add a problem."""
        self._problems.append(msgspec.structs.replace(problem, file=self._loaded.origin(problem.key)))

    def problem(self, key: str, value: object, message: str) -> None:
        """Add a problem of a key's value."""
        self.add(Problem.of(key, value, message))

    def missing(self, key: str, value: str, message: str) -> None:
        """Add a missing path, with the places that were searched."""
        self.problem(key, value, f"{message} (looked in {', '.join(map(str, places(self._loaded, key)))})")

    def hub_models(self) -> Iterator[HubModel]:
        """Yield models with hub names that are not directories."""
        return hub_models(self._whole)

    def has(self, key: str) -> bool:
        """Return whether a key already has a problem."""
        return any(problem.key == key for problem in self._problems)

    def checked(self, left_out: tuple[str, ...] = ()) -> Checked:
        """Return all findings."""
        return Checked(problems=tuple(self._problems), notes=tuple(self.notes), left_out=left_out)
