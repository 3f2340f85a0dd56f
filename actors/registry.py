"""Actor registry: roles and how to build their actors. Imports an actor's module only when it is needed."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from messages import Prompt
from runtime.bus.bus import Bus
from runtime.process.actor import Actor
from runtime.process.hosting import Hosted
from runtime.settings.topology import Topology, answers_are_recorded

if TYPE_CHECKING:
    from actors.rollout.offline.actor import AnswerSource

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
    actor_type, build = _actor(role, topology, run_dir)
    return Hosted(name=name or role, role=role, actor_type=actor_type, build=build)


def _actor(role: Role, topology: Topology, run_dir: Path) -> tuple[type[Actor], Callable[[Bus], Actor]]:
    """The class of a role in a topology, and what builds its actor."""
    match role:
        case "buffer":
            from actors.buffer.actor import BufferActor

            return BufferActor, lambda bus: BufferActor(topology, bus, run_dir)
        case "rollout" if answers_are_recorded(topology):
            from actors.rollout.offline.actor import OfflineRolloutActor

            return OfflineRolloutActor, lambda bus: OfflineRolloutActor(bus, _recorded(topology))
        case "rollout":
            from actors.rollout.actor import RolloutActor

            return RolloutActor, partial(RolloutActor, topology)
        case "reward":
            from actors.reward.actor import RewardActor

            return RewardActor, partial(RewardActor, topology)
        case "filter":
            from actors.filter.actor import FilterActor

            return FilterActor, partial(FilterActor, topology)
        case "trainer" if topology.run.only == "rollout":
            from actors.trainer.no_op import NoOpTrainer

            return NoOpTrainer, partial(NoOpTrainer, topology, run_dir=run_dir)
        case "trainer":
            from actors.trainer.actor import TrainerActor

            return TrainerActor, partial(TrainerActor, topology, run_dir=run_dir, held_out=partial(_held_out, topology))


def _recorded(topology: Topology) -> "AnswerSource":
    """The source of the answers that a run does not generate."""
    from actors.rollout.offline.demonstrations import Demonstrations
    from actors.rollout.offline.dump import Dumped
    from actors.rollout.sglang.served_model import ServedModel

    vocab_size = ServedModel.read(Path(topology.model.hf_checkpoint)).vocab_size
    return Demonstrations(vocab_size) if topology.run.load is None else Dumped(Path(topology.run.load), vocab_size)


def _held_out(topology: Topology) -> Mapping[str, Sequence[Prompt]]:
    from actors.buffer.prompts.source import load_held_out

    return load_held_out(topology)
