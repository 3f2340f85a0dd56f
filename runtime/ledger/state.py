"""What the ledger's log folds to: live prompt groups, batches, counts. Plain data, kept whole in snapshots."""

from collections import Counter
from enum import StrEnum
from functools import cached_property
from typing import Final

import msgspec

from messages import SampleSummary
from runtime.ledger.steps import Steps

MAX_ENDINGS_LOST: Final = 3  # of a group or an evaluation's item, before it counts as failed


class Stage(StrEnum):
    """Where a live group stands. Groups that ended are only counted."""

    IN_FLIGHT = "in_flight"  # issued, not ended
    COMPLETED = "completed"  # ended, waiting for its verdict
    READY = "ready"  # kept, waiting for a batch
    BATCHED = "batched"  # in a batch that is not trained yet
    PASSED_OVER = "passed_over"  # a batch was made without it and it is to be closed
    SPARE = "spare"  # to be dropped, unless a batch cannot be filled without it
    POOLED = "pooled"  # to be issued again with what it has


class Group(msgspec.Struct, kw_only=True):
    """A live prompt group. What its samples are like is of the attempt that ended last; empty while there is none."""

    group_id: int
    attempt: int
    prompt: int  # number in the order of the data source
    round: int
    min_version: int
    stage: Stage
    num_samples: int = 0  # that were asked for; 0: unknown
    event_seq: int = 0  # log sequence of the event that ended this attempt
    carried: tuple[SampleSummary, ...] = ()  # what earlier attempts left
    spilled: tuple[SampleSummary, ...] = ()  # what this attempt stored while in flight
    prompt_parts: tuple[int, ...] = ()  # data messages that hold its prompt, if it is too large for a task
    payload_seq: int  # no data message below this one is needed by it; while in flight, a bound on what it will store
    data: str = ""  # name of the data source
    indices: tuple[int, ...] = ()  # by sample; parts of one index are fan-out siblings
    rewards: tuple[float | None, ...] = ()  # by sample
    response_lens: tuple[int, ...] = ()  # by sample, tokens
    oldest_version: int | None = None  # among all tokens
    newest_version: int | None = None
    reason: str | None = None  # why it is a spare, or passed over
    endings_lost: int = 0  # how often nobody could read how an attempt ended
    fruitless: int = 0  # attempts that ended without bringing a token or a score


class EvalItem(msgspec.Struct, kw_only=True, frozen=True):
    """Outcome of one evaluation item."""

    rewards: tuple[float, ...]
    num_truncated: int
    num_newer: int = 0  # samples with tokens of newer weights than the evaluation's
    newest_version: int = 0  # of those weights


class Evaluation(msgspec.Struct, kw_only=True):
    """An evaluation that runs."""

    step: int
    version: int
    sizes: dict[str, int]
    items: dict[str, dict[int, EvalItem]]
    payload_seq: int = 0  # no data message below this one is needed by it; 0: none at all
    endings_lost: dict[str, int] = {}  # by key of an item: how often nobody could read how it ended
    same_until: int = 0  # the newest version that was announced with the same weights again; 0: none was

    @property
    def complete(self) -> bool:
        return all(len(self.items[name]) == size for name, size in self.sizes.items())


class Books(msgspec.Struct, frozen=True, kw_only=True):
    """Every issued group, by where it is. They close: issued is the sum of the others."""

    issued: int
    trained: int
    skipped: int  # in a batch that was trained, without leaving a gradient
    dropped: int
    failed: int
    pooled: int  # to be issued again, or spare
    ready: int  # kept; in a batch or waiting for one
    in_flight: int

    @property
    def closed(self) -> bool:
        ended = self.trained + self.skipped + self.dropped + self.failed
        return self.issued == ended + self.pooled + self.ready + self.in_flight


class Index:
    """Live groups by what decisions ask for, so that none has to look at all of them. Derived, never stored."""

    def __init__(self, groups: dict[int, Group]) -> None:
        self._by_stage: dict[Stage, dict[int, Group]] = {stage: {} for stage in Stage}
        self.rounds: Counter[int] = Counter()  # groups in flight by round
        self.fruitless: Counter[int] = Counter()  # pooled groups by attempts that brought nothing
        for group in groups.values():
            self.enter(group)

    def enter(self, group: Group) -> None:
        """Note a group as it is now."""
        self._by_stage[group.stage][group.group_id] = group
        self._count(group, 1)

    def leave(self, group: Group) -> None:
        """Forget a group, which is still as it was entered."""
        del self._by_stage[group.stage][group.group_id]
        self._count(group, -1)

    def of(self, stage: Stage) -> dict[int, Group]:
        """The groups of a stage by their id, in the order in which they came to it."""
        return self._by_stage[stage]

    def _count(self, group: Group, change: int) -> None:
        if group.stage is Stage.IN_FLIGHT:
            _add(self.rounds, group.round, change)
        elif group.stage is Stage.POOLED:
            _add(self.fruitless, group.fruitless, change)


def _add(counts: Counter[int], key: int, change: int) -> None:
    counts[key] += change
    if not counts[key]:
        del counts[key]


class LedgerState(Steps, kw_only=True, dict=True):
    """What the log folds to."""

    last_seq: int = 0  # log sequence folded last
    incarnation: int = 0  # of the buffer that owns the ledger
    first_group: int = 0  # groups below it are of before the log's beginning, where what is left of it was folded
    next_group: int = 0
    next_prompt: int = 0
    groups: dict[int, Group] = {}  # live ones, in order of issue
    trained: int = 0
    skipped: int = 0  # groups that were in a trained batch and left no gradient
    untrained: dict[str, int] = {}  # samples that were in a trained batch and left no gradient, by reason
    dropped: dict[str, int] = {}  # by reason
    failed: dict[str, int] = {}
    newest_payload: int = 0  # highest data message that any folded event cites
    halted_round: int = -1  # newest round that was halted
    version: int = 0  # newest announced weights, 0 before the first
    version_step: int = 0  # train steps that they contain
    version_steps: dict[int, int] = {}  # the same of every version that a live group or a batch may have tokens of
    snapshot_step: int = -1  # checkpoint step at the newest snapshot
    evaluation: Evaluation | None = None
    eval_step: int = -1  # newest step that was evaluated
    barren: int = 0  # groups of the open round that were dropped or failed
    finished: str | None = None  # reason; like the next one, until a buffer starts again: it may have more to do
    gave_up: str | None = None  # reason

    @cached_property
    def index(self) -> Index:
        """Live groups by stage."""
        return Index(self.groups)

    def in_stage(self, stage: Stage) -> dict[int, Group]:
        """The groups of a stage by their id, in the order in which they came to it."""
        return self.index.of(stage)

    def enter(self, group: Group) -> None:
        """Take up a new group."""
        self.index.enter(group)  # before it is among the groups, of which the index is made when first asked for
        self.groups[group.group_id] = group

    def move(self, group: Group, stage: Stage) -> None:
        """Put a live group into another stage."""
        self.index.leave(group)
        group.stage = stage
        self.index.enter(group)

    def remove(self, group_id: int) -> Group | None:
        """Take out a live group; None when there is none."""
        group = self.groups.get(group_id)
        if group is not None:
            self.index.leave(group)
            del self.groups[group_id]
        return group

    def books(self) -> Books:
        """Count every issued group once."""
        size = {stage: len(self.in_stage(stage)) for stage in Stage}
        return Books(
            issued=self.next_group,
            trained=self.trained,
            skipped=self.skipped,
            dropped=sum(self.dropped.values()),
            failed=sum(self.failed.values()),
            pooled=size[Stage.POOLED] + size[Stage.SPARE],
            ready=size[Stage.READY] + size[Stage.BATCHED] + size[Stage.PASSED_OVER],
            in_flight=size[Stage.IN_FLIGHT] + size[Stage.COMPLETED],
        )

    def low_water(self) -> int:
        """No data message below this one is needed by a live group or a batch that no loadable checkpoint contains."""
        needed = [group.payload_seq for group in self.groups.values()]
        needed += [batch.payload_seq for batch in self.batches.values()]
        if self.evaluation is not None and self.evaluation.payload_seq:
            needed.append(self.evaluation.payload_seq)
        return min(needed, default=self.newest_payload + 1)
