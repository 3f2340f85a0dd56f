"""State changes of a prompt group up to its batch: issued, ended, judged, closed."""

from collections.abc import Iterable, Sequence
from typing import Final

from messages import (
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupsClosed,
    GroupsIssued,
    Outcome,
    SampleSummary,
    SegmentsSpilled,
    VerdictGiven,
)
from runtime.ledger.changes import AttemptEnded, Change, Closed, Issued, Judged
from runtime.ledger.spills import spilled_samples, take_increments
from runtime.ledger.state import (
    COMPLETED,
    IN_FLIGHT,
    POOLED,
    READY,
    Group,
    GroupOutcome,
    LedgerState,
    Stage,
    in_log_order,
)

MAX_REASONS: Final = 256  # distinct reasons counted per outcome, because a filter may return unique texts
OTHER_REASONS: Final = "other reasons"
HALTED: Final = "halted"  # reason of pooled groups that are closed because a halt ends them (on_halt = "drop")


def spills_of(state: LedgerState, group_id: int, attempt: int) -> tuple[SampleSummary, ...]:
    """The stored samples of an attempt that has not ended; empty for any other attempt."""
    group = state.groups.get(group_id)
    if group is None or group.attempt != attempt or group.stage is not Stage.IN_FLIGHT:
        return ()
    return spilled_samples(group)


def longest(*summaries: Iterable[SampleSummary]) -> tuple[SampleSummary, ...]:
    """For each sample, the summary with the most tokens, in order. On a tie, the later one."""
    best: dict[tuple[int, int], SampleSummary] = {}
    for samples in summaries:
        for sample in samples:
            key = sample.index, sample.part
            if key not in best or sample.response_len >= best[key].response_len:
                best[key] = sample
    return tuple(best[key] for key in sorted(best))


def set_verdicts(state: LedgerState, *, needed: bool) -> tuple[Change, ...]:
    """Set whether completed groups wait for a verdict. Without a filter, those that wait are kept."""
    state.verdicts = needed
    waiting = () if needed else in_log_order(state.in_stage(Stage.COMPLETED).values())
    return tuple(_keep(state, group) for group in waiting)


def _keep(state: LedgerState, group: Group) -> Judged:
    state.move(group, Stage.READY)
    return Judged(group, Outcome.KEEP, None)


def issue(state: LedgerState, event: GroupsIssued) -> tuple[Change, ...]:
    """Add new groups, and issue pooled groups again. New groups of a data source with a state cite its state."""
    kept = set_verdicts(state, needed=event.verdicts)
    groups: list[Group] = []
    num_groups = state.next_group
    for issued in event.groups:
        group = state.groups.get(issued.group_id)
        if issued.group_id >= state.next_group and not issued.attempt:
            state.first_group = state.first_group if state.next_group else issued.group_id
            group = Group(
                group_id=issued.group_id,
                attempt=issued.attempt,
                prompt=issued.prompt,
                round=event.round,
                min_version=event.min_version,
                stage=Stage.IN_FLIGHT,
                num_samples=event.num_samples,
                prompt_parts=issued.prompt_parts,
                draws=event.draws,
                payload_seq=min((state.newest_payload + 1, *issued.prompt_parts, *event.draws)),
            )
            state.newest_payload = max((state.newest_payload, *issued.prompt_parts, *event.draws))
            state.enter(group)
            state.next_group = issued.group_id + 1
            state.next_prompt = issued.prompt + 1
            groups.append(group)
        elif group is not None and group.stage is Stage.POOLED and issued.attempt > group.attempt:
            state.index.leave(group)
            group.attempt, group.round, group.min_version = issued.attempt, event.round, event.min_version
            group.num_samples, group.stage, group.reason = event.num_samples, Stage.IN_FLIGHT, None
            group.prompt_parts = issued.prompt_parts or group.prompt_parts
            group.payload_seq = min((group.payload_seq, *issued.prompt_parts))
            state.newest_payload = max((state.newest_payload, *issued.prompt_parts))
            state.index.enter(group)
            groups.append(group)
    if state.next_group > num_groups and event.draws not in ((), state.draws):  # with the first part of an issue
        state.draws, state.draws_digest = event.draws, event.draws_digest
        state.outcomes = state.outcomes[event.num_told :]
    if groups:
        state.to_issue, state.issue_round = event.more, event.round
    return *kept, Issued(tuple(groups))


def spill(state: LedgerState, event: SegmentsSpilled) -> None:
    """Record what the samples of an attempt in flight have stored since the last such event."""
    group = state.groups.get(event.group_id)
    if group is None or group.attempt != event.attempt or group.stage is not Stage.IN_FLIGHT:
        return
    group.payload_seq = min([group.payload_seq, *_cited(state, take_increments(group, event))])


def end_attempt(state: LedgerState, event: GroupCompleted | GroupAborted | GroupFailed, seq: int) -> tuple[Change, ...]:
    """End an attempt. Only its first end counts; later ones change nothing.

    A completed group waits for a verdict. If the run has no filter, it is kept at once.
    """
    group = state.groups.get(event.group_id)
    if group is None or group.attempt != event.attempt or group.stage is not IN_FLIGHT:
        return ()  # late result of a replaced worker, or a duplicate
    ended = AttemptEnded(group, event)
    if isinstance(event, GroupFailed):
        return ended, *close(state, event.group_id, state.failed, event.reason)
    completed = isinstance(event, GroupCompleted)
    samples = event.samples if completed else longest(spilled_samples(group), event.samples)
    needed = [*group.prompt_parts, *group.draws, *_cited(state, samples)]
    group.payload_seq = min(needed, default=group.payload_seq)
    group.event_seq, group.spilled, group.anew = seq, [], []
    if completed and (reason := wrong_count(event, group.num_samples)):
        return ended, *close(state, event.group_id, state.failed, reason)
    state.baselines += completed and event.baseline is not None
    by_hand = group.round <= state.ended_by_hand  # a person may halt a round before its groups get an engine
    is_held = isinstance(event, GroupAborted) and bool(event.held)  # by functions that may work longer than a round
    group.fruitless += not completed and not by_hand and not is_held and not _goes_on(group.carried, samples)
    group.carried = () if completed else samples
    group.data = event.data if completed else group.data
    describe(group, samples)
    state.move(group, COMPLETED if completed else POOLED)
    return (ended, _keep(state, group)) if completed and not state.verdicts else (ended,)


def _goes_on(before: Iterable[SampleSummary], after: Iterable[SampleSummary]) -> bool:
    """Whether samples gained tokens or scores in an attempt."""
    (tokens, scores), (more_tokens, more_scores) = (
        (sum(sample.response_len for sample in some), sum(sample.reward is not None for sample in some))
        for some in (tuple(before), tuple(after))
    )
    return more_tokens > tokens or more_scores > scores


def closed_by(event: object) -> tuple[Sequence[int], str]:
    """Return the groups that get no further attempt from an event of the log on, and why."""
    return (event.group_ids, event.reason) if isinstance(event, GroupsClosed) else ((), "")


def wrong_count(event: GroupCompleted, num_samples: int) -> str:
    """Why a completed group has the wrong number of samples; empty if it is right, or if the number is unknown (0)."""
    got = len({sample.index for sample in event.samples})
    return f"{got} samples where {num_samples} were asked for" if num_samples and got != num_samples else ""


def _cited(state: LedgerState, samples: Sequence[SampleSummary]) -> list[int]:
    """The data messages of the samples' segments and columns."""
    cited = [ref.seq for sample in samples for ref in sample.segments]
    cited += [seq for sample in samples for seq in sample.columns.values()]
    state.newest_payload = max([state.newest_payload, *cited])
    return cited


def describe(group: Group, samples: tuple[SampleSummary, ...]) -> None:
    """Record rewards, lengths and weight versions of an ended attempt's samples, without the greedy one."""
    known = [(s.index, s.reward, s.response_len, s.first_version, s.last_version) for s in samples if not s.is_baseline]
    indices, rewards, lens, oldest, newest = zip(*known, strict=True) if known else ((), (), (), (), ())
    group.indices, group.rewards, group.response_lens = indices, rewards, lens
    group.oldest_version = min([version for version in oldest if version is not None], default=None)
    group.newest_version = max([version for version in newest if version is not None], default=None)


def judge(state: LedgerState, event: VerdictGiven) -> tuple[Change, ...]:
    """Apply the verdict on a completed group. Only the first verdict counts."""
    group = state.groups.get(event.group_id)
    if group is None or group.stage is not COMPLETED or group.event_seq != event.event_seq:
        return ()
    judged, reason = Judged(group, event.outcome, event.reason), event.reason or f"filter_{event.outcome}"
    match event.outcome:
        case Outcome.KEEP:
            state.move(group, READY)
        case Outcome.SPARE:
            group.reason = reason
            state.move(group, Stage.SPARE)
            _count_barren(state, group)
        case Outcome.DROP | Outcome.FAILED:
            tally = state.dropped if event.outcome is Outcome.DROP else state.failed
            return judged, *close(state, event.group_id, tally, reason)
    return (judged,)


def close(state: LedgerState, group_id: int, tally: dict[str, int], reason: str) -> tuple[Change, ...]:
    """Give a group up, and count it under its reason."""
    group = state.remove(group_id)
    if group is None:
        return ()
    closed = Closed(group, reason, tally is state.failed)
    is_halted = group.stage is Stage.POOLED and reason == HALTED
    if reason not in tally and len(tally) >= MAX_REASONS:
        reason = OTHER_REASONS
    tally[reason] = tally.get(reason, 0) + 1
    if not is_halted and group.stage not in (Stage.SPARE, Stage.PASSED_OVER):  # counted already, or had their chance
        _count_barren(state, group)
    return (closed,)


def note_outcomes(state: LedgerState, changes: Iterable[Change]) -> None:
    """Keep the outcomes of groups for the data source: of each its first verdict, or its end without one."""
    for change in changes:
        if isinstance(change, Judged) and change.outcome not in (Outcome.KEEP, Outcome.SPARE):
            continue  # it is closed next
        if not isinstance(change, Judged | Closed) or change.group.is_told:
            continue
        group, is_kept = change.group, isinstance(change, Judged) and change.outcome is Outcome.KEEP
        is_failed = isinstance(change, Closed) and change.is_failed
        outcome = GroupOutcome(
            number=group.prompt,
            kind="kept" if is_kept else "failed" if is_failed else "dropped",
            rewards=tuple(reward for reward in group.rewards if reward is not None),
            reason="" if is_kept else change.reason or "",
        )
        group.is_told = True
        state.outcomes = (*state.outcomes, outcome)


def _count_barren(state: LedgerState, group: Group) -> None:
    if group.round >= state.first_round:  # groups left from a halted round came with a batch
        state.barren += 1
