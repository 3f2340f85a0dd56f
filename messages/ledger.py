"""Decisions of the buffer, which alone writes them. With messages.events they form the ledger's log.

The docstrings state what the ledger makes of each event: they are the reference for readers that have only the pages.
"""

import math
from typing import Protocol

import msgspec

from messages.base import Message, Plane, register


@register
class BufferStarted(Message, kw_only=True, tag="buffer_started"):
    """A buffer took over the ledger. A buffer that reads a higher incarnation than its own stops (fencing).

    It counts if its incarnation is higher than that of all before it. From then on a decision of a lower incarnation
    changes nothing; every decision has the incarnation of its buffer. If `verdicts` is false, all groups that wait
    for a verdict are kept at once, in log order.
    """

    plane = Plane.EVENT
    topic = "ledger.buffer_started"
    incarnation: int
    verdicts: bool = True  # whether completed groups wait for a filter's verdict; False: they are kept at once
    tells_source: bool = False  # whether a data source with a state gets the outcomes of groups


class IssuedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One issue of a prompt group."""

    group_id: int
    attempt: int
    prompt: int  # index in the order of the data source, counted across epochs
    prompt_parts: tuple[int, ...] = ()  # data messages that hold the prompt, if it is too large for its task


@register
class GroupsIssued(Message, kw_only=True, tag="groups_issued"):
    """The buffer issued groups for generation. Their tasks follow.

    A new group has the next free `group_id`, from 0 without gaps, and attempt 0. Any other issue is of a pooled group,
    with a higher attempt; for a group in another state it changes nothing. An issue that changes nothing leaves its
    `group_id` free. `verdicts` does what it does in `buffer_started`, and the newest of both decides when a group
    completes.
    """

    plane = Plane.EVENT
    topic = "ledger.groups_issued"
    incarnation: int
    round: int
    min_version: int
    groups: tuple[IssuedGroup, ...]
    num_samples: int = 0  # of each group; 0: unknown
    verdicts: bool = True  # as in the buffer's BufferStarted, for readers that start in the middle of the log
    draws: tuple[int, ...] = ()  # data messages DrawsStored: rows of the new groups, and the source's state after them
    draws_digest: str = ""  # hex SHA-256 of these chunks together
    num_told: int = 0  # outcomes that the source got before it drew: the oldest ones that it did not have
    more: int = 0  # further groups that the next events issue to the same round, because one event is bounded


@register
class RoundHalted(Message, kw_only=True, tag="round_halted"):
    """A round reached its target, or a person ended it. Rollout actors abort its remaining work.

    It changes the state of no group: a group of the round is pooled by its `group_aborted`, or completes late.
    """

    plane = Plane.EVENT
    topic = "ledger.round_halted"
    incarnation: int
    round: int
    by_hand: bool = False  # a person ended the open round: its groups go on in the next one, for the same batch


class GroupRef(msgspec.Struct, frozen=True, kw_only=True):
    """A group in a batch, and the log sequence of its GroupCompleted."""

    group_id: int
    attempt: int
    event_seq: int


@register
class BatchReady(Message, kw_only=True, tag="batch_ready"):
    """The groups of one train step, in order of issue. A large batch takes several events, one after another.

    A batch of several events counts with the last of them. Its events have one incarnation, one step and `index` from
    0 to `num_events` - 1, and no other `batch_ready` of a buffer that counts is between them, not even a copy; else
    what came so far is void, and the buffer decides anew.

    It counts only for a step that has no batch: a step above those of all batches so far, or one whose batch
    `payloads_missing` took back. It is void if it cites a completion that `payloads_missing` named for this step. Each
    of its groups is in the batch if it is ready or spare and `event_seq` is the event that completed it; a group that
    is not changes nothing, and is a fault of the buffer. Without any such group the batch is void.

    All other spare groups, and the ready ones in `passed_over`, are passed over: they count as ready until
    `groups_closed` names them, and no batch takes them.
    """

    plane = Plane.EVENT
    topic = "ledger.batch_ready"
    incarnation: int
    step: int  # number of the batch, from 0
    groups: tuple[GroupRef, ...]
    passed_over: tuple[int, ...] = ()  # kept groups that the selection did not choose; they are closed next
    index: int = 0  # of this event among those of the batch
    num_events: int = 1  # of the batch, because one event is bounded


@register
class GroupsClosed(Message, kw_only=True, tag="groups_closed"):
    """The buffer gives groups up. They get no further attempt.

    A group that is not yet trained, skipped, dropped or failed is dropped or failed, as `outcome` says, for `reason`,
    whatever its state: also one that a halt aborted (`rollout.on_halt = "drop"`, reason halted), one that is too stale,
    or one that was passed over. The others stay as they are.
    """

    plane = Plane.EVENT
    topic = "ledger.groups_closed"
    incarnation: int
    group_ids: tuple[int, ...]
    outcome: str  # dropped | failed
    reason: str


class EvalSetSize(msgspec.Struct, frozen=True, kw_only=True):
    """Number of items in one evaluation set."""

    set: str
    num_items: int
    keeps: bool = False  # whether the ledger keeps the samples' summaries until the end, for a function of metrics
    has_function: bool | None = None  # whether an evaluation function asks for its samples; None: not stated


@register
class EvalIssued(Message, kw_only=True, tag="eval_issued"):
    """The buffer issued an evaluation of one weight version. Its tasks follow."""

    plane = Plane.EVENT
    topic = "ledger.eval_issued"
    incarnation: int
    step: int
    version: int
    sets: tuple[EvalSetSize, ...]
    payload_seq: int = 0  # lowest data sequence that the evaluation needs; 0: it needs none


class _Measured(Protocol):
    @property
    def metrics(self) -> dict[str, float]: ...
    @property
    def not_finite(self) -> tuple[str, ...]: ...
    @property
    def not_finite_values(self) -> tuple[str, ...]: ...


def leave_out_not_finite(event: _Measured) -> None:
    """Move NaN and infinite metrics to `not_finite`, because JSON cannot represent them."""
    wrong = {name: str(float(value)) for name, value in event.metrics.items() if not math.isfinite(value)}
    if wrong:
        finite = {name: value for name, value in event.metrics.items() if name not in wrong}
        msgspec.structs.force_setattr(event, "metrics", finite)  # pyright: ignore[reportArgumentType] - a struct
        msgspec.structs.force_setattr(event, "not_finite", (*event.not_finite, *wrong))  # pyright: ignore[reportArgumentType]
        values = (*event.not_finite_values, *wrong.values())
        msgspec.structs.force_setattr(event, "not_finite_values", values)  # pyright: ignore[reportArgumentType]


def not_finite_in(event: _Measured) -> dict[str, float]:
    """The metrics of an event that are NaN or infinite."""
    values = {"inf": math.inf, "-inf": -math.inf}
    spelled = (*event.not_finite_values, *[""] * len(event.not_finite))  # older events have names without values
    return {name: values.get(value, math.nan) for name, value in zip(event.not_finite, spelled, strict=False)}


@register
class EvalEnded(Message, kw_only=True, tag="eval_ended"):
    """An evaluation is complete."""

    plane = Plane.EVENT
    topic = "ledger.eval_ended"
    incarnation: int
    step: int
    version: int
    metrics: dict[str, float]  # eval/<set>, eval/<set>-truncated_ratio, -pass@k, and others of metrics.md
    not_finite: tuple[str, ...] = ()  # names of metrics that are NaN or infinite, which JSON cannot represent
    newest_version: int = 0  # newest weight version that answered, if newer than `version`; else 0
    not_finite_values: tuple[str, ...] = ()  # values of the metrics in not_finite, in their order: nan, inf, -inf
    failed: dict[str, str] = {}  # by set, why its evaluation function or its function of metrics failed
    not_asked: dict[str, int] = {}  # by set, number of prompts of which its evaluation function asked for no sample

    def __post_init__(self) -> None:
        leave_out_not_finite(self)


@register
class SnapshotTaken(Message, kw_only=True, tag="snapshot_taken"):
    """The ledger's state after folding the log up to and including `covers`.

    A small state is in the event, a larger one in chunks on the data plane. A snapshot whose chunks cannot be read is
    ignored, and the one before it is used.
    """

    plane = Plane.EVENT
    topic = "ledger.snapshot_taken"
    incarnation: int
    covers: int  # log sequence
    fold_version: int
    content: bytes = b""  # the state, if it has no chunks: compressed JSON lines
    chunks: tuple[int, ...] = ()  # data messages SnapshotChunk that hold the state, in order
    digest: str = ""  # hex SHA-256 of the content, or of all chunks together


@register
class RunFinished(Message, kw_only=True, tag="run_finished"):
    """The run trained its last step and evaluated it: every step below `steps` has a trained batch."""

    plane = Plane.EVENT
    topic = "ledger.run_finished"
    incarnation: int
    steps: int
    reason: str


@register
class RunFailed(Message, kw_only=True, tag="run_failed"):
    """The buffer gives the run up, for example because a filter rejects everything. A restarted buffer tries again."""

    plane = Plane.EVENT
    topic = "ledger.run_failed"
    incarnation: int
    steps: int
    reason: str
