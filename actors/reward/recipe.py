"""The graders that a recipe names. Imports no bus, since pre-start checks use it too."""

import msgspec

from actors.reward.causes import CAUSES, Cause
from actors.reward.frames import GraderSpec
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


def _spec_of_eval(reward: RewardConfig, key: str, name: str) -> GraderSpec:
    """The grader of samples of an evaluation, which are graded one by one or in batches."""
    return GraderSpec(name=name, group=takes_list(reward, key) and not reward.group_rm)


def retried_causes(reward: RewardConfig) -> frozenset[Cause]:
    """The causes after which a function is called again. A lost sandbox always is: no response causes that."""
    actions = msgspec.structs.asdict(reward.failures)
    return frozenset(cause for cause in CAUSES if actions[cause] == "retry" or cause == "sandbox_lost")
