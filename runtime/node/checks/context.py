"""The form of all pre-start checks: functions that get a context and yield problems."""

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from messages import Prompt
from runtime.node.checks.apart import Doing, unlimited
from runtime.settings.load import LoadedTopology, places
from runtime.settings.placement import home_node, roles_of
from runtime.settings.reading.config import Problem
from runtime.settings.tables.reward import RewardConfig

ASKING_LIMIT_S: Final = 120.0  # of an activity that asks servers or interpreters, which have their own limits too

MODEL: Final = "model.hf_checkpoint"


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the pre-start checks. Without problems, the run can start on this machine."""

    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()  # useful to know
    left_out: tuple[str, ...] = ()  # skipped checks, if the run is to start elsewhere


class CheckContext:
    """What a check knows and reports besides problems. Runs checks, and adds the file that set a problem's key.

    Args:
        loaded: the topology.
        node: the topology's name for this machine; None: the node with the bus.
        fresh: the start discards an existing run of this name.
        elsewhere: the run is to start on other machines: what only these can answer is not checked.
        coming: settings whose files come from home at a start; they are checked then.
        doing: called before each activity with the key, the value and a description.
    """

    def __init__(
        self,
        loaded: LoadedTopology,
        node: str | None = None,
        *,
        fresh: bool = False,
        elsewhere: bool = False,
        coming: Collection[str] = (),
        doing: Doing = unlimited,
    ) -> None:
        self.loaded = loaded
        self.topology = loaded.topology
        self.node = node or home_node(loaded.topology)
        self.roles = roles_of(loaded.topology, self.node)
        self.fresh = fresh
        self.elsewhere = elsewhere
        self.coming = frozenset(coming)
        self.doing = doing
        self.notes: list[str] = []  # checks append to them
        self.left_out: tuple[str, ...] = ()
        self.problems: tuple[Problem, ...] = ()

    def run(self, *checks: "Check") -> None:
        """Run checks in their order. Each knows the problems of those before it."""
        for check in checks:
            found = [msgspec.structs.replace(each, file=self.loaded.loaded.origin(each.key)) for each in check(self)]
            self.problems += tuple(found)

    def has(self, key: str) -> bool:
        """Return whether an earlier check found a problem of a key."""
        return any(problem.key == key for problem in self.problems)

    def missing(self, key: str, value: str, message: str) -> Problem:
        """Return the problem of a missing path, with the places that were searched."""
        return Problem.of(key, value, f"{message} (looked in {', '.join(map(str, self.places(key)))})")

    def places(self, key: str) -> tuple[Path, ...]:
        """Return the directories in which the relative path of a key is looked up."""
        return places(self.loaded.loaded, key)

    def checked(self) -> Checked:
        """Return what all checks found."""
        return Checked(problems=self.problems, notes=tuple(self.notes), left_out=self.left_out)


class SourceRows(msgspec.Struct):
    """A data source or an evaluation set, and what is known of its usable rows once they are read."""

    key: str  # of its settings table, such as "data.0"
    place_key: str  # the setting that names its file, function or class
    place: str
    max_response_len: int = 0  # tokens
    first: Prompt | None = None
    others: list[Prompt] = []  # some of the further ones with its grader, over the whole source
    longest: int = 0  # tokens of the longest prompt


RowsCheck = Callable[[SourceRows, Sequence[Prompt], RewardConfig], Problem | None]
Check = Callable[[CheckContext], Iterator[Problem]]


class Checks(NamedTuple):
    """The checks of an actor. Each kind follows that before it, of all actors."""

    settings: tuple[Check, ...] = ()  # also if the run is to start elsewhere
    machine: tuple[Check, ...] = ()
    model: tuple[Check, ...] = ()  # whether the actor can use the model; refusals of the model end the checks
    contents: tuple[Check, ...] = ()  # what needs a usable model: weights, data, other models
