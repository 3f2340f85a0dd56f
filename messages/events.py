"""The event plane: small, public facts. messages.ledger has the events that only the buffer writes."""

from enum import StrEnum
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from messages.base import EngineSums, FileSum, Message, Plane, register
from messages.ledger import GroupRef, leave_out_not_finite
from messages.samples import EngineNumbers, LastSample, SampleSummary


@register
class GroupCompleted(Message, kw_only=True, tag="group_completed"):
    """All samples of an attempt ended and are scored. Their segments are stored. Written by rollout.

    It counts if the group is in flight with this attempt and nothing ended the attempt before; the lease does not
    matter, and neither does the round. Then the group waits for a verdict, or is ready if the run has none at this
    moment (`verdicts`). If the number of distinct `index` in `samples` differs from `num_samples` of its issue, and
    that is not 0, the group has failed instead, with the reason "N samples where M were asked for". The parts of
    one index are one sample, and `baseline` is none.
    """

    plane = Plane.EVENT
    topic = "group.completed"
    keyed = True
    group_id: int
    attempt: int
    lease: str
    round: int
    instance: str
    data: str  # name of the data source
    samples: tuple[SampleSummary, ...]
    baseline: SampleSummary | None = None  # the scored greedy sample, which is not among the samples
    metadata: dict[str, Any] = {}  # of the prompt, unless the prompt is stored separately
    prompt_parts: tuple[int, ...] = ()  # data messages that hold the prompt, if it is stored separately
    rollout_time_s: float = 0.0  # from the pull of the task to the last token
    reward_time_s: float = 0.0  # from the last token to the last score
    engine: EngineNumbers = EngineNumbers()
    last_sample: LastSample = LastSample()

    def key(self) -> str:
        return f"{self.group_id}.{self.attempt}"


@register
class GroupAborted(Message, kw_only=True, tag="group_aborted"):
    """A halt ended an attempt: finished samples, and tokens to continue from. Written by rollout.

    It counts as a `group_completed` does. The group is pooled.
    """

    plane = Plane.EVENT
    topic = "group.aborted"
    keyed = True
    group_id: int
    attempt: int
    lease: str
    round: int
    instance: str
    samples: tuple[SampleSummary, ...] = ()
    held: int | UnsetType = UNSET  # generate functions that wait in that process for the next attempt; not sent: none

    def key(self) -> str:
        return f"{self.group_id}.{self.attempt}"


@register
class GroupFailed(Message, kw_only=True, tag="group_failed"):
    """An attempt failed for good: poison, or a sample without a score. By rollout, or by buffer without a task.

    It counts as a `group_completed` does. The group has failed for `reason`, and is not issued again.
    """

    plane = Plane.EVENT
    topic = "group.failed"
    keyed = True
    group_id: int
    attempt: int
    lease: str
    round: int
    instance: str
    reason: str

    def key(self) -> str:
        return f"{self.group_id}.{self.attempt}"


@register
class SegmentsSpilled(Message, kw_only=True, tag="segments_spilled"):
    """Newly stored segments of a running attempt. After a crash, another worker continues from all of them.

    Written by rollout.

    Raises:
        ValueError: `starts` has another length than `samples`, or a negative number.
    """

    plane = Plane.EVENT
    topic = "segments.spilled"
    group_id: int
    attempt: int
    lease: str
    round: int
    instance: str
    samples: tuple[SampleSummary, ...]  # changed since the last such event of this lease, with the segments since then
    starts: tuple[int, ...] = ()  # of each sample, its number of segments before these; (): each lists all its segments

    def __post_init__(self) -> None:
        if self.starts and (len(self.starts) != len(self.samples) or min(self.starts) < 0):
            raise ValueError(f"starts {self.starts} of {len(self.samples)} samples")


class Outcome(StrEnum):
    """A filter's decision on a group."""

    KEEP = "keep"  # the group is ready
    SPARE = "spare"  # drop, unless a batch cannot be filled without it
    DROP = "drop"  # the group is dropped
    FAILED = "failed"  # the filter raised, and the group has failed


@register
class VerdictGiven(Message, kw_only=True, tag="verdict_given"):
    """A filter's verdict on a completed group; the first one in log order counts. Written by filter.

    It counts if the group waits for a verdict and `event_seq` is the event that completed it. The reason of a group
    without `reason` is filter_drop or filter_failed.
    """

    plane = Plane.EVENT
    topic = "verdict.given"
    group_id: int
    attempt: int
    event_seq: int  # log sequence of the judged GroupCompleted
    outcome: Outcome
    reason: str | None = None


@register
class EvalCompleted(Message, kw_only=True, tag="eval_completed"):
    """An evaluation item ended. By rollout, or by buffer without a task. Never enters the training ledger."""

    plane = Plane.EVENT
    topic = "eval.completed"
    keyed = True
    step: int
    set: str
    item: int
    version: int
    instance: str
    samples: tuple[SampleSummary, ...]
    not_asked: bool = False  # whether the evaluation function of its set asked for no sample of it
    failed: str = ""  # why the evaluation function of its set failed; one item of the set says it

    def key(self) -> str:
        return f"{self.step}.{self.set}.{self.item}"


class EngineUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine was updated to a weight version."""

    engine: str
    pause_s: float  # how long the engine was paused, or started no request because the load blocked it
    took_s: float  # from the moment its rollout actor was due to update it until the version was verified
    num_moved_on: int = 0  # requests that went on under a newer LoRA adapter, as more were in use than the engine holds


class EngineChecksum(msgspec.Struct, frozen=True, kw_only=True):
    """Checksum of an engine's tensors, which equals that of all engines with this layout and these files."""

    layout: tuple[str, ...]
    engine: str  # the first that verified them
    files: str  # checksum of the files, or of the tensors of a weight sync
    tensors: str


@register
class WeightsApplied(Message, kw_only=True, tag="weights_applied"):
    """A rollout actor's engines hold a verified weight version. Written by rollout."""

    plane = Plane.EVENT
    topic = "weights.applied"
    version: int
    instance: str
    num_engines: int
    took_s: float  # from the announcement, or the end of an evaluation that delayed it, until verified
    engines: tuple[EngineUpdate, ...] = ()
    not_compared: dict[
        str, tuple[str, ...]
    ] = {}  # engines whose tensors are not compared with the trainer's, by reason
    # of this version, one for each layout of tensors; not sent by the only rollout actor of a run
    checksums: tuple[EngineChecksum, ...] | UnsetType = UNSET


@register
class TrainerStarted(Message, kw_only=True, tag="trainer_started"):
    """A trainer loaded its checkpoint: all batches before `step` are settled. Written by trainer.

    It counts if no start had a higher incarnation, and if a start with this `start` and incarnation did not come
    before. It is then the current trainer. Facts of a lower incarnation, and of an earlier start of the same one, count
    for nothing from then on; all other facts count, also those before the first start. Groups of a batch that it
    settles are trained, unless a `batch_trained` had settled them. A start at a smaller step takes nothing back.
    """

    plane = Plane.EVENT
    topic = "trainer.started"
    incarnation: int  # raised at each start
    step: int  # train steps in the loaded state; the number of the next batch
    start: str = ""  # unique id of this start: two may share an incarnation, and the event may be stored twice


class UntrainedSamples(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of a prompt group that were in a batch and contributed no gradient."""

    group_id: int
    reason: str  # not_finite: loss or gradient; too_long: over a rank's token limit; invalid: failed a check
    samples: tuple[tuple[int, int], ...]  # index and part of each


@register
class BatchTrained(Message, kw_only=True, tag="batch_trained"):
    """One train step is done. Idempotent by step; `replay` marks a repeated step. Written by trainer.

    The first one that counts and finds a batch of its step settles that: its groups are trained, those in
    `skipped_groups` skipped. Later ones, and one of a step without a batch, change no group.
    """

    plane = Plane.EVENT
    topic = "batch.trained"
    step: int  # number of the batch, from 0
    incarnation: int
    replay: bool = False
    num_groups: int  # that contributed a gradient; likewise num_samples and num_tokens
    num_samples: int
    num_tokens: int  # prompt and response tokens
    metrics: dict[str, float]  # names of docs/reference/metrics.md, such as train/loss
    not_finite: tuple[str, ...] = ()  # names of metrics that are NaN or infinite, which JSON cannot represent
    untrained: tuple[UntrainedSamples, ...] = ()  # samples of the batch that contributed no gradient
    skipped_groups: tuple[int, ...] = ()  # groups without any sample that contributed a gradient
    not_finite_values: tuple[str, ...] = ()  # values of the metrics in not_finite, in their order: nan, inf, -inf
    start: str = ""  # id of the trainer's start: two starts may share an incarnation; empty: of an older version

    def __post_init__(self) -> None:
        leave_out_not_finite(self)


@register
class PairsEvaluated(Message, kw_only=True, tag="pairs_evaluated"):
    """Held-out preference pairs were evaluated under the weights after a train step. Written by trainer."""

    plane = Plane.EVENT
    topic = "pairs.evaluated"
    step: int  # train steps that the weights contain
    incarnation: int
    metrics: dict[str, float]  # eval/<set>, the accuracy, and eval/<set>/<metric>
    took_s: float
    not_finite: tuple[str, ...] = ()  # names of metrics that are NaN or infinite, which JSON cannot represent
    not_finite_values: tuple[str, ...] = ()  # values of the metrics in not_finite, in their order: nan, inf, -inf

    def __post_init__(self) -> None:
        leave_out_not_finite(self)


@register
class PayloadsMissing(Message, kw_only=True, tag="payloads_missing"):
    """Groups of a batch cannot be trained, because their stored payloads are gone. Written by trainer.

    It counts if no later trainer has started, the step's batch was not settled, and `groups` has at least one entry of
    that batch, equal in all fields; its other entries name nothing. The batch is then no more: the groups named are
    pooled without samples (reason payloads_missing until they are issued again), the others are ready, and the step
    waits for another batch, which may have other groups.
    The groups of a settled batch stay trained.
    """

    plane = Plane.EVENT
    topic = "payloads.missing"
    step: int  # of the batch
    incarnation: int
    groups: tuple[GroupRef, ...]
    reason: str
    start: str = ""  # id of the trainer's start: two starts may share an incarnation; empty: of an older version


@register
class SelectionFailed(Message, kw_only=True, tag="selection_failed"):
    """A user's selection function failed, so the buffer selects groups in arrival order. Written by buffer."""

    plane = Plane.EVENT
    topic = "selection.failed"
    kind: str  # over_sampling_filter | buffer_filter
    reason: str
    num_groups: int  # passed to the function


@register
class UserFunctionRaised(Message, kw_only=True, tag="user_function_raised"):
    """A user's function raised or took too long, for the first time at these places in this process.

    Written by reward, rollout, filter and buffer.
    """

    plane = Plane.EVENT
    topic = "user.function_raised"
    instance: str
    function: str  # its name, or the setting that names it
    traceback: str  # from the function's own first frame on
    took_too_long: bool = False  # it was ended there


@register
class CheckpointRequested(Message, kw_only=True, tag="checkpoint_requested"):
    """A stream is nearly full. A checkpoint would allow the buffer to trim it. Written by buffer, read by trainer."""

    plane = Plane.EVENT
    topic = "checkpoint.requested"
    step: int  # train steps done, as logged at the request; one request per step
    stream: str
    used: float  # used share of the stream's byte limit


@register
class LogTrimmed(Message, kw_only=True, tag="log_trimmed"):
    """Events below a sequence were moved from the log to a file of the run directory. Written by buffer."""

    plane = Plane.EVENT
    topic = "log.trimmed"
    below_seq: int
    num_events: int
    path: str  # relative to the run directory


@register
class CheckpointSaved(Message, kw_only=True, tag="checkpoint_saved"):
    """A checkpoint is complete on disk. Written by trainer.

    If it is of the current trainer, it settles the batches before `oldest_step` as `trainer_started` does.
    """

    plane = Plane.EVENT
    topic = "checkpoint.saved"
    step: int  # train steps that it contains
    incarnation: int
    path: str
    oldest_step: int  # of the oldest checkpoint that can still be loaded
    took_s: float  # from start to completion; training goes on meanwhile
    pause_s: float = 0.0  # how long training stood still while the state was copied
    start: str = ""  # id of the trainer's start: two starts may share an incarnation; empty: of an older version


@register
class CheckpointSetAside(Message, kw_only=True, tag="checkpoint_set_aside"):
    """A damaged checkpoint was renamed, so that no start reads it. Written by trainer."""

    plane = Plane.EVENT
    topic = "checkpoint.set_aside"
    step: int  # train steps that it should contain
    incarnation: int  # of the trainer that found it
    path: str  # its new name
    reason: str  # which file is damaged, and how


MAX_PROBE_TOKENS: Final = 64


class WeightProbe(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed tokens and their log-probs under the announced weights. An engine with these weights returns the same.

    Raises:
        ValueError: both columns differ in length, or have fewer than 2 tokens.
    """

    token_ids: tuple[int, ...]  # [P], a prompt
    log_probs: tuple[float, ...]  # [P], natural log at temperature 1, given the previous tokens; 0 for the first
    spreads: dict[str, float] = {}  # by dtype: how far rounding in it moves these log-probs, on average in nats

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.log_probs) or len(self.token_ids) < 2:
            raise ValueError(f"{len(self.token_ids)} token_ids with {len(self.log_probs)} log_probs")


class BaseWeights(msgspec.Struct, frozen=True, kw_only=True):
    """The base model of adapter versions, in full, which engines load and verify once after their start."""

    path: str
    checksum: str
    size_bytes: int
    files: dict[str, FileSum] = {}  # as in `WeightsAnnounced`, and so are the others
    engine_sums: EngineSums | None = None
    no_sums: str = ""
    manifest: str = ""


@register
class WeightsAnnounced(Message, kw_only=True, tag="weights_announced"):
    """A weight version is ready for engines. Versions count publishes and are never reused. Written by trainer."""

    plane = Plane.EVENT
    topic = "weights.announced"
    version: int
    step: int  # train steps that the weights contain
    incarnation: int
    path: str  # directory with model.safetensors or a delta, for the disk transport; else ""
    checksum: str  # of the files alone; engines' own checksums cover their tensors and differ
    size_bytes: int  # of the full files
    kind: str = "full"  # "full", "delta" or "lora": an adapter of `base` in peft's files
    took_s: float = 0.0
    probe: WeightProbe | None = None  # log-probs that an engine with these weights must return
    no_probe: str = ""  # why there is no probe
    transport: str = "disk"  # else weight syncs bring the version
    sender: str = ""  # the actor instance that leads the weight syncs
    base_version: int = 0  # for a delta: the version that it applies to
    delta_bytes: int = 0  # for a delta: size of the published delta, whereas `size_bytes` is of the full files
    files: dict[str, FileSum] = {}  # by name, of the full files that engines read; empty: not compared
    again_of: int = 0  # republishes the weights of this version, whose files engines could not read; 0: new weights
    start: str = ""  # id of the trainer's start: two starts may share an incarnation; empty: of an older version
    engine_sums: EngineSums | None = None  # of the tensors that an engine holds then; None: `no_sums` says why
    no_sums: str = ""
    manifest: str = (
        ""  # sha256 of the manifest by which nodes fetch the version from each other; empty: they read `path`
    )
    base: BaseWeights | None = None  # for an adapter: the weights that it belongs to


@register
class PromptsLoaded(Message, kw_only=True, tag="prompts_loaded"):
    """A data source was read. Written by buffer."""

    plane = Plane.EVENT
    topic = "prompts.loaded"
    data: str
    num_prompts: int  # 0: a user's function generates prompts without end
    num_too_long: int  # skipped prompts over the prompt limit
    took_s: float
    fingerprint: str = ""  # of the prompts in their order; a run does not resume with other prompts
    first_ids: tuple[int, ...] = ()  # token ids of the first prompts, one after another, for the weight probe
