"""Which actors there are, and how one is built. A module is imported only when its actor is."""

from pathlib import Path
from typing import Literal, get_args

from runtime.bus.bus import Bus
from runtime.host.actor import Actor
from runtime.host.hosting import Hosted
from runtime.settings.topology import Topology, answers_are_recorded

Role = Literal["buffer", "rollout", "reward", "filter", "trainer"]
ROLES: tuple[Role, ...] = get_args(Role)


def hosted(role: Role, topology: Topology, run_dir: Path, *, name: str | None = None) -> Hosted:
    """What the host needs to run the actor of a role.

    Args:
        role: which.
        topology: resolved; its relative plug-in files are looked up in the current directory.
        run_dir: for checkpoints and weights.
        name: of the instance; the role's unless there are several.
    """

    def build(bus: Bus) -> Actor:
        return _build(role, topology, run_dir, bus)

    return Hosted(name=name or role, role=role, actor_type=actor_type(role, topology), build=build)


def actor_type(role: Role, topology: Topology | None = None) -> type[Actor]:
    """The class that plays a role in a topology; without one, where engines generate."""
    match role:
        case "buffer":
            from actors.buffer.actor import BufferActor as chosen
        case "rollout" if topology is not None and answers_are_recorded(topology):
            from actors.rollout.recorded.actor import RecordedRolloutActor as chosen
        case "rollout":
            from actors.rollout.actor import RolloutActor as chosen
        case "reward":
            from actors.reward.actor import RewardActor as chosen
        case "filter":
            from actors.filter.actor import FilterActor as chosen
        case "trainer" if topology is not None and topology.run.only == "rollout":
            from actors.trainer.stand_in import TrainerStandIn as chosen
        case "trainer":
            from actors.trainer.actor import TrainerActor as chosen
    return chosen


def _build(role: Role, topology: Topology, run_dir: Path, bus: Bus) -> Actor:
    match role:
        case "buffer":
            from actors.buffer.actor import BufferActor

            return BufferActor(topology, bus, run_dir)
        case "rollout" if topology.run.load is not None:
            from actors.rollout.recorded.actor import RecordedRolloutActor
            from actors.rollout.recorded.dump import Dumped

            return RecordedRolloutActor(bus, Dumped(Path(topology.run.load), _vocab_size(topology)))
        case "rollout" if answers_are_recorded(topology):
            from actors.rollout.recorded.actor import RecordedRolloutActor
            from actors.rollout.recorded.demonstrations import Demonstrations

            return RecordedRolloutActor(bus, Demonstrations(_vocab_size(topology)))
        case "rollout":
            from actors.rollout.actor import RolloutActor

            return RolloutActor(topology, bus)
        case "reward":
            from actors.reward.actor import RewardActor

            return RewardActor(topology, bus)
        case "filter":
            from actors.filter.actor import FilterActor

            return FilterActor(topology, bus)
        case "trainer" if topology.run.only == "rollout":
            from actors.trainer.stand_in import TrainerStandIn

            return TrainerStandIn(topology, bus, run_dir=run_dir)
        case "trainer":
            from actors.trainer.actor import TrainerActor

            return TrainerActor(topology, bus, run_dir=run_dir)


def _vocab_size(topology: Topology) -> int:
    from actors.rollout.requests.served_model import ServedModel

    return ServedModel.read(Path(topology.model.hf_checkpoint)).vocab_size
