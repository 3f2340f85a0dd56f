"""The call plane: requests to one actor instance, and small answers."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from messages.arrays import Float32Array
from messages.base import EngineSums, FileSum, Message, Plane, register
from messages.samples import SampleSummary


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A grader's answer for one sample: a reward, or the reason why it has none."""

    index: int
    part: int = 0
    reward: float | None = None
    details: dict[str, Any] | None = None  # the full answer if the grader returned a dict
    error: str | None = None  # "timeout", "nan", the exception's text, ...
    cause: str | None = None  # kind of the error, such as "timeout" or "bad_answer"
    token_rewards: Float32Array | UnsetType = UNSET  # [T], of the response; the reward is their sum. Not sent: none


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
class HaltRequested(Message, kw_only=True, tag="halt_requested"):
    """Asks the buffer to end the round that is generated now, as a person wishes. Answered by HaltAnswered."""

    plane = Plane.CALL
    topic = "halt"


@register
class HaltAnswered(Message, kw_only=True, tag="halt_answered"):
    """Reports that the running round is halted, or why there is nothing to halt."""

    plane = Plane.CALL
    topic = "halt_answered"
    answers = True
    round: int = -1  # the halted round; -1: nothing was halted
    num_groups: int = 0  # its groups in flight, which are given back to the pool
    reason: str = ""  # why nothing was halted, human-readable


@register
class KillRequested(Message, kw_only=True, tag="kill_requested"):
    """Asks a node daemon to kill a server that it runs, and so to restart it. Answered by KillAnswered."""

    plane = Plane.CALL
    topic = "kill"
    process: str
    pid: int  # expected process id; the daemon does not kill a process that was started since
    reason: str  # for the log, human-readable
    gives_up: bool = False  # do not restart it: the run goes on without it, or ends if it cannot


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
    manifest: str = ""  # sha256 of the version's manifest, for a node that does not see `path`
    series: Literal["", "adapters", "adapters/base"] = ""  # numbered on its own: LoRA adapters, or their base models


@register
class LocalCopyGiven(Message, kw_only=True, tag="local_copy_given"):
    """Gives the path of a node's local copy of a weight version, or the reason why it has none."""

    plane = Plane.CALL
    topic = "local_copy_given"
    answers = True
    path: str = ""
    reason: str = ""  # why there is no copy
    unusable: bool = False  # the published files do not match their announcement


class CheckpointFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a checkpoint, as a rank wrote it."""

    size_bytes: int
    sha256: str
    node: str  # of the rank


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint whose files lie on several nodes."""

    name: str = ""  # of its directory: incarnation and step, "0003/step-00000040"
    files: dict[str, CheckpointFile] = {}  # by name in the directory
    parts: dict[str, str] = {}  # sha256 of the manifest of what the ranks of a node wrote, by node


class HeldCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What one node has of a checkpoint."""

    record: CheckpointRecord
    nodes: tuple[str, ...]  # whose parts it has


@register
class CheckpointCopiesRequested(Message, kw_only=True, tag="checkpoint_copies_requested"):
    """Asks a node daemon for its copies of checkpoint files. Answered by CheckpointCopiesGiven. Sent by trainer."""

    plane = Plane.CALL
    topic = "checkpoint_copies"
    # What it does: list the checkpoints here; sum up and serve what the ranks of this node wrote; hold parts of other
    # nodes; give the checkpoint its name; forget others.
    act: Literal["list", "sum_up", "hold", "name", "forget"]
    record: CheckpointRecord = CheckpointRecord()
    nodes: tuple[str, ...] = ()  # whose parts to hold
    thorough: bool = False  # compare parts that are here with their sums
    keeps: tuple[str, ...] | None = None  # names not to forget; None: all that are complete


@register
class CheckpointCopiesGiven(Message, kw_only=True, tag="checkpoint_copies_given"):
    """Reports what a node has of checkpoints, or the reason why it could not do what was requested."""

    plane = Plane.CALL
    topic = "checkpoint_copies_given"
    answers = True
    digest: str = ""  # sha256 of the manifest of what was summed up
    held: tuple[HeldCheckpoint, ...] = ()
    reason: str = ""  # of a failure


class WeightSyncMember(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that takes part in a weight sync."""

    engine: str
    key: str  # identifies this engine process to its rollout actor; a restart of either changes it
    num_ranks: int  # ranks that receive tensors: the engine's tensor-parallel ranks
    is_compared: bool = True  # its tensor checksums are compared with those of other engines with equal weights


class UpdateGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A torch process group in which a pipeline stage of the trainer, as rank 0, broadcasts to the engines."""

    name: str
    address: str
    port: int
    world_size: int
    backend: str  # as torch names it


@register
class WeightSyncPrepared(Message, kw_only=True, tag="weight_sync_prepared"):
    """Asks a rollout actor to prepare its engines that lack a version: they pause, ready to receive. Sent by trainer.

    Answered by WeightSyncAnswered, with the engines that take part. Sent again while engines are pending.
    """

    plane = Plane.CALL
    topic = "weight_sync.prepared"
    session: str
    incarnation: int  # of the trainer; weight syncs of an older incarnation are over
    version: int
    deadline_s: float  # for each later step of the weight sync
    part: int = 0  # index of the engine subset to update; the other engines go on serving
    num_parts: int = 1


@register
class BucketSent(Message, kw_only=True, tag="weight_sync_bucket"):
    """Announces one bucket of tensors, concatenated in one buffer. Answered by WeightSyncAnswered. Sent by trainer.

    A bucket is broadcast in the group of its stage. Engines that are not in the groups of all stages first leave their
    old groups and join these, in order.
    """

    plane = Plane.CALL
    topic = "weight_sync.bucket"
    session: str
    stage: int  # pipeline stage of the trainer
    index: int  # from 0 in each pipeline stage
    names: tuple[str, ...]  # Hugging Face tensor names
    dtypes: tuple[str, ...]  # as torch names them
    shapes: tuple[tuple[int, ...], ...]
    groups: tuple[UpdateGroup, ...] = ()  # of all stages; empty: the bucket is in `payloads`
    offsets: dict[str, int] = {}  # each engine's first rank in the groups
    payloads: dict[str, tuple[str, ...]] = {}  # by engine, one memory handle (GPU IPC or shared memory) per rank
    segments: tuple[str, ...] = ()  # shared-memory segments to remove once they are read


@register
class WeightSyncDecided(Message, kw_only=True, tag="weight_sync_decided"):
    """Commits or aborts a weight sync. Answered by WeightSyncAnswered. Sent by trainer.

    On a commit, engines finish loading and verify their weights, and the call is sent again while some are pending. On
    an abort they leave the weight sync.
    """

    plane = Plane.CALL
    topic = "weight_sync.decided"
    session: str
    is_commit: bool
    reason: str = ""  # of an abort
    checksum: str = ""  # identity of all tensors sent: equal weights have equal checksums; "": not compared
    num_buckets: int = 0
    engine_sums: EngineSums | None = None  # of the tensors that an engine holds then; None: `no_sums` says why
    no_sums: str = ""


@register
class WeightSyncRequested(Message, kw_only=True, tag="weight_sync_requested"):
    """Asks the trainer for a weight sync for engines that became ready late. Answered by WeightSyncAnswered.

    Sent by rollout.
    """

    plane = Plane.CALL
    topic = "weight_sync.requested"
    version: int
    engines: tuple[str, ...]


@register
class WeightSyncAnswered(Message, kw_only=True, tag="weight_sync_answered"):
    """Answers each call of a weight sync. The call succeeded for all engines that neither failed nor are pending."""

    plane = Plane.CALL
    topic = "weight_sync.answered"
    answers = True
    failed: dict[str, str] = {}  # reason by engine; of a request: why there will be no weight sync for it
    pending: dict[str, str] = {}  # what each engine does that has not finished the step; the trainer calls again
    members: tuple[WeightSyncMember, ...] = ()  # of a prepare: the engines that take part, in order
