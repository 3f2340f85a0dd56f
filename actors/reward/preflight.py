"""Pre-start checks of graders: their names, sums, isolation and keys."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Final

from actors.reward.graders.builtin import find_grader
from actors.reward.judging.keys import KeyProblem, api_key, remote_key
from actors.reward.recipe import is_built_in
from runtime.functions import isolation
from runtime.node.checks.context import CheckContext, Checks
from runtime.settings.placement import home_node
from runtime.settings.reading.config import Problem
from runtime.settings.rules.graders import unmet_need
from runtime.settings.tables.reward import RewardConfig
from runtime.settings.topology import answers_are_recorded


def check_names(context: CheckContext) -> Iterator[Problem]:
    """Check what names of graders must not be, or must be."""
    reward = context.topology.reward
    for table in ("judges", "external"):
        for name in getattr(reward, table):
            if is_built_in(name):
                key = f"reward.judges.{name}" if table == "judges" else "reward.external"
                yield Problem.of(key, name, f"{name} is a built-in grader: use another name")
    for name in reward.limits:
        if name not in reward.graders and not is_built_in(name):
            known = "names in reward.graders, and built-in graders"
            yield Problem.of("reward.limits", name, f"no such grader; allowed: {known}")


def check_sums(context: CheckContext) -> Iterator[Problem]:
    """Check the names, the weights and the parts of sums of graders."""
    reward = context.topology.reward
    tables = {"graders": reward.graders, "judges": reward.judges, "external": reward.external}
    for name, weights in reward.sums.items():
        key = f"reward.sums.{name}"
        if is_built_in(name):
            yield Problem.of(key, name, f"{name} is a built-in grader: use another name")
        for table in (table for table, names in tables.items() if name in names):
            yield Problem.of(key, name, f"reward.{table} has a grader of this name too: use another name")
        if not weights:
            yield Problem.of(key, name, "has no parts")
        for part, weight in weights.items():
            if not math.isfinite(weight):
                yield Problem.of(f"{key}.{part}", str(weight), "a weight must be a finite number")
            try:
                _find_part(reward, part)
            except ValueError as error:
                yield Problem.of(f"{key}.{part}", part, str(error))


def _find_part(reward: RewardConfig, part: str) -> None:
    """Refuse a part of a sum that is none, or that cannot be used."""
    if part in reward.judges:
        if reward.judges[part].template is None:
            raise ValueError(f"this judge scores no samples: set reward.judges.{part}.template")
    elif (need := unmet_need(part, reward)) is not None:
        raise ValueError(need)
    elif is_built_in(part):
        find_grader(part)
    elif part not in reward.graders:
        known = "built-in graders, and names in reward.graders and reward.judges"
        raise ValueError(f"no such grader; allowed: {known}")


def check_isolation(context: CheckContext) -> Iterator[Problem]:
    """Check that this machine can isolate graders, if they are to be isolated."""
    if context.topology.reward.sandbox != "isolated" or context.elsewhere:
        return
    context.doing("reward.sandbox", "isolated", "trying it")
    if (reason := isolation.refusal()) is not None:
        message = f'this machine cannot isolate graders: {reason}; "process" works without isolation'
        yield Problem.of("reward.sandbox", "isolated", message)


def check_keys(context: CheckContext) -> Iterator[Problem]:
    """Check that a reward actor of this node can read its API keys."""
    topology, reward = context.topology, context.topology.reward
    if answers_are_recorded(topology) or context.node not in (reward.nodes or (home_node(topology),)):
        return
    readers = [("reward", partial(remote_key, reward))]
    readers += [(f"reward.judges.{name}", partial(api_key, judge)) for name, judge in reward.judges.items()]
    for table, read in readers:
        try:
            read()
        except KeyProblem as error:
            yield Problem.of(f"{table}.{error.setting}", error.value, str(error))


CHECKS: Final = Checks(settings=(check_names, check_sums, check_isolation), machine=(check_keys,))
