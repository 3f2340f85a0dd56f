"""Taking turns: the phases of a run whose trainer and engines share memory (docs/design.md, 6)."""

from enum import StrEnum

import msgspec

from messages.base import Message, Plane, register


class Phase(StrEnum):
    """Whose turn it is. Each follows the one before it, and generate comes again after resume_kv."""

    GENERATE = "generate"  # engines have their memory, the trainer only its weights
    RELEASE = "release"  # engines end what they generate and give their memory back
    TRAIN = "train"  # the trainer has it: train steps, export, checkpoints
    OFFLOAD = "offload"  # the trainer moves to the host what only training needs
    RESUME_WEIGHTS = "resume_weights"  # engines take room for weights
    UPDATE = "update"  # and the newest weights
    RESUME_KV = "resume_kv"  # then room for keys and values, and prove what they hold


class EngineTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one engine in a phase. Bytes: memory of its process that no file backs; none: not shown."""

    engine: str
    reached: bool  # it has what the phase leaves it
    reason: str = ""  # why not, or why not yet
    took_s: float = 0.0
    bytes_before: int | None = None
    bytes_after: int | None = None


@register
class PhaseChanged(Message, kw_only=True, tag="phase_changed"):
    """A phase begins, and the one before it is over; one of an older incarnation than is known counts for nothing.

    Written by trainer.
    """

    plane = Plane.EVENT
    topic = "phase.changed"
    phase: Phase
    previous: Phase | None = None  # none: nothing is known of one
    step: int  # train steps done
    incarnation: int  # of the trainer
    reason: str = ""  # for another one than the next in order
    took_s: float = 0.0  # of the previous one
    bytes_before: dict[
        str, int | None
    ] = {}  # by instance, of those whose memory the previous one moved; none: not shown
    bytes_after: dict[str, int | None] = {}


@register
class PhaseRequested(Message, kw_only=True, tag="phase_requested"):
    """Asks a rollout actor to bring its engines where a phase wants them; answered by PhaseReached."""

    plane = Plane.CALL
    topic = "phase"
    phase: Phase
    incarnation: int  # of the trainer
    seq: int  # log sequence of the PhaseChanged that began it
    within_s: float  # answered by then, whatever has been reached


@register
class PhaseReached(Message, kw_only=True, tag="phase_reached"):
    """How far the engines of a rollout actor are."""

    plane = Plane.CALL
    topic = "phase_reached"
    answers = True
    reached: bool  # all that have to be
    engines: tuple[EngineTurn, ...]
    reason: str = ""  # why not
