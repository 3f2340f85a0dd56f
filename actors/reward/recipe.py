"""The graders that a recipe names. Imports no bus, since pre-start checks use it too."""

from actors.reward.frames import GraderSpec
from runtime.settings.topology import Topology


def names_of(topology: Topology) -> dict[str, str]:
    """The graders that a topology names, by the names that requests use."""
    own = topology.reward.graders
    named = {item.rm_type for item in (*topology.data, *topology.eval) if item.rm_type is not None}
    return {name: own.get(name, name) for name in (*named, *own)}


def graders_of(topology: Topology) -> tuple[GraderSpec, ...]:
    """The graders that a recipe names, each once. Evaluation is scored sample by sample."""
    group, names = topology.reward.group_rm, names_of(topology)
    found = [GraderSpec(name=names[item.rm_type], group=group) for item in topology.data if item.rm_type is not None]
    found += [GraderSpec(name=names[item.rm_type], group=False) for item in topology.eval if item.rm_type is not None]
    found += [GraderSpec(name=name, group=group) for name in topology.reward.graders.values()]
    return tuple(dict.fromkeys(found))
