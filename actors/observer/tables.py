"""Tables of a run: steps, groups, samples, requests, scores, processes. A pure fold.

A row comes out when it is complete, so that memory holds live groups alone. `finish` returns the others.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from actors.observer.observed import Observed
from messages import (
    ActorExited,
    ActorStarted,
    BatchTrained,
    EvalCompleted,
    GroupCompleted,
    Message,
    SampleSummary,
)
from runtime.ledger.changes import AttemptEnded, Change, Closed, Issued, Judged
from runtime.ledger.state import Group, Stage
from runtime.ledger.steps import Settled
from runtime.report.fold.spans import StepTime
from runtime.report.group_numbers import mean_of, rollout_s
from runtime.report.report import ledger_in
from runtime.report.rows import MetricRow

HELD_STEPS: Final = 64  # rows of steps that wait for a late evaluation
STATES: Final = {  # words of the ledger's sum for the groups that are live at the end
    Stage.IN_FLIGHT: "in_flight",
    Stage.COMPLETED: "in_flight",
    Stage.READY: "ready",
    Stage.BATCHED: "ready",
    Stage.PASSED_OVER: "ready",
    Stage.SPARE: "pooled",
    Stage.POOLED: "pooled",
}

Row = tuple[Any, ...]  # values in the order of the columns


class Column(NamedTuple):
    """A column of a table."""

    name: str
    kind: str  # int | float | text | time | bool | numbers
    text: str


GROUP: Final = Column("group_id", "int", "Number of the prompt group.")
ATTEMPT: Final = Column("attempt", "int", "Attempt of the group, from 0.")
INDEX: Final = Column("index", "int", "Number of the sample in its group, from 0.")
PART: Final = Column("part", "int", "Number among fan-out siblings of one index, from 0.")
ENDED: Final = Column("time", "time", "When the attempt's end was logged.")
GRADER: Final = Column("grader", "text", "Grader of the attempt's samples; empty: unknown.")

TABLES: Final[dict[str, tuple[Column, ...]]] = {
    "steps": (
        Column("step", "int", "Train steps done with it, from 1; 0: an evaluation before the first."),
        Column("time", "time", "When it was trained, or the evaluation ended."),
        Column("began", "time", "End of the step before it; null: unknown."),
        Column("num_tokens", "int", "Prompt and response tokens that contributed a gradient; null: no step."),
        Column("weights_version", "int", "Newest weight version that engines held; null: no step."),
        Column("parts", "numbers", "Seconds by part of the time breakdown; they add up to the step."),
        Column("metrics", "numbers", "All metrics of the step by name, as in metrics.jsonl."),
    ),
    "groups": (
        GROUP,
        Column("prompt", "int", "Number of the prompt in the order of its data source."),
        Column("data", "text", "Name of the data source; empty: no attempt has ended."),
        Column("attempts", "int", "Issues of the group."),
        Column("round", "int", "Round of the newest issue."),
        Column(
            "state", "text", "trained, skipped, dropped, failed; at the end of the log also pooled, ready, in_flight."
        ),
        Column("reason", "text", "Why it was dropped, failed or is spare; null otherwise."),
        Column("step", "int", "Train step that trained or skipped it, from 1; null: none."),
        Column("issued", "time", "First issue."),
        Column("completed", "time", "Newest end of an attempt with all samples; null: none."),
        Column("judged", "time", "First verdict on it; null: none, as without a filter."),
        Column("ended", "time", "When it was trained, skipped, dropped or failed; null: it is live."),
        Column("num_samples", "int", "Samples of the attempt that ended last."),
        Column("reward_mean", "float", "Mean reward of these samples; null: none has one."),
        Column("response_tokens", "int", "Response tokens of these samples."),
        Column("min_version", "int", "Weight version that it was issued for."),
        Column("oldest_version", "int", "Oldest weight version among its tokens; null: unknown."),
        Column("newest_version", "int", "Newest weight version among its tokens; null: unknown."),
    ),
    "samples": (
        GROUP,
        ATTEMPT,
        INDEX,
        PART,
        ENDED,
        Column("status", "text", "completed, truncated or failed."),
        Column("prompt_tokens", "int", "Tokens of the prompt."),
        Column("response_tokens", "int", "Tokens of the response, all turns."),
        Column("reward", "float", "Reward; null: none."),
        Column("own_reward", "bool", "Whether a generate function set the reward, and no grader."),
        Column("is_baseline", "bool", "Whether it is the greedy sample of its group, which is not trained."),
        Column("first_version", "int", "Oldest weight version among its tokens; null: unknown."),
        Column("last_version", "int", "Newest weight version among its tokens; null: unknown."),
        Column("reason", "text", "Why it failed or has no score; null otherwise."),
    ),
    "requests": (
        GROUP,
        ATTEMPT,
        ENDED,
        Column("instance", "text", "Rollout actor."),
        Column("engine", "text", "Engine of the last sample; empty: unknown, as behind a router."),
        Column("num_requests", "int", "Requests to engines."),
        Column("prompt_tokens", "int", "Tokens to be computed before the first new one."),
        Column("cached_tokens", "int", "Tokens among them that the prefix cache had."),
        Column("num_retractions", "int", "Times that a request lost its KV cache."),
        Column("queue_s", "float", "Seconds in the engine's queue, over the requests that report it."),
        Column("slot_wait_s", "float", "Seconds from the pull of the task until the last sample had a slot."),
        Column("rollout_s", "float", "Seconds of rollout: from the slot of the last sample to the last token."),
        Column("draft_tokens", "int", "Tokens proposed by speculative decoding."),
        Column("accepted_draft_tokens", "int", "Tokens among them that were accepted."),
    ),
    "scores": (
        Column("group_id", "int", "Number of the prompt group; null: of an evaluation."),
        Column("attempt", "int", "Attempt of the group; null: of an evaluation."),
        Column("eval_set", "text", "Evaluation set; null: of training."),
        Column("eval_step", "int", "Train steps in the evaluated weights; null: of training."),
        Column("item", "int", "Number of the evaluation item; null: of training."),
        INDEX,
        PART,
        Column("time", "time", "When the end of the attempt or item was logged."),
        GRADER,
        Column("reward", "float", "The score."),
        Column("score", "text", "The grader's whole answer as JSON, if it was more than a number; null otherwise."),
        Column("rewards", "numbers", "The grader's rewards by name, if the recipe trains several."),
        Column("group_reward_s", "float", "Seconds from the attempt's last token to its last score; null: unknown."),
    ),
    "processes": (
        Column("actor", "text", "Name of the process."),
        Column("node", "text", "Node that ran it."),
        Column("pid", "int", "Process id."),
        Column("restarts", "int", "Restarts before it, since the node daemon started."),
        Column("started", "time", "When its start was logged; null: unknown."),
        Column("ended", "time", "When its end was logged; null: it was not."),
        Column("exit_code", "int", "Exit code; negative: killed by that signal; null: unknown."),
        Column("reason", "text", "Why it ended; null: unknown."),
    ),
}


class _LiveGroup(msgspec.Struct):
    """A live group, and times that the ledger does not keep."""

    group: Group
    issued: float | None  # None: before the first known event
    attempts: int = 1
    completed: float | None = None
    judged: float | None = None


class Tables:
    """Folds the events of a run, from the first on, into rows of the tables."""

    def __init__(self, observed: Observed) -> None:
        self.num_late = 0  # evaluations that ended too late for the row of their step
        self._observed = observed  # folds the same events, each before this
        self._begun = False
        self._num_items: dict[tuple[int, str], int] = {}  # ended, of an evaluation set after a step
        self._lives: dict[int, _LiveGroup] = {}
        self._rows: dict[int, MetricRow] = {}  # newest rows of metrics, by step
        self._times: dict[int, StepTime] = {}
        self._last_step = -1  # newest step whose row came out
        self._processes: dict[str, tuple[ActorStarted, float]] = {}

    def apply(
        self, event: Message, seq: int, time: float, rows: Sequence[MetricRow], changes: Sequence[Change]
    ) -> Iterator[tuple[str, Row]]:
        """Take the next event; yield the rows that it completes, each with the name of its table.

        Args:
            event: the event.
            seq: its log sequence.
            time: Unix time at which it was logged.
            rows: rows of metrics that `observed` completed with it.
            changes: what it changed in the ledger of `observed`.
        """
        if not self._begun:
            self._begun = seq == 1 or self._begin_late(event)
        for change in changes:
            yield from self._changed(change, time)
        if isinstance(event, EvalCompleted) and self._is_first(event):
            for sample in event.samples:
                yield from _scores(sample, (None, None, event.set, event.step, event.item), time, "", None)
        elif isinstance(event, ActorStarted):
            yield from self._process(event.actor)
            self._processes[event.actor] = event, time
        elif isinstance(event, ActorExited):
            yield from self._process(event.actor, event, time)
        if isinstance(event, BatchTrained) and event.step >= self._last_step:
            self._times.setdefault(event.step + 1, self._observed.account.steps[-1])  # a replay changes no row
        for row in rows:
            yield from self._hold(row)

    def finish(self, open_row: MetricRow | None) -> Iterator[tuple[str, Row]]:
        """Yield the rows that no event has completed.

        Args:
            open_row: metrics of the newest step.
        """
        if open_row is not None:
            self._rows[open_row["step"]] = open_row
        for step in sorted(self._rows):
            yield "steps", self._step(self._rows[step])
        for life in self._lives.values():
            yield "groups", _group(life, STATES[life.group.stage], life.group.reason)
        for actor in sorted(self._processes):
            yield from self._process(actor)

    def _begin_late(self, event: Message) -> bool:
        """Take the ledger from the first snapshot, if the log does not begin with the run."""
        if ledger_in(event) is None:
            return False
        groups = self._observed.ledger_state.groups
        self._lives = {number: _LiveGroup(group, None) for number, group in groups.items()}
        return True

    def _is_first(self, event: EvalCompleted) -> bool:
        """Whether it is the first end of an item of the running evaluation."""
        running, of = self._observed.ledger_state.evaluation, (event.step, event.set)
        before, now = self._num_items.get(of, 0), 0 if running is None else len(running.items.get(event.set, ()))
        self._num_items[of] = max(before, now)
        return now > before

    # groups

    def _changed(self, change: Change, time: float) -> Iterator[tuple[str, Row]]:
        match change:
            case Issued():
                for group in change.groups:
                    life = self._lives.setdefault(group.group_id, _LiveGroup(group, time, attempts=0))
                    life.attempts += 1
            case AttemptEnded(event=GroupCompleted() as event):
                life = self._lives.get(event.group_id)
                if life is not None:
                    life.completed = time
                yield from _attempt(event, time)
            case Judged():
                life = self._lives.get(change.group.group_id)
                if life is not None:
                    life.judged = life.judged or time
            case Closed():
                yield from self._close(change.group.group_id, "failed" if change.is_failed else "dropped", time, change)
            case Settled():
                for ref in change.groups:
                    state = "skipped" if ref.group_id in change.skipped else "trained"
                    yield from self._close(ref.group_id, state, time, change)
            case _:
                pass

    def _close(self, group_id: int, state: str, time: float, change: Closed | Settled) -> Iterator[tuple[str, Row]]:
        life = self._lives.pop(group_id, None)
        if life is not None:
            step = change.step + 1 if isinstance(change, Settled) else None
            yield "groups", _group(life, state, change.reason if isinstance(change, Closed) else None, step, time)

    # steps and processes

    def _hold(self, row: MetricRow) -> Iterator[tuple[str, Row]]:
        """Keep a row for a late evaluation; yield the oldest one that is kept too long."""
        if row["step"] <= self._last_step:
            self.num_late += 1
            return
        self._rows[row["step"]] = row
        if len(self._rows) > HELD_STEPS:
            self._last_step = min(self._rows)
            yield "steps", self._step(self._rows.pop(self._last_step))

    def _step(self, row: MetricRow) -> Row:
        time = self._times.pop(row["step"], None)
        began, parts = (None, {}) if time is None else (time.begin, time.parts)
        metrics = {name: value for name, value in row.items() if isinstance(value, float | int) and name != "time"}
        return (
            row["step"],
            row["time"],
            began,
            row.get("train/num_tokens"),
            row.get("weights/version"),
            parts,
            metrics,
        )

    def _process(
        self, actor: str, exited: ActorExited | None = None, time: float | None = None
    ) -> Iterator[tuple[str, Row]]:
        """Yield the row of a process, if it is known; its end may be unknown."""
        begun = self._processes.pop(actor, None)
        end = (None, None, None) if exited is None else (time, exited.exit_code, exited.reason)
        if begun is not None:
            event, started = begun
            yield "processes", (actor, event.node, event.pid, event.restarts, started, *end)
        elif exited is not None:
            yield "processes", (actor, exited.node, exited.pid, None, None, *end)


def _group(
    life: _LiveGroup, state: str, reason: str | None, step: int | None = None, ended: float | None = None
) -> Row:
    group = life.group
    rewards = [reward for reward in group.rewards if reward is not None]
    return (
        group.group_id,
        group.prompt,
        group.data,
        life.attempts,
        group.round,
        state,
        reason,
        step,
        life.issued,
        life.completed,
        life.judged,
        ended,
        len(group.rewards),
        mean_of(rewards),
        sum(group.response_lens),
        group.min_version,
        group.oldest_version,
        group.newest_version,
    )


def _attempt(event: GroupCompleted, time: float) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a completed attempt: of its samples, its scores and its requests."""
    group_id, attempt, last, numbers = event.group_id, event.attempt, event.last_sample, event.engine
    for sample in event.samples if event.baseline is None else (*event.samples, event.baseline):
        yield (
            "samples",
            (
                group_id,
                attempt,
                sample.index,
                sample.part,
                time,
                sample.status.value,
                sample.prompt_len,
                sample.response_len,
                sample.reward,
                sample.own_reward,
                sample.is_baseline,
                sample.first_version,
                sample.last_version,
                sample.reason,
            ),
        )
        yield from _scores(sample, (group_id, attempt, None, None, None), time, last.grader, event.reward_time_s)
    yield (
        "requests",
        (
            group_id,
            attempt,
            time,
            event.instance,
            last.engine,
            numbers.num_requests,
            numbers.prompt_tokens,
            numbers.cached_tokens,
            numbers.num_retractions,
            numbers.queue_time_s,
            last.queue_time_s,
            rollout_s(event),
            numbers.draft_tokens,
            numbers.accepted_draft_tokens,
        ),
    )


def _scores(
    sample: SampleSummary, of: Row, time: float, grader: str, reward_s: float | None
) -> Iterator[tuple[str, Row]]:
    """Yield the row of a sample's score, if a grader gave one."""
    if sample.reward is None or sample.own_reward or sample.reason is not None:
        return
    score = None if sample.score is None else msgspec.json.encode(sample.score).decode()
    rewards = sample.rewards or None
    yield "scores", (*of, sample.index, sample.part, time, grader, sample.reward, score, rewards, reward_s)
