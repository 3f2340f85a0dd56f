"""The graders that a recipe names. Imports no bus, since pre-start checks use it too."""

from actors.reward.frames import GraderSpec
from runtime.settings.topology import Topology, own_graders


def graders_of(topology: Topology) -> tuple[GraderSpec, ...]:
    """The graders that a recipe names and its own actors run, each once. Evaluation is scored sample by sample."""
    group, names = topology.reward.group_rm, own_graders(topology)
    found = [GraderSpec(name=names[item.rm_type], group=group) for item in topology.data if item.rm_type in names]
    found += [GraderSpec(name=names[item.rm_type], group=False) for item in topology.eval if item.rm_type in names]
    found += [GraderSpec(name=name, group=group) for name in topology.reward.graders.values()]
    judges = topology.reward.judges.values()
    found += [GraderSpec(name=judge.parser, parses=True) for judge in judges if judge.template is not None]
    return tuple(dict.fromkeys(found))
