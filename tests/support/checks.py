"""Runs pre-start checks on topologies, also on those that no file contains."""

from pathlib import Path
from typing import Any

from actors.preflight import check_functions
from actors.reward.preflight import CHECKS
from runtime.node.checks.check import check_here
from runtime.node.checks.context import Check, CheckContext
from runtime.settings.load import LoadedTopology
from runtime.settings.reading.config import Problem
from runtime.settings.reading.toml import Loaded
from runtime.settings.topology import Topology

NOWHERE = Loaded(tables={}, files=(Path(),), origins={})


def context_of(topology: Topology | LoadedTopology, **options: Any) -> CheckContext:
    """The context of checks, with its options."""
    if isinstance(topology, Topology):
        topology = LoadedTopology(topology=topology, loaded=NOWHERE)
    return CheckContext(topology, **options)


def problems_of(
    topology: Topology | LoadedTopology, *checks: Check, broken: tuple[Problem, ...] = (), **options: Any
) -> list[Problem]:
    """Problems that checks find, without the files of their keys; keys of `broken` have a problem already."""
    context = context_of(topology, **options)
    context.problems = broken
    return [problem for check in checks for problem in check(context)]


def function_problems(topology: Topology) -> list[Problem]:
    """Problems of the functions and the graders that a topology names."""
    return problems_of(topology, check_functions, *CHECKS.settings)


def checked_here(loaded: LoadedTopology, **options: Any) -> CheckContext:
    """What the checks find that know no actor."""
    context = CheckContext(loaded, **options)
    check_here(context)
    return context
