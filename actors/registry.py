"""Actor registry: roles and how to build their actors. Imports an actor's module only when it is needed."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from messages import Prompt
from runtime.bus.bus import Bus
from runtime.process.actor import Actor
from runtime.process.hosting import Hosted
from runtime.settings.topology import Topology, answers_are_recorded

Role = Literal["buffer", "rollout", "reward", "filter", "trainer"]
ROLES: tuple[Role, ...] = get_args(Role)


def hosted(role: Role, topology: Topology, run_dir: Path, *, name: str | None = None) -> Hosted:
    """Describe an actor to the host that runs it.

    Args:
        role: role of the actor.
        topology: the resolved topology; relative plug-in paths are resolved against the current directory.
        run_dir: run directory, for checkpoints and weights.
        name: name of the instance; by default the role.
    """

    def build(bus: Bus) -> Actor:
        return _build(role, topology, run_dir, bus)

    return Hosted(name=name or role, role=role, actor_type=actor_type(role, topology), build=build)


def actor_type(role: Role, topology: Topology | None = None) -> type[Actor]:
    """The actor class of a role in a topology; without a topology, the class for a run with engines."""
    match role:
        case "buffer":
            from actors.buffer.actor import BufferActor as chosen
        case "rollout" if topology is not None and answers_are_recorded(topology):
            from actors.rollout.offline.actor import OfflineRolloutActor as chosen
        case "rollout":
            from actors.rollout.actor import RolloutActor as chosen
        case "reward":
            from actors.reward.actor import RewardActor as chosen
        case "filter":
            from actors.filter.actor import FilterActor as chosen
        case "trainer" if topology is not None and topology.run.only == "rollout":
            from actors.trainer.no_op import NoOpTrainer as chosen
        case "trainer":
            from actors.trainer.actor import TrainerActor as chosen
    return chosen


def _build(role: Role, topology: Topology, run_dir: Path, bus: Bus) -> Actor:
    match role:
        case "buffer":
            from actors.buffer.actor import BufferActor

            return BufferActor(topology, bus, run_dir)
        case "rollout" if topology.run.load is not None:
            from actors.rollout.offline.actor import OfflineRolloutActor
            from actors.rollout.offline.dump import Dumped

            return OfflineRolloutActor(bus, Dumped(Path(topology.run.load), _vocab_size(topology)))
        case "rollout" if answers_are_recorded(topology):
            from actors.rollout.offline.actor import OfflineRolloutActor
            from actors.rollout.offline.demonstrations import Demonstrations

            return OfflineRolloutActor(bus, Demonstrations(_vocab_size(topology)))
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
            from actors.trainer.no_op import NoOpTrainer

            return NoOpTrainer(topology, bus, run_dir=run_dir)
        case "trainer":
            from actors.trainer.actor import TrainerActor

            return TrainerActor(topology, bus, run_dir=run_dir, held_out=partial(_held_out, topology))


def _held_out(topology: Topology) -> Mapping[str, Sequence[Prompt]]:
    from actors.buffer.prompts.source import load_held_out

    return load_held_out(topology)


def _vocab_size(topology: Topology) -> int:
    from actors.rollout.sglang.served_model import ServedModel

    return ServedModel.read(Path(topology.model.hf_checkpoint)).vocab_size
