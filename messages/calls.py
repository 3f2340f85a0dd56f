"""The call plane: questions to one actor, and small answers."""

from typing import Any

import msgspec

from messages.base import FileSum, Message, Plane, register
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


@register
class LocalCopyRequested(Message, kw_only=True, tag="local_copy_requested"):
    """Asks a node agent for its own whole copy of a version of the weights; answered by LocalCopyGiven. By rollout.

    It is made once, however many ask and however often.
    """

    plane = Plane.CALL
    topic = "local_copy"
    version: int
    checksum: str
    path: str  # where the version is published, whole or as changes
    timeout_s: float  # that is waited for an answer
    doubted: bool = False  # an engine did not hold the version after it had read the copy: it is looked at again
    files: dict[str, FileSum] = {}  # by name, as announced: a copy that is there already is compared with them
    was_read: bool = False  # an engine has read the copy: it is compared once more, and not made again


@register
class LocalCopyGiven(Message, kw_only=True, tag="local_copy_given"):
    """Where a node's own copy of a version lies."""

    plane = Plane.CALL
    topic = "local_copy_given"
    answers = True
    path: str = ""
    reason: str = ""  # why there is none
    unusable: bool = False  # the published files are not what was announced


class EngineLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine on the CPU holds its weights, as far as it matters for the checksums that it will say."""

    tp_size: int
    dtype: str  # as torch names it
    is_filled_up: bool  # sides that cannot be divided evenly, as SGLang does

    @property
    def key(self) -> str:
        """Names it."""
        return f"{self.dtype}.tp{self.tp_size}.{'filled' if self.is_filled_up else 'bare'}"


class SessionMember(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that takes part in a session."""

    engine: str
    key: str  # of this process of the engine, as its rollout actor knows it: another after a restart of either
    num_ranks: int  # that receive tensors: its tensor-parallel ranks
    wants: EngineLayout | None = None  # it will be asked for the checksums of its tensors, which can be reckoned so
    is_compared: bool = True  # what it says of its tensors will be compared with what others said of equal ones


class UpdateGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pipeline stage of the trainer meets the engines: it is rank 0 of a torch process group."""

    name: str
    address: str
    port: int
    world_size: int
    backend: str  # as torch names it


@register
class SessionOffered(Message, kw_only=True, tag="weight_session_offered"):
    """Asks a rollout actor which of its engines take a version now; answered by MembersGiven. By trainer."""

    plane = Plane.CALL
    topic = "weight_session.offered"
    session: str
    incarnation: int  # of the trainer: an older one's sessions are over
    version: int
    deadline_s: float  # for each later step of the session
    part: int = 0  # of the engines: those of this one are asked, the others go on serving
    num_parts: int = 1


@register
class MembersGiven(Message, kw_only=True, tag="weight_session_members"):
    """The engines that will take part, in their order."""

    plane = Plane.CALL
    topic = "weight_session.members"
    answers = True
    members: tuple[SessionMember, ...]
    held_back: str = ""  # why there are none although engines lack the version: it is asked for later


@register
class SessionPrepared(Message, kw_only=True, tag="weight_session_prepared"):
    """Has members stop and open themselves for weights; answered by EnginesAnswered. By trainer."""

    plane = Plane.CALL
    topic = "weight_session.prepared"
    session: str


@register
class GroupsOffered(Message, kw_only=True, tag="weight_session_groups"):
    """Has members meet the trainer in process groups, one for each pipeline stage, in place of those that they had.

    Answered by EnginesAnswered; while it is, the trainer waits in the groups. By trainer.
    """

    plane = Plane.CALL
    topic = "weight_session.groups"
    session: str
    groups: tuple[UpdateGroup, ...]
    offsets: dict[str, int]  # each engine's first rank in them


@register
class BucketSent(Message, kw_only=True, tag="weight_session_bucket"):
    """Tensors that are on their way, one behind the other in one buffer; answered by EnginesAnswered. By trainer."""

    plane = Plane.CALL
    topic = "weight_session.bucket"
    session: str
    stage: int  # of the trainer's pipeline
    index: int  # from 0 in each stage
    names: tuple[str, ...]  # Hugging Face's
    dtypes: tuple[str, ...]  # as torch names them
    shapes: tuple[tuple[int, ...], ...]
    group: str = ""  # where they are broadcast
    payloads: dict[str, tuple[str, ...]] = {}  # else by engine, for each of its ranks: where they lie
    segments: tuple[str, ...] = ()  # of that memory, to be removed when it is read


@register
class SessionFinished(Message, kw_only=True, tag="weight_session_finished"):
    """Has members close and prove what they hold; answered by EnginesAnswered. By trainer."""

    plane = Plane.CALL
    topic = "weight_session.finished"
    session: str
    checksum: str  # an identity of all tensors that were sent: equal ones have equal ones; "": nobody compares
    num_buckets: int
    expected: dict[str, list[dict[str, str]]] = {}  # hash by the engine's name, of each rank, by a layout's key


@register
class SessionClosed(Message, kw_only=True, tag="weight_session_closed"):
    """Ends a session that cannot be finished; answered by EnginesAnswered. By trainer."""

    plane = Plane.CALL
    topic = "weight_session.closed"
    session: str
    reason: str


@register
class EnginesAnswered(Message, kw_only=True, tag="weight_session_answered"):
    """What became of a step of a session at the engines of a rollout actor."""

    plane = Plane.CALL
    topic = "weight_session.answered"
    answers = True
    failed: dict[str, str]  # reason by engine; the others did it


@register
class SessionRequested(Message, kw_only=True, tag="weight_session_requested"):
    """Asks the trainer for a session, for engines that came late; answered by SessionGranted. By rollout."""

    plane = Plane.CALL
    topic = "weight_session.requested"
    version: int
    engines: tuple[str, ...]


@register
class SessionGranted(Message, kw_only=True, tag="weight_session_granted"):
    """Whether there will be one. If not, the trainer's weights are others by now, and will be announced."""

    plane = Plane.CALL
    topic = "weight_session.granted"
    answers = True
    granted: bool
