"""The rollout actors of a run, and which of them drives which engine of the pool "policy". Pure.

Ownership follows from the topology alone: every process computes the same. At run time a key per engine fences it
(actors/rollout/engines/ownership.py).
"""

from collections.abc import Iterator
from typing import Final, NamedTuple, Self

from runtime.settings.placement import engine_places, num_engines, rollout_nodes
from runtime.settings.reading.config import Problem
from runtime.settings.topology import POLICY, Topology, answers_are_recorded

ROLE: Final = "rollout"  # also the name of a sole rollout actor


class RolloutPlace(NamedTuple):
    """A rollout actor, and the node that it runs on."""

    instance: str
    node: str


def rollout_places(topology: Topology) -> tuple[RolloutPlace, ...]:
    """Return the rollout actors of a run, in the order of their indices. Offline rollout has one, at home."""
    nodes = rollout_nodes(topology)
    if not topology.rollout.nodes or answers_are_recorded(topology):
        return (RolloutPlace(ROLE, nodes[0]),)
    return tuple(RolloutPlace(f"{ROLE}.{index}", node) for index, node in enumerate(nodes))


def index_of(instance: str) -> int:
    """Return the index of a rollout actor among those of its run, from its name."""
    number = instance.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0


def engine_owners(topology: Topology) -> tuple[int, ...]:
    """Return, for each engine of the policy by its index, the index of the rollout actor that drives it.

    An engine belongs to an actor on the node of its first process. Where that node has several, and for engines whose
    node has none or is unknown, it is the actor that has the fewest engines by then; of several, the first.
    """
    actors, pool = rollout_places(topology), topology.engines.get(POLICY)
    if pool is None:
        return ()
    nodes = [places[0].node for places in engine_places(topology, pool)] or [""] * num_engines(pool)
    own, found = [0] * len(actors), dict[int, int]()
    for local in (True, False):
        for index, node in enumerate(nodes):
            near = [actor for actor, place in enumerate(actors) if place.node == node]
            if bool(near) == local:
                owner = min(near or range(len(actors)), key=own.__getitem__)
                own[owner] += 1
                found[index] = owner
    return tuple(found[index] for index in range(len(nodes)))


class ActorShare(NamedTuple):
    """One rollout actor's part of a run."""

    actor: int  # its index
    num_actors: int
    engines: tuple[int, ...]  # indices of the engines of the policy that it drives

    @classmethod
    def of(cls, topology: Topology, instance: str) -> Self:
        """Return the part of the rollout actor with this name."""
        actor = index_of(instance)
        return cls(actor, len(rollout_places(topology)), owned_engines(topology, actor))

    @property
    def is_alone(self) -> bool:
        """Whether the run has no other rollout actor."""
        return self.num_actors == 1

    def drives(self, engine: int) -> bool:
        """Whether the actor drives the engine of the policy with this index."""
        return engine in self.engines or (self.is_alone and self.actor == 0)


def owned_engines(topology: Topology, actor: int) -> tuple[int, ...]:
    """Return the indices of the engines of the policy that a rollout actor drives."""
    return tuple(index for index, owner in enumerate(engine_owners(topology)) if owner == actor)


def driven_by(topology: Topology, process: str) -> tuple[str, ...]:
    """Name the engines of a placed rollout actor, for people; none for other processes, and for a sole one at home."""
    actors, pool = [place.instance for place in rollout_places(topology)], topology.engines.get(POLICY)
    if process not in actors or process == ROLE or pool is None:
        return ()
    named = pool.urls or [f"engine.{POLICY}.{index}" for index in range(num_engines(pool))]
    return tuple(named[index] for index in owned_engines(topology, index_of(process)))


def fewest_engines(topology: Topology) -> int:
    """Return the number of engines of the rollout actor that has the fewest."""
    owners = engine_owners(topology)
    return min(owners.count(actor) for actor in range(len(rollout_places(topology))))


def shared_among_actors(topology: Topology, number: int) -> int:
    """Return each rollout actor's part of a number of requests that all of them may have together, rounded up."""
    return -(-number // len(rollout_places(topology)))


def owner_problems(topology: Topology) -> Iterator[Problem]:
    """Yield problems of `rollout.nodes`."""
    key, nodes, pool = "rollout.nodes", topology.rollout.nodes, topology.engines.get(POLICY)
    if not nodes or pool is None:
        return
    value = list(nodes)
    if unknown := [name for name in dict.fromkeys(nodes) if name not in topology.nodes]:
        message = f"no node {', '.join(unknown)}; allowed: {', '.join(topology.nodes)}"
        yield Problem.of(key, value, message)
        return
    if any(ROLE in roles for roles in topology.share):
        message = f'rollout actors that are placed share no process: leave "{ROLE}" out of share'
        yield Problem.of(key, value, message)
    if answers_are_recorded(topology):
        return
    owners = engine_owners(topology)
    idle = [place for index, place in enumerate(rollout_places(topology)) if index not in owners]
    for place in idle:
        number = f"{len(owners)} engine{'s' if len(owners) > 1 else ''}"
        message = f"{place.instance} on {place.node} would have no engine: engines.{POLICY} has {number}"
        yield Problem.of(key, value, message)
    if len(nodes) > 1 and pool.router_url is not None:
        message = "cannot be combined with several rollout actors (rollout.nodes), which would mix their engines in it"
        yield Problem.of(f"engines.{POLICY}.router_url", pool.router_url, message)
