"""The graders that a recipe names. Imports no bus, since pre-start checks use it too."""

import msgspec

from actors.reward.causes import CAUSES, Cause
from actors.reward.frames import GraderSpec
from runtime.settings.topology import RewardConfig, Topology, own_graders


def graders_of(topology: Topology) -> tuple[GraderSpec, ...]:
    """The graders that a recipe names and its own actors run, each once. Evaluation is scored sample by sample."""
    group, names = topology.reward.group_rm, own_graders(topology)
    found = [GraderSpec(name=names[item.rm_type], group=group) for item in topology.data if item.rm_type in names]
    found += [GraderSpec(name=names[item.rm_type], group=False) for item in topology.eval if item.rm_type in names]
    found += [GraderSpec(name=name, group=group) for name in topology.reward.graders.values()]
    of_eval = {part for item in topology.eval for part in topology.reward.sums.get(item.rm_type or "", ())}
    for weights in topology.reward.sums.values():
        parts = [part for part in weights if part in names]
        found += [GraderSpec(name=names[part], group=group) for part in parts]
        found += [GraderSpec(name=names[part], group=False) for part in parts if part in of_eval]
    judges = topology.reward.judges.values()
    found += [GraderSpec(name=judge.parser, parses=True) for judge in judges if judge.template is not None]
    return tuple(dict.fromkeys(found))


def retried_causes(reward: RewardConfig) -> frozenset[Cause]:
    """The causes after which a function is called again. A lost sandbox is not among them: the pool replaces it."""
    actions = msgspec.structs.asdict(reward.failures)
    return frozenset(cause for cause in CAUSES if actions[cause] == "retry" and cause != "sandbox_lost")
