"""The event plane: facts, light and public. What the buffer alone writes is in messages.ledger."""

from enum import StrEnum
from typing import Any

import msgspec

from messages.base import FileSum, Message, Plane, register
from messages.ledger import GroupRef, leave_out_not_finite
from messages.samples import EngineNumbers, SampleSummary


@register
class GroupCompleted(Message, kw_only=True, tag="group_completed"):
    """All samples of an attempt ended and are scored; their segments are stored. Written by rollout."""

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
    metadata: dict[str, Any] = {}  # of the prompt, unless that is stored by itself
    prompt_parts: tuple[int, ...] = ()  # data messages that hold the prompt, if it is
    rollout_time_s: float = 0.0  # from the pull of the task to the last token
    reward_time_s: float = 0.0  # from the last token to the last score
    engine: EngineNumbers = EngineNumbers()

    def key(self) -> str:
        return f"{self.group_id}.{self.attempt}"


@register
class GroupAborted(Message, kw_only=True, tag="group_aborted"):
    """An attempt ended by a halt with what it had: finished members, tokens to continue from. Written by rollout."""

    plane = Plane.EVENT
    topic = "group.aborted"
    keyed = True
    group_id: int
    attempt: int
    lease: str
    round: int
    instance: str
    samples: tuple[SampleSummary, ...] = ()

    def key(self) -> str:
        return f"{self.group_id}.{self.attempt}"


@register
class GroupFailed(Message, kw_only=True, tag="group_failed"):
    """An attempt that cannot succeed: poison, or a sample without a score. By rollout, or by buffer without a task."""

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
    """What an attempt that goes on has stored so far, for whoever works on it after a crash. Written by rollout."""

    plane = Plane.EVENT
    topic = "segments.spilled"
    group_id: int
    attempt: int
    lease: str
    round: int
    instance: str
    samples: tuple[SampleSummary, ...]  # those that have something stored; each with all its segments so far


class Outcome(StrEnum):
    """What a filter decides."""

    KEEP = "keep"
    SPARE = "spare"  # drop, unless a batch cannot be filled without it
    DROP = "drop"
    FAILED = "failed"  # the filter raised


@register
class VerdictGiven(Message, kw_only=True, tag="verdict_given"):
    """A filter's verdict on a completed group; the first one in log order counts. Written by filter."""

    plane = Plane.EVENT
    topic = "verdict.given"
    group_id: int
    attempt: int
    event_seq: int  # log sequence of the GroupCompleted it judges
    outcome: Outcome
    reason: str | None = None


@register
class EvalCompleted(Message, kw_only=True, tag="eval_completed"):
    """An evaluation item ended. By rollout, or by buffer without a task; never enters the training ledger."""

    plane = Plane.EVENT
    topic = "eval.completed"
    keyed = True
    step: int
    set: str
    item: int
    version: int
    instance: str
    samples: tuple[SampleSummary, ...]

    def key(self) -> str:
        return f"{self.step}.{self.set}.{self.item}"


class EngineUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine came to a weight version."""

    engine: str
    pause_s: float  # that it stood still, or began no request: from its pause, or since the load blocked requests
    took_s: float  # since its rollout actor was to bring it that version, until it proved to hold it


@register
class WeightsApplied(Message, kw_only=True, tag="weights_applied"):
    """A rollout actor's engines proved that they hold a weight version. Written by rollout."""

    plane = Plane.EVENT
    topic = "weights.applied"
    version: int
    instance: str
    num_engines: int
    took_s: float  # since the rollout actor was to bring them that version: its announcement, or an evaluation's end
    engines: tuple[EngineUpdate, ...] = ()


@register
class TrainerStarted(Message, kw_only=True, tag="trainer_started"):
    """A trainer loaded its checkpoint: every batch up to `step` is settled. Written by trainer."""

    plane = Plane.EVENT
    topic = "trainer.started"
    incarnation: int  # raised at each start
    step: int  # train steps that the loaded state contains; the next batch is this step
    start: str = ""  # id of this very start: the event may be stored twice


class UntrainedSamples(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of a prompt group that were in a batch and left no gradient."""

    group_id: int
    reason: str  # not_finite: their loss or gradient; too_long: over what a rank takes; invalid: not believed
    samples: tuple[tuple[int, int], ...]  # index and part of each


@register
class BatchTrained(Message, kw_only=True, tag="batch_trained"):
    """One train step is done. Idempotent by step; a replayed step says so. Written by trainer."""

    plane = Plane.EVENT
    topic = "batch.trained"
    step: int  # number of the batch, from 0
    incarnation: int
    replay: bool = False
    num_groups: int  # that left a gradient, like the next two
    num_samples: int
    num_tokens: int  # prompt and response tokens
    metrics: dict[str, float]  # names of docs/metrics: train/loss, train/grad_norm, perf/train_time, ...
    not_finite: tuple[str, ...] = ()  # names of metrics that were infinite or no number, for which JSON has no word
    untrained: tuple[UntrainedSamples, ...] = ()  # of the batch, beside those that trained
    skipped_groups: tuple[int, ...] = ()  # groups of which no sample left a gradient
    not_finite_values: tuple[str, ...] = ()  # of the metrics in not_finite, in their order: nan, inf, -inf

    def __post_init__(self) -> None:
        leave_out_not_finite(self)


@register
class PayloadsMissing(Message, kw_only=True, tag="payloads_missing"):
    """Groups of a batch cannot be trained, for what was stored of them is gone. Written by trainer."""

    plane = Plane.EVENT
    topic = "payloads.missing"
    step: int  # of the batch
    incarnation: int
    groups: tuple[GroupRef, ...]
    reason: str


@register
class SelectionFailed(Message, kw_only=True, tag="selection_failed"):
    """A user's function did not choose among groups, so they are taken first come first. Written by buffer."""

    plane = Plane.EVENT
    topic = "selection.failed"
    kind: str  # over_sampling_filter | buffer_filter
    reason: str
    num_groups: int  # that it was asked about


@register
class CheckpointRequested(Message, kw_only=True, tag="checkpoint_requested"):
    """A stream fills up: a checkpoint would let it be emptied. Written by buffer, read by trainer."""

    plane = Plane.EVENT
    topic = "checkpoint.requested"
    step: int  # train steps done by the log when it was asked for; one request per step
    stream: str
    used: float  # share of the stream's bytes


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
    """A checkpoint is complete on disk. Written by trainer."""

    plane = Plane.EVENT
    topic = "checkpoint.saved"
    step: int  # train steps that it contains
    incarnation: int
    path: str
    oldest_step: int  # of the oldest checkpoint that can still be loaded
    took_s: float  # from its begin until it was complete; training went on meanwhile
    pause_s: float = 0.0  # of it, while the state was copied and training stood still


@register
class CheckpointSetAside(Message, kw_only=True, tag="checkpoint_set_aside"):
    """A checkpoint on disk is damaged and was renamed: no start reads it. Written by trainer."""

    plane = Plane.EVENT
    topic = "checkpoint.set_aside"
    step: int  # train steps that it was to contain
    incarnation: int  # of the trainer that found it
    path: str  # its new name
    reason: str  # which file is damaged, and how


class WeightProbe(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed tokens and what the announced weights make of them; an engine that holds these weights says the same.

    Raises ValueError unless both columns have one length, of at least 2.
    """

    token_ids: tuple[int, ...]  # [P], a prompt
    log_probs: tuple[float, ...]  # [P], natural log at temperature 1, given the tokens before; 0 for the first

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.log_probs) or len(self.token_ids) < 2:
            raise ValueError(f"{len(self.token_ids)} token_ids with {len(self.log_probs)} log_probs")


@register
class WeightsAnnounced(Message, kw_only=True, tag="weights_announced"):
    """A set of weights is ready to be taken by engines. Versions count publishes and are never reused. By trainer."""

    plane = Plane.EVENT
    topic = "weights.announced"
    version: int
    step: int  # train steps that the weights contain
    incarnation: int
    path: str  # directory with model.safetensors, or what changed, for the disk transport; else ""
    checksum: str  # of the files and nothing else: no engine's own checksum, over its own tensors, equals it
    size_bytes: int  # of whole files
    kind: str = "full"  # or "delta"; later also lora
    took_s: float = 0.0
    probe: WeightProbe | None = None  # what an engine that holds them answers to
    no_probe: str = ""  # why there is none
    transport: str = "disk"  # else the version comes in weight sessions
    sender: str = ""  # the instance that leads them
    base_version: int = 0  # of a delta: the version that it is changes to
    delta_bytes: int = 0  # of a delta: what lies there, in place of `size_bytes`
    files: dict[str, FileSum] = {}  # by name, of the whole files that an engine reads; empty: they are not compared
    again_of: int = 0  # the weights are those of this version, of which engines could not read the files; 0: new ones


@register
class PromptsLoaded(Message, kw_only=True, tag="prompts_loaded"):
    """A data source was read. Written by buffer."""

    plane = Plane.EVENT
    topic = "prompts.loaded"
    data: str
    num_prompts: int  # 0: a user's function makes them, without end
    num_too_long: int  # left out, over the prompt limit
    took_s: float
    fingerprint: str = ""  # of the prompts in their order; a run is not resumed on others


@register
class ActorStarted(Message, kw_only=True, tag="actor_started"):
    """A process of the run was started. Written by the node agent."""

    plane = Plane.EVENT
    topic = "actor.started"
    actor: str
    node: str
    pid: int
    restarts: int = 0


@register
class ActorExited(Message, kw_only=True, tag="actor_exited"):
    """A process of the run ended. Written by the node agent."""

    plane = Plane.EVENT
    topic = "actor.exited"
    actor: str
    node: str
    pid: int
    exit_code: int  # negative: killed by that signal
    reason: str
    restart_in_s: float | None = None  # None: not started again


@register
class RunStalled(Message, kw_only=True, tag="run_stalled"):
    """Nothing was logged for long: what each actor waits for. Written by the node agent."""

    plane = Plane.EVENT
    topic = "run.stalled"
    idle_s: float  # since the last event
    waiting: dict[str, str]  # by instance; of one that does not answer, that


@register
class MessageDeadLettered(Message, kw_only=True, tag="message_dead_lettered"):
    """A message could not be used and was set aside. Written by whoever met it."""

    plane = Plane.EVENT
    topic = "message.dead_lettered"
    keyed = True
    origin: str = ""  # where it lay, as in its DeadLetter; one event is told per origin
    subject: str
    reason: str
    dead_seq: int  # in the dead-letter stream

    def key(self) -> str:
        return self.origin


@register
class DeadLetter(Message, kw_only=True, tag="dead_letter"):
    """A message set aside, as it came."""

    plane = Plane.DEAD
    topic = "letter"
    keyed = True
    origin: str  # where it lay: plane and stream sequence, "event.17"; one letter is kept per origin
    subject: str
    reason: str
    headers: dict[str, str]
    payload: bytes  # base64 in JSON

    def key(self) -> str:
        return self.origin
