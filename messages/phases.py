"""Colocation phases of a run whose trainer and engines share GPU memory (docs/run/colocated.md#phases)."""

from enum import StrEnum

import msgspec

from messages.base import Message, Plane, register


class Phase(StrEnum):
    """Colocation phase, which decides who holds GPU memory. Phases follow in this order; GENERATE follows RESUME_KV."""

    GENERATE = "generate"  # engines hold their memory; the trainer holds only its weights
    RELEASE = "release"  # engines stop generating and release their memory
    TRAIN = "train"  # the trainer holds the memory: train steps, weight export, checkpoints
    OFFLOAD = "offload"  # the trainer moves state that only training needs to the host
    RESUME_WEIGHTS = "resume_weights"  # engines allocate memory for weights
    UPDATE = "update"  # engines load the newest weights
    RESUME_KV = "resume_kv"  # engines allocate the KV cache and verify their weights


class EnginePhase(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a phase for one engine. Bytes: anonymous memory of its process; None: unknown."""

    engine: str
    reached: bool  # its memory is as the phase requires
    reason: str = ""  # why not, or why not yet
    took_s: float = 0.0
    bytes_before: int | None = None
    bytes_after: int | None = None


@register
class PhaseChanged(Message, kw_only=True, tag="phase_changed"):
    """A phase begins, and the previous phase is over. Readers ignore phases of a replaced trainer.

    Written by trainer.
    """

    plane = Plane.EVENT
    topic = "phase.changed"
    phase: Phase
    previous: Phase | None = None  # None: unknown
    step: int  # train steps done
    incarnation: int  # of the trainer
    reason: str = ""  # why the phase is not the next in order
    took_s: float = 0.0  # duration of the previous phase
    bytes_before: dict[
        str, int | None
    ] = {}  # by instance, for those whose memory the previous phase moved; None: unknown
    bytes_after: dict[str, int | None] = {}
    start: str = ""  # id of the trainer's start: two starts may share an incarnation; empty: of an older version


@register
class PhaseRequested(Message, kw_only=True, tag="phase_requested"):
    """Asks a rollout actor to bring its engines to a phase. Answered by PhaseReached."""

    plane = Plane.CALL
    topic = "phase"
    phase: Phase
    incarnation: int  # of the trainer
    seq: int  # log sequence of the phase's PhaseChanged
    within_s: float  # time limit of the answer, whether or not the phase is reached


@register
class PhaseReached(Message, kw_only=True, tag="phase_reached"):
    """Reports how far the engines of a rollout actor have reached a phase."""

    plane = Plane.CALL
    topic = "phase_reached"
    answers = True
    reached: bool  # by every engine that must reach it
    engines: tuple[EnginePhase, ...]
    reason: str = ""  # why not
