"""The call plane: questions to one actor, and small answers."""

from typing import Any

import msgspec

from messages.base import Message, Plane, register
from messages.samples import SampleSummary


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A grader's answer for one sample: a reward, or why there is none."""

    index: int
    part: int = 0
    reward: float | None = None
    details: dict[str, Any] | None = None  # the whole answer when it was a dict
    error: str | None = None  # "timeout", "nan", the exception's text, ...


@register
class ScoresGiven(Message, kw_only=True, tag="scores_given"):
    """Answers a ScoreRequested, one score per item and in its order."""

    plane = Plane.CALL
    topic = "scores_given"
    answers = True
    request_id: str
    scores: tuple[Score, ...]


@register
class DescribeRequested(Message, kw_only=True, tag="describe_requested"):
    """Asks an actor instance what it is; answered by ActorDescribed."""

    plane = Plane.CALL
    topic = "describe"


@register
class ActorDescribed(Message, kw_only=True, tag="actor_described"):
    """What an actor instance is."""

    plane = Plane.CALL
    topic = "actor_described"
    answers = True
    instance: str
    role: str
    reads: tuple[str, ...]  # message tags
    writes: tuple[str, ...]
    pid: int
    node: str


@register
class StatsRequested(Message, kw_only=True, tag="stats_requested"):
    """Asks an actor instance for its numbers; answered by StatsGiven."""

    plane = Plane.CALL
    topic = "stats"


@register
class StatsGiven(Message, kw_only=True, tag="stats_given"):
    """Numbers of an actor instance since its start."""

    plane = Plane.CALL
    topic = "stats_given"
    answers = True
    instance: str
    uptime_s: float
    stats: dict[str, float]
    waits_for: str = ""  # for people: what it waits for now


@register
class CallFailed(Message, kw_only=True, tag="call_failed"):
    """Answers a call that could not be decoded or whose handler raised."""

    plane = Plane.CALL
    topic = "call_failed"
    answers = True
    reason: str


@register
class SpillsRequested(Message, kw_only=True, tag="spills_requested"):
    """Asks the buffer what was spilled of an attempt; answered by SpillsGiven."""

    plane = Plane.CALL
    topic = "spills"
    group_id: int
    attempt: int


@register
class SpillsGiven(Message, kw_only=True, tag="spills_given"):
    """What is stored of an attempt that has not ended."""

    plane = Plane.CALL
    topic = "spills_given"
    answers = True
    group_id: int
    attempt: int
    samples: tuple[SampleSummary, ...]


@register
class KillRequested(Message, kw_only=True, tag="kill_requested"):
    """Asks a node agent to kill a server of its own that hangs, and so to start it again; answered by KillAnswered."""

    plane = Plane.CALL
    topic = "kill"
    process: str
    pid: int  # that is meant; a process that was started since is left alone
    reason: str  # for the log and for people


@register
class KillAnswered(Message, kw_only=True, tag="kill_answered"):
    """Whether that process was there to be killed."""

    plane = Plane.CALL
    topic = "kill_answered"
    answers = True
    killed: bool
