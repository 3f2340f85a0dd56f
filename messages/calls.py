"""The call plane: requests to one actor instance, and small answers."""

from typing import Any

import msgspec

from messages.base import FileSum, Message, Plane, register
from messages.samples import SampleSummary


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A grader's answer for one sample: a reward, or the reason why it has none."""

    index: int
    part: int = 0
    reward: float | None = None
    details: dict[str, Any] | None = None  # the full answer if the grader returned a dict
    error: str | None = None  # "timeout", "nan", the exception's text, ...
    cause: str | None = None  # kind of the error, such as "timeout" or "bad_answer"


@register
class ScoresGiven(Message, kw_only=True, tag="scores_given"):
    """Answers a ScoreRequested with one score per item, in the order of its items, on a subject of the grader."""

    plane = Plane.CALL
    topic = "scores_given"
    answers = True
    request_id: str
    scores: tuple[Score, ...]


@register
class DescribeRequested(Message, kw_only=True, tag="describe_requested"):
    """Asks an actor instance to describe itself. Answered by ActorDescribed."""

    plane = Plane.CALL
    topic = "describe"


@register
class ActorDescribed(Message, kw_only=True, tag="actor_described"):
    """Describes an actor instance: role, process, and the messages that it reads and writes."""

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
    """Asks an actor instance for its statistics. Answered by StatsGiven."""

    plane = Plane.CALL
    topic = "stats"


@register
class StatsGiven(Message, kw_only=True, tag="stats_given"):
    """Statistics of an actor instance since its start."""

    plane = Plane.CALL
    topic = "stats_given"
    answers = True
    instance: str
    uptime_s: float
    stats: dict[str, float]
    waits_for: str = ""  # human-readable: what the actor is waiting for now


@register
class CallFailed(Message, kw_only=True, tag="call_failed"):
    """Answers a call that could not be decoded or whose handler raised."""

    plane = Plane.CALL
    topic = "call_failed"
    answers = True
    reason: str


@register
class SpillsRequested(Message, kw_only=True, tag="spills_requested"):
    """Asks the buffer for the spilled samples of an attempt. Answered by SpillsGiven."""

    plane = Plane.CALL
    topic = "spills"
    group_id: int
    attempt: int


@register
class SpillsGiven(Message, kw_only=True, tag="spills_given"):
    """Lists the stored samples of an attempt that has not ended."""

    plane = Plane.CALL
    topic = "spills_given"
    answers = True
    group_id: int
    attempt: int
    samples: tuple[SampleSummary, ...]


@register
class KillRequested(Message, kw_only=True, tag="kill_requested"):
    """Asks a node daemon to kill a hung server that it runs, and so to restart it. Answered by KillAnswered."""

    plane = Plane.CALL
    topic = "kill"
    process: str
    pid: int  # expected process id; the daemon does not kill a process that was started since
    reason: str  # for the log, human-readable


@register
class KillAnswered(Message, kw_only=True, tag="kill_answered"):
    """Reports whether the process to be killed was still running."""

    plane = Plane.CALL
    topic = "kill_answered"
    answers = True
    killed: bool


@register
class LocalCopyRequested(Message, kw_only=True, tag="local_copy_requested"):
    """Asks a node daemon for the node's full local copy of a weight version. Answered by LocalCopyGiven.

    The daemon makes the copy once, whatever the number of requests. Sent by rollout.
    """

    plane = Plane.CALL
    topic = "local_copy"
    version: int
    checksum: str
    path: str  # where the version is published, in full or as a delta
    timeout_s: float  # how long the caller waits for the answer
    doubted: bool = False  # an engine read the copy and did not hold the version; the copy is verified again
    files: dict[str, FileSum] = {}  # published sizes and checksums by file name; an existing copy is compared with them
    was_read: bool = False  # an engine has read the copy; it is compared once more, but not made again


@register
class LocalCopyGiven(Message, kw_only=True, tag="local_copy_given"):
    """Gives the path of a node's local copy of a weight version, or the reason why it has none."""

    plane = Plane.CALL
    topic = "local_copy_given"
    answers = True
    path: str = ""
    reason: str = ""  # why there is no copy
    unusable: bool = False  # the published files do not match their announcement


class EngineLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How a CPU engine shards and stores its weights. Not sent any more; older messages have it."""

    tp_size: int
    dtype: str  # as torch names it
    is_filled_up: bool  # whether uneven dimensions are padded, as SGLang does


class WeightSyncMember(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that takes part in a weight sync."""

    engine: str
    key: str  # identifies this engine process to its rollout actor; a restart of either changes it
    num_ranks: int  # ranks that receive tensors: the engine's tensor-parallel ranks
    wants: EngineLayout | None = None  # unused: the trainer does not predict an engine's tensor checksums
    is_compared: bool = True  # its tensor checksums are compared with those of other engines with equal weights


class UpdateGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A torch process group in which a pipeline stage of the trainer, as rank 0, broadcasts to the engines."""

    name: str
    address: str
    port: int
    world_size: int
    backend: str  # as torch names it


@register
class WeightSyncOffered(Message, kw_only=True, tag="weight_session_offered"):
    """Asks a rollout actor which of its engines take a version now. Answered by MembersGiven. Sent by trainer."""

    plane = Plane.CALL
    topic = "weight_session.offered"
    session: str
    incarnation: int  # of the trainer; weight syncs of an older incarnation are over
    version: int
    deadline_s: float  # for each later step of the weight sync
    part: int = 0  # index of the engine subset to update; the other engines go on serving
    num_parts: int = 1


@register
class MembersGiven(Message, kw_only=True, tag="weight_session_members"):
    """Lists the engines that take part in a weight sync, in order."""

    plane = Plane.CALL
    topic = "weight_session.members"
    answers = True
    members: tuple[WeightSyncMember, ...]
    held_back: str = ""  # why no engine takes part although some lack the version; the rollout actor requests it later


@register
class WeightSyncPrepared(Message, kw_only=True, tag="weight_session_prepared"):
    """Pauses the member engines and prepares them to receive weights. Answered by EnginesAnswered. Sent by trainer."""

    plane = Plane.CALL
    topic = "weight_session.prepared"
    session: str


@register
class UpdateGroupsOffered(Message, kw_only=True, tag="weight_session_groups"):
    """Has members join the trainer in new process groups, one per pipeline stage, which replace the old ones.

    Answered by EnginesAnswered. The trainer waits in the groups until then. Sent by trainer.
    """

    plane = Plane.CALL
    topic = "weight_session.groups"
    session: str
    groups: tuple[UpdateGroup, ...]
    offsets: dict[str, int]  # each engine's first rank in the groups


@register
class BucketSent(Message, kw_only=True, tag="weight_session_bucket"):
    """Announces one bucket of tensors, concatenated in one buffer. Answered by EnginesAnswered. Sent by trainer."""

    plane = Plane.CALL
    topic = "weight_session.bucket"
    session: str
    stage: int  # pipeline stage of the trainer
    index: int  # from 0 in each pipeline stage
    names: tuple[str, ...]  # Hugging Face tensor names
    dtypes: tuple[str, ...]  # as torch names them
    shapes: tuple[tuple[int, ...], ...]
    group: str = ""  # process group in which the bucket is broadcast; "": it is in `payloads`
    payloads: dict[str, tuple[str, ...]] = {}  # by engine, one memory handle (GPU IPC or shared memory) per rank
    segments: tuple[str, ...] = ()  # shared-memory segments to remove once they are read


@register
class WeightSyncFinished(Message, kw_only=True, tag="weight_session_finished"):
    """Has members finish loading and verify their weights. Answered by EnginesAnswered. Sent by trainer."""

    plane = Plane.CALL
    topic = "weight_session.finished"
    session: str
    checksum: str  # identity of all tensors sent: equal weights have equal checksums; "": not compared
    num_buckets: int
    expected: dict[str, list[dict[str, str]]] = {}  # unused: engines of one version are compared with each other


@register
class WeightSyncClosed(Message, kw_only=True, tag="weight_session_closed"):
    """Aborts a weight sync that cannot finish. Answered by EnginesAnswered. Sent by trainer."""

    plane = Plane.CALL
    topic = "weight_session.closed"
    session: str
    reason: str


@register
class EnginesAnswered(Message, kw_only=True, tag="weight_session_answered"):
    """Reports the result of one weight-sync step on the engines of a rollout actor."""

    plane = Plane.CALL
    topic = "weight_session.answered"
    answers = True
    failed: dict[str, str]  # reason by engine; the step succeeded on all other engines that are not pending
    pending: dict[str, str] = {}  # what each engine does that has not finished the step; the trainer calls again


@register
class WeightSyncRequested(Message, kw_only=True, tag="weight_session_requested"):
    """Asks the trainer for a weight sync for engines that became ready late. Answered by WeightSyncGranted.

    Sent by rollout.
    """

    plane = Plane.CALL
    topic = "weight_session.requested"
    version: int
    engines: tuple[str, ...]


@register
class WeightSyncGranted(Message, kw_only=True, tag="weight_session_granted"):
    """Reports whether the weight sync will happen. If not, the trainer announces newer weights instead."""

    plane = Plane.CALL
    topic = "weight_session.granted"
    answers = True
    granted: bool
