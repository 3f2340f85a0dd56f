"""Which actors there are, and how one is built. A module is imported only when its actor is."""

from typing import Literal, get_args

from runtime.actor import Actor
from runtime.bus import Bus
from runtime.topology import Topology

Role = Literal["buffer", "rollout", "reward", "filter", "trainer"]
ROLES: tuple[str, ...] = get_args(Role)


def actor_type(role: Role) -> type[Actor]:
    """The class that plays a role."""
    match role:
        case "buffer":
            from actors.buffer.actor import BufferActor as chosen
        case "rollout":
            from actors.rollout.actor import RolloutActor as chosen
        case "reward":
            from actors.reward.actor import RewardActor as chosen
        case "filter":
            from actors.filter.actor import FilterActor as chosen
        case "trainer":
            from actors.trainer.actor import TrainerActor as chosen
    return chosen


def build_actor(role: Role, topology: Topology, bus: Bus) -> Actor:
    """Make the actor of a role."""
    return actor_type(role)(topology, bus)  # pyright: ignore[reportCallIssue] - each takes these two
