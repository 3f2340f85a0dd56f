"""The event plane: state changes and failures of a rollout actor's engines."""

from enum import StrEnum

from messages.base import Message, Plane, register


class EngineState(StrEnum):
    """State of an engine as its rollout actor sees it. Only CURRENT and UPDATING engines receive requests."""

    STARTING = "starting"  # its weights are not verified yet, or the router has not registered it
    CURRENT = "current"  # serving
    UPDATING = "updating"  # serving, and loading newer weights
    PAUSED = "paused"  # paused by the rollout actor, and the call to resume it failed
    RELEASED = "released"  # its GPU memory is released to the trainer
    SUSPECT = "suspect"  # the rollout actor's requests to it produce no tokens
    GONE = "gone"  # it does not answer, or another process answers in its place
    QUARANTINED = "quarantined"  # its answers are unusable while other engines' are usable; it is retried later


@register
class EngineStateChanged(Message, kw_only=True, tag="engine_state_changed"):
    """An engine changed its state, other than by a weight update alone. Rate-limited per engine. Written by rollout."""

    plane = Plane.EVENT
    topic = "engine.state_changed"
    instance: str
    engine: str
    old: EngineState
    new: EngineState
    reason: str
    version: int  # verified weight version; 0: none
    num_untold: int = 0  # state changes of this engine that the rate limit suppressed before this one


@register
class WeightsRefused(Message, kw_only=True, tag="weights_refused"):
    """An engine did not load or verify weights. Published at once, then ever less often. Written by rollout."""

    plane = Plane.EVENT
    topic = "weights.refused"
    version: int
    instance: str
    engine: str
    reason: str
    num_refusals: int  # refusals of this version by this engine so far
    unusable: bool = False  # the published files do not match their announcement, for every engine


@register
class WeightsProgressed(Message, kw_only=True, tag="weights_progressed"):
    """Weight updates of engines take long. Published every minute while they do. Written by rollout."""

    plane = Plane.EVENT
    topic = "weights.progressed"
    version: int  # target version
    instance: str
    engines: dict[str, str]  # what each of these engines does now, human-readable


@register
class EngineRequestsFailed(Message, kw_only=True, tag="engine_requests_failed"):
    """Requests to a running engine or a judge failed. Published at once, then ever less often.

    Written by rollout and reward.
    """

    plane = Plane.EVENT
    topic = "engine.requests_failed"
    instance: str
    engine: str  # several names if the router does not report which engine answered; of a judge, also its URL
    reason: str
    num_failures: int  # since the first failure


@register
class WeightsLost(Message, kw_only=True, tag="weights_lost"):
    """No engine holds an evaluation's weights any more, and they are no longer available. Written by rollout."""

    plane = Plane.EVENT
    topic = "weights.lost"
    version: int
    newer: int  # version that the engines serve until the evaluation ends
    instance: str


@register
class WeightSyncEnded(Message, kw_only=True, tag="weight_sync_ended"):
    """A weight sync ended. Written by trainer."""

    plane = Plane.EVENT
    topic = "weights.sync_ended"
    session: str
    incarnation: int
    version: int
    transport: str
    holds: tuple[str, ...]  # engines that verified the version
    out: dict[str, str]  # reason by engine that did not verify the version
    num_buckets: int
    sent_bytes: int  # bytes sent to each engine
    took_s: float
    part: int = 0  # index of the engine subset, if engines are updated subset by subset
