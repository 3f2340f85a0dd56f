"""The event plane: what becomes of the engines of a rollout actor."""

from enum import StrEnum

from messages.base import Message, Plane, register


class EngineState(StrEnum):
    """What an engine is to its rollout actor. Requests go to one that is current or updating."""

    STARTING = "starting"  # it has to prove that it holds the weights, and the router to take it
    CURRENT = "current"  # it may be asked
    UPDATING = "updating"  # it may be asked, and takes newer weights
    PAUSED = "paused"  # by us, and could not be told to go on
    RELEASED = "released"  # its memory, to the trainer
    SUSPECT = "suspect"  # our requests at it make no token
    GONE = "gone"  # it does not answer, or is not what it was
    QUARANTINED = "quarantined"  # its answers cannot be used while other engines' can; it is tried again later


@register
class EngineStateChanged(Message, kw_only=True, tag="engine_state_changed"):
    """An engine is in another state, unless an update alone brought that. Only so often for an engine. By rollout."""

    plane = Plane.EVENT
    topic = "engine.state_changed"
    instance: str
    engine: str
    old: EngineState
    new: EngineState
    reason: str
    version: int  # of the weights that it proved to hold; 0: none
    num_untold: int = 0  # changes of this engine before this one that were not told, for there were too many


@register
class WeightsRefused(Message, kw_only=True, tag="weights_refused"):
    """An engine did not take weights, or did not prove to hold them: at once, then more and more seldom. By rollout."""

    plane = Plane.EVENT
    topic = "weights.refused"
    version: int
    instance: str
    engine: str
    reason: str
    num_refusals: int  # of this version by this engine, so far
    unusable: bool = False  # its files are not what was announced, whichever engine reads them


@register
class EngineRequestsFailed(Message, kw_only=True, tag="engine_requests_failed"):
    """Requests to an engine that is up failed: at once, then more and more seldom. By rollout."""

    plane = Plane.EVENT
    topic = "engine.requests_failed"
    instance: str
    engine: str  # several, where the router did not say which one answered
    reason: str
    num_failures: int  # since the first one


@register
class WeightsLost(Message, kw_only=True, tag="weights_lost"):
    """No engine of a rollout actor holds an evaluation's weights, and nobody can bring them any more. By rollout."""

    plane = Plane.EVENT
    topic = "weights.lost"
    version: int
    newer: int  # the version that engines are to hold until the evaluation ends
    instance: str


@register
class SessionEnded(Message, kw_only=True, tag="weight_session_ended"):
    """What became of a weight session. By trainer."""

    plane = Plane.EVENT
    topic = "weights.session_ended"
    session: str
    incarnation: int
    version: int
    transport: str
    holds: tuple[str, ...]  # engines that proved to hold the version
    out: dict[str, str]  # reason by engine that does not
    num_buckets: int
    sent_bytes: int  # that each engine was sent
    took_s: float
    part: int = 0  # of the engines, where they are updated in groups
