"""Events that the buffer alone writes: its decisions. Together with messages.events they are the ledger's log."""

import math
from typing import Protocol

import msgspec

from messages.base import Message, Plane, register


@register
class BufferStarted(Message, kw_only=True, tag="buffer_started"):
    """A buffer took over the ledger. A buffer that meets a higher incarnation than its own is fenced."""

    plane = Plane.EVENT
    topic = "ledger.buffer_started"
    incarnation: int


class IssuedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One issue of a prompt group."""

    group_id: int
    attempt: int
    prompt: int  # number of the prompt in the order of the data source, counted over epochs
    prompt_parts: tuple[int, ...] = ()  # data messages that hold it, if it is too large for its task


@register
class GroupsIssued(Message, kw_only=True, tag="groups_issued"):
    """Groups are to be generated; their tasks follow."""

    plane = Plane.EVENT
    topic = "ledger.groups_issued"
    incarnation: int
    round: int
    min_version: int
    groups: tuple[IssuedGroup, ...]
    num_samples: int = 0  # of each group; 0: unknown


@register
class RoundHalted(Message, kw_only=True, tag="round_halted"):
    """The target of a round is reached: what still runs for it is to be aborted."""

    plane = Plane.EVENT
    topic = "ledger.round_halted"
    incarnation: int
    round: int


class GroupRef(msgspec.Struct, frozen=True, kw_only=True):
    """A group in a batch, and the log sequence of the GroupCompleted that brought it there."""

    group_id: int
    attempt: int
    event_seq: int


@register
class BatchReady(Message, kw_only=True, tag="batch_ready"):
    """The groups of one train step, in order of issue."""

    plane = Plane.EVENT
    topic = "ledger.batch_ready"
    incarnation: int
    step: int  # number of the batch, from 0
    groups: tuple[GroupRef, ...]
    passed_over: tuple[int, ...] = ()  # groups that were kept too and lost the selection; they are closed next


@register
class GroupsClosed(Message, kw_only=True, tag="groups_closed"):
    """The buffer gives groups up: no further attempt."""

    plane = Plane.EVENT
    topic = "ledger.groups_closed"
    incarnation: int
    group_ids: tuple[int, ...]
    outcome: str  # dropped | failed
    reason: str


class EvalSetSize(msgspec.Struct, frozen=True, kw_only=True):
    """How many items an evaluation covers."""

    set: str
    num_items: int


@register
class EvalIssued(Message, kw_only=True, tag="eval_issued"):
    """An evaluation is to be run on one weight version; its tasks follow."""

    plane = Plane.EVENT
    topic = "ledger.eval_issued"
    incarnation: int
    step: int
    version: int
    sets: tuple[EvalSetSize, ...]
    payload_seq: int = 0  # no data message below this one is needed by it; 0: none at all


class _Measured(Protocol):
    @property
    def metrics(self) -> dict[str, float]: ...
    @property
    def not_finite(self) -> tuple[str, ...]: ...
    @property
    def not_finite_values(self) -> tuple[str, ...]: ...


def leave_out_not_finite(event: _Measured) -> None:
    """Spell the metrics that JSON cannot say instead of sending them: what was sent must be read again."""
    wrong = {name: str(float(value)) for name, value in event.metrics.items() if not math.isfinite(value)}
    if wrong:
        finite = {name: value for name, value in event.metrics.items() if name not in wrong}
        msgspec.structs.force_setattr(event, "metrics", finite)  # pyright: ignore[reportArgumentType] - a struct
        msgspec.structs.force_setattr(event, "not_finite", (*event.not_finite, *wrong))  # pyright: ignore[reportArgumentType]
        values = (*event.not_finite_values, *wrong.values())
        msgspec.structs.force_setattr(event, "not_finite_values", values)  # pyright: ignore[reportArgumentType]


def not_finite_in(event: _Measured) -> dict[str, float]:
    """The metrics of an event that are infinite or no number."""
    values = {"inf": math.inf, "-inf": -math.inf}
    spelled = (*event.not_finite_values, *[""] * len(event.not_finite))  # older events name them alone
    return {name: values.get(value, math.nan) for name, value in zip(event.not_finite, spelled, strict=False)}


@register
class EvalEnded(Message, kw_only=True, tag="eval_ended"):
    """An evaluation is complete."""

    plane = Plane.EVENT
    topic = "ledger.eval_ended"
    incarnation: int
    step: int
    version: int
    metrics: dict[str, float]  # eval/<set>, and eval/<set>-truncated_ratio, -pass@k, -newer_weights_ratio
    not_finite: tuple[str, ...] = ()  # names of metrics that were infinite or no number, for which JSON has no word
    newest_version: int = 0  # of the weights that answered, where newer ones than `version` did; else 0
    not_finite_values: tuple[str, ...] = ()  # of those metrics, in their order: nan, inf, -inf

    def __post_init__(self) -> None:
        leave_out_not_finite(self)


@register
class SnapshotTaken(Message, kw_only=True, tag="snapshot_taken"):
    """The ledger's state after folding the log up to and including `covers`."""

    plane = Plane.EVENT
    topic = "ledger.snapshot_taken"
    incarnation: int
    covers: int  # log sequence
    fold_version: int
    state: msgspec.Raw


@register
class RunFinished(Message, kw_only=True, tag="run_finished"):
    """The run has trained its last step and evaluated it."""

    plane = Plane.EVENT
    topic = "ledger.run_finished"
    incarnation: int
    steps: int
    reason: str


@register
class RunFailed(Message, kw_only=True, tag="run_failed"):
    """The buffer gives the run up, for instance since a filter rejects everything. A restarted buffer tries again."""

    plane = Plane.EVENT
    topic = "ledger.run_failed"
    incarnation: int
    steps: int
    reason: str
