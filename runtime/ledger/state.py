"""The state that the log folds to: live prompt groups, batches, counts. Plain data, stored in snapshots."""

import math
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from functools import cached_property
from typing import Final, Literal

import msgspec

from messages import SampleSummary, SegmentRef
from runtime.ledger.steps import Steps

MAX_ENDINGS_LOST: Final = 3  # per group or evaluation item; at this number it counts as failed


class Stage(StrEnum):
    """State of a live group. Ended groups are only counted."""

    IN_FLIGHT = "in_flight"  # issued, not ended
    COMPLETED = "completed"  # ended, waiting for a verdict
    READY = "ready"  # kept by a verdict or without a filter, waiting for a batch
    BATCHED = "batched"  # in a batch that is not trained
    PASSED_OVER = "passed_over"  # not chosen for a batch; to be closed
    SPARE = "spare"  # dropped, unless a batch cannot be filled without it
    POOLED = "pooled"  # to be issued again, with its samples so far


IN_FLIGHT: Final = Stage.IN_FLIGHT  # before Python 3.12, reading a member of an enum runs a function of the enum
COMPLETED: Final = Stage.COMPLETED
READY: Final = Stage.READY
POOLED: Final = Stage.POOLED


class Spilled(msgspec.Struct, kw_only=True):
    """A sample of an attempt in flight, joined from the increments of one lease."""

    lease: str
    sample: SampleSummary  # as in its newest increment, without segments
    segments: list[SegmentRef] = []  # all of them, in order
    replaced: tuple[str, ...] = ()  # leases whose increments of this sample count no more


class Group(msgspec.Struct, kw_only=True):
    """A live prompt group. Its sample data is of the attempt that ended last, and empty before the first end."""

    group_id: int
    attempt: int
    prompt: int  # index in the order of the data source
    round: int
    min_version: int
    stage: Stage
    num_samples: int = 0  # requested samples; 0: unknown
    event_seq: int = 0  # log sequence of the event that ended this attempt
    carried: tuple[SampleSummary, ...] = ()  # results of earlier attempts
    spilled: list[Spilled] = []  # samples that this attempt stored while in flight: of each, the longest
    anew: list[Spilled] = []  # the same of a later lease that is not as long yet
    prompt_parts: tuple[int, ...] = ()  # data messages that hold its prompt, if it is too large for a task
    draws: tuple[int, ...] = ()  # data messages that hold its row, if a data source with a state drew it
    payload_seq: int  # lowest data sequence that it needs; while in flight, also a bound for what it will store
    data: str = ""  # name of the data source
    indices: tuple[int, ...] = ()  # by sample; parts of one index are fan-out siblings
    rewards: tuple[float | None, ...] = ()  # by sample
    response_lens: tuple[int, ...] = ()  # by sample, tokens
    oldest_version: int | None = None  # among all tokens
    newest_version: int | None = None
    reason: str | None = None  # why it is spare or passed over
    endings_lost: int = 0  # number of undecodable endings
    fruitless: int = 0  # attempts that ended without a new token or score
    is_told: bool = False  # whether its outcome is known to the data source, or waits to be


class GroupOutcome(msgspec.Struct, kw_only=True, frozen=True):
    """What became of a prompt group, for a data source with a state."""

    number: int  # of the prompt
    kind: Literal["kept", "dropped", "failed"]
    rewards: tuple[float, ...] = ()  # of its scored samples
    reason: str = ""  # why it was dropped or failed

    @property
    def reward(self) -> float | None:
        """The mean reward; None: no sample has one."""
        return math.fsum(self.rewards) / len(self.rewards) if self.rewards else None


class EvalItem(msgspec.Struct, kw_only=True, frozen=True):
    """Result of one evaluation item."""

    rewards: tuple[float, ...]  # of its graded samples
    num_ungraded: int = 0  # samples without a reward; an item whose samples are lost counts as one
    num_truncated: int
    num_newer: int = 0  # samples with tokens of weights newer than the evaluation's
    newest_version: int = 0  # newest of those versions
    samples: tuple[SampleSummary, ...] = ()  # if the evaluation keeps those of this set
    is_cut: bool = False  # whether the scores and metadata of these samples were too large to be kept
    not_asked: bool = False  # whether the evaluation function of its set asked for no sample of it


class Evaluation(msgspec.Struct, kw_only=True):
    """A running evaluation."""

    step: int
    version: int
    sizes: dict[str, int]
    items: dict[str, dict[int, EvalItem]]
    payload_seq: int = 0  # lowest data sequence that it needs; 0: it needs none
    endings_lost: dict[str, int] = {}  # number of undecodable results, by item key
    same_until: int = 0  # newest version that republished the same weights; 0: none
    kept: tuple[str, ...] = ()  # sets whose samples are kept
    failed: dict[str, str] = {}  # by set, why its evaluation function failed
    has_function: dict[str, bool] = {}  # by set, whether an evaluation function asks for its samples

    @property
    def complete(self) -> bool:
        return all(len(self.items[name]) == size for name, size in self.sizes.items())


class Books(msgspec.Struct, frozen=True, kw_only=True):
    """Number of issued groups by state. `issued` must equal the sum of all other fields."""

    issued: int
    trained: int
    skipped: int  # in a trained batch without contributing a gradient
    dropped: int
    failed: int
    pooled: int  # waiting to be issued again, or spare
    ready: int  # kept: in a batch or waiting for one
    in_flight: int

    @property
    def closed(self) -> bool:
        ended = self.trained + self.skipped + self.dropped + self.failed
        return self.issued == ended + self.pooled + self.ready + self.in_flight


def oldest_version(group: Group) -> int:
    """The oldest weight version of a group's tokens, but at most the version that it was issued for."""
    return min(group.min_version, group.oldest_version or group.min_version)


def in_log_order(groups: Iterable[Group]) -> list[Group]:
    """Sort groups by the events that ended their attempts. The order of an index is lost in a restart."""
    return sorted(groups, key=lambda group: (group.event_seq, group.group_id))


class Index:
    """Live groups by stage and counts, so that nothing needs to scan all groups. Derived, never stored."""

    def __init__(self, groups: dict[int, Group]) -> None:
        self._by_stage: dict[Stage, dict[int, Group]] = {stage: {} for stage in Stage}
        self._version_of: dict[int, int] = {}  # oldest version of each group when it was added
        self.versions: Counter[int] = Counter()  # groups by that version
        self.rounds: Counter[int] = Counter()  # groups in flight by round
        self.fruitless: Counter[int] = Counter()  # pooled groups by number of fruitless attempts
        for group in groups.values():
            self.enter(group)

    def enter(self, group: Group) -> None:
        """Add a group in its present state."""
        self._by_stage[group.stage][group.group_id] = group
        self._count(group, 1)
        self._version_of[group.group_id] = version = oldest_version(group)
        _add(self.versions, version, 1)

    def leave(self, group: Group) -> None:
        """Remove a group. Its stage and its counts must be unchanged since it was added."""
        del self._by_stage[group.stage][group.group_id]
        self._count(group, -1)
        _add(self.versions, self._version_of.pop(group.group_id), -1)

    def move(self, group: Group, stage: Stage) -> None:
        """Move a group to another stage. Its stage and its counts must be unchanged since it was added."""
        group_id = group.group_id
        del self._by_stage[group.stage][group_id]
        self._count(group, -1)
        group.stage = stage
        self._by_stage[stage][group_id] = group
        self._count(group, 1)
        version, before = oldest_version(group), self._version_of[group_id]
        if version != before:
            self._version_of[group_id] = version
            _add(self.versions, before, -1)
            _add(self.versions, version, 1)

    def of(self, stage: Stage) -> dict[int, Group]:
        """The groups of a stage by id, in any order."""
        return self._by_stage[stage]

    def _count(self, group: Group, change: int) -> None:
        if group.stage is IN_FLIGHT:
            _add(self.rounds, group.round, change)
        elif group.stage is POOLED:
            _add(self.fruitless, group.fruitless, change)


def _add(counts: Counter[int], key: int, change: int) -> None:
    counts[key] += change
    if not counts[key]:
        del counts[key]


class LedgerState(Steps, kw_only=True, dict=True):
    """The state that the log folds to."""

    last_seq: int = 0  # log sequence of the last folded event
    verdicts: bool = True  # whether completed groups wait for a verdict; False: they are kept at once
    tells_source: bool = False  # whether outcomes are kept for a data source with a state
    outcomes: tuple[GroupOutcome, ...] = ()  # that the source does not have yet, in the order of the log
    draws: tuple[int, ...] = ()  # data messages with the source's state; empty: it has drawn nothing
    draws_digest: str = ""  # hex SHA-256 of them together
    first_group: int = 0  # lowest known group id, if the log's beginning is lost; earlier groups are unknown
    next_group: int = 0
    next_prompt: int = 0
    groups: dict[int, Group] = {}  # live groups, in order of issue
    trained: int = 0
    skipped: int = 0  # groups of trained batches that contributed no gradient
    untrained: dict[str, int] = {}  # samples of trained batches that contributed no gradient, by reason
    dropped: dict[str, int] = {}  # by reason
    failed: dict[str, int] = {}
    baselines: int = 0  # greedy samples of completed groups, which are scored and not trained
    to_issue: int = 0  # groups that the newest issue left to further events
    issue_round: int = -1  # round of the newest issue
    newest_payload: int = 0  # highest data sequence in any folded event
    halted_round: int = -1  # newest halted round
    ended_by_hand: int = -1  # newest round that a person halted
    rounds_ahead: int = 0  # how many more rounds than batches began, because a person halted some
    rounds_ahead_before: int = 0  # the same when the newest batch was made
    version: int = 0  # newest announced weight version, 0 before the first
    version_step: int = 0  # train steps in these weights
    version_steps: dict[int, int] = {}  # train steps by version, for each version of a live group's or batch's tokens
    checkpoint_seq: int = 0  # log sequence of the newest checkpoint's event
    snapshot_step: int = -1  # checkpoint step in the newest snapshot
    evaluation: Evaluation | None = None
    eval_step: int = -1  # newest evaluated step
    barren: int = 0  # groups of the open round that were dropped or failed
    finished: str | None = None  # reason; like gave_up, None again once a buffer starts, which may have more to do
    gave_up: str | None = None  # reason

    @property
    def open_round(self) -> int:
        """The round to which groups are issued now."""
        return max(self.round + self.rounds_ahead, self.halted_round + 1)

    @property
    def first_round(self) -> int:
        """The round in which generation for the next batch began. Earlier ones had their batch."""
        return self.round + self.rounds_ahead_before

    @property
    def num_halting(self) -> int:
        """Number of groups in flight that a person halted."""
        return sum(count for round, count in self.index.rounds.items() if round <= self.ended_by_hand)

    @cached_property
    def index(self) -> Index:
        """Live groups by stage and counts."""
        return Index(self.groups)

    def in_stage(self, stage: Stage) -> dict[int, Group]:
        """The groups of a stage by id, in any order: a restart builds the index anew."""
        return self.index.of(stage)

    def enter(self, group: Group) -> None:
        """Add a new group."""
        self.index.enter(group)  # before `groups`, from which the first access builds the index
        self.groups[group.group_id] = group

    def move(self, group: Group, stage: Stage) -> None:
        """Move a live group to another stage."""
        self.index.move(group, stage)

    def remove(self, group_id: int) -> Group | None:
        """Remove and return a live group; None if there is no such group."""
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
        """Lowest data sequence that a live group, a batch not in all loadable checkpoints, or the evaluation needs.

        It looks at all groups: for a thread, where many are live. Groups that enter meanwhile need only newer messages.
        """
        needed = [group.payload_seq for group in list(self.groups.values())]
        needed += [batch.payload_seq for batch in list(self.batches.values())]
        needed += self.draws
        if self.evaluation is not None and self.evaluation.payload_seq:
            needed.append(self.evaluation.payload_seq)
        return min(needed, default=self.newest_payload + 1)
