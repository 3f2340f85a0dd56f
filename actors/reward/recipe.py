"""The graders that a recipe names. Imports no bus, since pre-start checks use it too."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from actors.reward.causes import CAUSES, Cause
from actors.reward.graders.boxed import BOXED_PREFIX
from actors.reward.graders.builtin import BUILT_IN_GRADERS
from actors.reward.graders.calling import resolve_grader
from actors.reward.grades import GraderSpec
from runtime.functions.table import PARSER, UserFunction
from runtime.settings.tables.reward import RewardConfig
from runtime.settings.topology import Topology, own_graders, takes_list


def graders_of(topology: Topology) -> tuple[GraderSpec, ...]:
    """The graders that a recipe names and its own actors run, each once. Evaluation is scored sample by sample."""
    reward, names = topology.reward, own_graders(topology)
    of_train = [item.rm_type for item in topology.data if item.rm_type in names]
    of_eval = [item.rm_type for item in topology.eval if item.rm_type in names]
    found = [GraderSpec(name=names[key], group=takes_list(reward, key)) for key in of_train]
    found += [_spec_of_eval(reward, key, names[key]) for key in of_eval]
    found += [GraderSpec(name=name, group=takes_list(reward, key)) for key, name in reward.graders.items()]
    parts_of_eval = {part for item in topology.eval for part in reward.sums.get(item.rm_type or "", ())}
    for weights in reward.sums.values():
        parts = [part for part in weights if part in names]
        found += [GraderSpec(name=names[part], group=takes_list(reward, part)) for part in parts]
        found += [_spec_of_eval(reward, part, names[part]) for part in parts if part in parts_of_eval]
    judges = reward.judges.values()
    found += [GraderSpec(name=judge.parser, parses=True) for judge in judges if judge.template is not None]
    return tuple(dict.fromkeys(found))


def check_grader(topology: Topology, kind: UserFunction, key: str, name: str, base_dirs: Sequence[Path]) -> None:
    """Find a grader or a parser that a key names, as its process does. Raises as `resolve_grader` does."""
    reward, place = topology.reward, key.split(".")
    if place[0] in ("data", "eval") and name in named_graders(reward):
        return  # it is found where it is defined
    is_named = place[1] == "graders"
    if is_named and is_built_in(place[-1]):
        raise ValueError(f"{place[-1]} is a built-in grader: use another name")
    group = takes_list(reward, place[-1]) if is_named else reward.group_rm and place[0] == "data"
    resolve_grader(GraderSpec(name=name, group=group, parses=kind is PARSER), base_dirs)


def named_graders(reward: RewardConfig) -> set[str]:
    """The names that a recipe gives to graders."""
    return {*reward.graders, *reward.external, *reward.judges, *reward.sums}


def is_built_in(name: str) -> bool:
    """Whether a built-in grader has this name."""
    return name.removeprefix(BOXED_PREFIX) in BUILT_IN_GRADERS


def _spec_of_eval(reward: RewardConfig, key: str, name: str) -> GraderSpec:
    """The grader of samples of an evaluation, which are graded one by one or in batches."""
    return GraderSpec(name=name, group=takes_list(reward, key) and not reward.group_rm)


def retried_causes(reward: RewardConfig) -> frozenset[Cause]:
    """The causes after which a function is called again. A lost sandbox always is: no response causes that."""
    actions = msgspec.structs.asdict(reward.failures)
    return frozenset(cause for cause in CAUSES if actions[cause] == "retry" or cause == "sandbox_lost")
