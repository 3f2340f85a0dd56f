"""Replays the buffer's decisions on completed groups, with a log in memory."""

from collections.abc import Callable, Iterable, Iterator

import msgspec
import structlog

from actors.buffer.deciding.decide import Schedule, decide
from actors.buffer.deciding.selecting import called
from actors.buffer.deciding.selection import FUNCTIONS, Chosen, Kind, Selection, first_come, key_of
from actors.buffer.deciding.tasks import schedule_of
from messages import (
    BatchReady,
    BatchTrained,
    GroupCompleted,
    GroupFailed,
    GroupsIssued,
    Message,
    RunFailed,
    RunFinished,
    VerdictGiven,
    WeightsAnnounced,
)
from runtime.functions.load import find, is_plugin
from runtime.ledger.fold import LedgerState, fold
from runtime.settings.topology import Topology

log = structlog.get_logger()

EXHAUSTED = "the dump is exhausted"

JudgeGroup = Callable[[GroupCompleted], tuple[str, str | None]]  # outcome and reason


class ReplayedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of the replay."""

    step: int
    groups: tuple[GroupCompleted, ...]  # in batch order, as dumped

    @property
    def rewards(self) -> list[float]:
        return [sample.reward for group in self.groups for sample in group.samples if sample.reward is not None]


class ReplayedBuffer:
    """Issues and batches dumped groups, in order, until none remain. Every issued group completes at once."""

    def __init__(self, topology: Topology, groups: Iterable[GroupCompleted], judge: JudgeGroup) -> None:
        self._groups = iter(groups)
        self._judge = judge
        names: dict[Kind, str | None] = {"over_sampling_filter": topology.rollout.over_sampling_filter}
        names["buffer_filter"] = topology.rollout.buffer_filter
        self._functions = {
            kind: find(FUNCTIONS[kind], key_of(kind), name) if name is not None and is_plugin(name) else None
            for kind, name in names.items()
        }
        self._schedule: Schedule = msgspec.structs.replace(schedule_of(_without_evals(topology), {}), num_steps=2**31)
        self._seq = 0
        self._live: dict[int, GroupCompleted] = {}  # by the group id of the replay
        self.state = LedgerState()
        self.exhausted = False

    def batches(self) -> Iterator[ReplayedBatch]:
        """Yield batches until the groups run out."""
        self._announce(0)
        while not self.exhausted:
            decision = self._decide()
            if decision is None or isinstance(decision, RunFailed | RunFinished):
                return
            self._add(decision)
            if isinstance(decision, GroupsIssued):
                for issued in decision.groups:
                    self._complete(issued.group_id, issued.attempt, decision.round)
                yield from self._last_batches()
            elif isinstance(decision, BatchReady):
                yield self._train(decision)

    def _last_batches(self) -> Iterator[ReplayedBatch]:
        """Yield the batches that the last groups still fill, once the dump is exhausted."""
        while self.exhausted:
            decision = self._decide()
            if decision is None or isinstance(decision, GroupsIssued | RunFailed | RunFinished):
                return
            self._add(decision)
            if isinstance(decision, BatchReady):
                yield self._train(decision)

    def _decide(self) -> Message | None:
        decision = decide(self.state, self._schedule)
        while isinstance(decision, Selection):
            decision = decide(self.state, self._schedule, self._choose(decision))
        return decision

    def _choose(self, selection: Selection) -> Chosen:
        """Call a user's selection here, without a time limit."""
        function = self._functions[selection.kind]
        assert callable(function)
        try:
            return called(function, selection)
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything; as in a run
            log.warning("selection_failed", kind=selection.kind, reason=repr(error), instead="first come first")
            return first_come(selection)

    def _complete(self, group_id: int, attempt: int, round: int) -> None:
        group = next(self._groups, None)
        names = {"group_id": group_id, "attempt": attempt, "lease": "", "round": round, "instance": "replay"}
        if group is None:
            self.exhausted = True
            self._add(msgspec.convert({"type": "group_failed", **names, "reason": EXHAUSTED}, GroupFailed))
            return
        self._live[group_id] = group
        seq = self._add(msgspec.structs.replace(group, **names))
        outcome, reason = self._judge(group)
        verdict = {"type": "verdict_given", "group_id": group_id, "attempt": attempt, "event_seq": seq}
        self._add(msgspec.convert({**verdict, "outcome": outcome, "reason": reason}, VerdictGiven))
        if group_id not in self.state.groups:
            del self._live[group_id]

    def _train(self, ready: BatchReady) -> ReplayedBatch:
        groups = tuple(self._live[ref.group_id] for ref in ready.groups)
        trained = BatchTrained(
            step=ready.step, incarnation=1, num_groups=len(groups), num_samples=0, num_tokens=0, metrics={}
        )
        self._add(trained)
        self._announce(ready.step + 1)
        self._live = {group_id: group for group_id, group in self._live.items() if group_id in self.state.groups}
        return ReplayedBatch(step=ready.step, groups=groups)

    def _announce(self, step: int) -> None:
        self._add(WeightsAnnounced(version=step + 1, step=step, incarnation=1, path="", checksum="", size_bytes=0))

    def _add(self, event: Message) -> int:
        self._seq += 1
        fold(self.state, event, self._seq)
        return self._seq


def _without_evals(topology: Topology) -> Topology:
    return msgspec.structs.replace(topology, eval=())
