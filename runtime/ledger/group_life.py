"""The history of one prompt group, extracted from the log, and in words. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from messages import (
    BatchReady,
    BatchTrained,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupRef,
    GroupsClosed,
    GroupsIssued,
    Message,
    MessageDeadLettered,
    PayloadsMissing,
    RolloutRequested,
    SampleSummary,
    SegmentsSpilled,
    VerdictGiven,
)
from messages.subjects import key_of
from runtime.ledger.changes import Change, Judged
from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, fold
from runtime.ledger.steps import Settled, TakenBack
from runtime.util.formatting import count_of


class GroupLife:
    """Finds all events of the log that concern one prompt group."""

    def __init__(self, group_id: int) -> None:
        self.group_id = group_id
        self.kept_without_verdict = False  # whether the newest event kept it, in a run without a filter
        self.is_late = False  # whether the newest event is an end or a verdict that came too late to count
        self._ledger = LedgerState()
        self._steps: set[int] = set()  # steps that trained it; a replay trains them again

    def take(self, event: Message, seq: int) -> Message | None:
        """Return the next event of the log, reduced to this group; None if it does not concern the group.

        A trained step shows as its BatchTrained, including those of replays. If the trainer died before it wrote one,
        the step shows as the first event that implies it.

        Args:
            event: any event of the log.
            seq: its sequence in the log.
        """
        changes = fold(self._ledger, event, seq) if isinstance(event, LEDGER_EVENTS) else ()
        implied = any(self._is_settled_by(change) for change in changes)
        self.is_late = isinstance(event, GroupCompleted | GroupAborted | GroupFailed | VerdictGiven) and not changes
        self.kept_without_verdict = not isinstance(event, VerdictGiven) and any(map(self._is_kept_by, changes))
        match event:
            case GroupCompleted() | GroupAborted() | GroupFailed() | SegmentsSpilled() | VerdictGiven():
                return event if event.group_id == self.group_id else None
            case GroupsIssued():
                issued = tuple(group for group in event.groups if group.group_id == self.group_id)
                return msgspec.structs.replace(event, groups=issued) if issued else None
            case BatchReady():
                refs = tuple(ref for ref in event.groups if ref.group_id == self.group_id)
                passed_over = tuple(group_id for group_id in event.passed_over if group_id == self.group_id)
                own = msgspec.structs.replace(event, groups=refs, passed_over=passed_over)
                return own if refs or passed_over else None
            case PayloadsMissing():
                lost = tuple(ref for ref in event.groups if ref.group_id == self.group_id)
                own = msgspec.structs.replace(event, groups=lost)
                return own if any(self._is_taken_back_by(change) for change in changes) else None
            case GroupsClosed():
                known = self.group_id in event.group_ids
                return msgspec.structs.replace(event, group_ids=(self.group_id,)) if known else None
            case MessageDeadLettered():
                task = (key_of(event.subject, RolloutRequested) or "").partition(".")[0]
                return event if task == str(self.group_id) else None
            case BatchTrained():
                counts = event.step in self._steps and not self._ledger.is_replaced(event)
                return self._own_of(event) if counts else None
            case _:
                return event if implied or self.kept_without_verdict else None

    def _own_of(self, event: BatchTrained) -> BatchTrained:
        untrained = tuple(item for item in event.untrained if item.group_id == self.group_id)
        skipped = tuple(group_id for group_id in event.skipped_groups if group_id == self.group_id)
        return msgspec.structs.replace(event, untrained=untrained, skipped_groups=skipped)

    def _is_settled_by(self, change: Change) -> bool:
        if not isinstance(change, Settled) or not self._is_in(change.groups):
            return False
        self._steps.add(change.step)
        return True

    def _is_taken_back_by(self, change: Change) -> bool:
        return isinstance(change, TakenBack) and self._is_in(change.groups)

    def _is_kept_by(self, change: Change) -> bool:
        return isinstance(change, Judged) and change.group.group_id == self.group_id

    def _is_in(self, groups: Iterable[GroupRef]) -> bool:
        return any(ref.group_id == self.group_id for ref in groups)


def words_of(event: Message, life: GroupLife) -> str:
    """Say in a sentence what an event did to a group.

    Args:
        event: as `life` just returned it.
        life: of the group.
    """
    if life.is_late:
        return f"{_words(event)}; too late, it changes nothing"
    if not life.kept_without_verdict:
        return _words(event)
    kept = "kept, as the run has no filter"
    return f"{_words(event)}; {kept}" if isinstance(event, GroupCompleted) else kept


def _words(event: Message) -> str:
    match event:
        case GroupsIssued():
            (group,) = event.groups
            asked = f" of {count_of(event.num_samples, 'sample')}" if event.num_samples else ""
            again = "issued" if not group.attempt else "issued again"
            return f"{again}: attempt {group.attempt}{asked} in round {event.round}, for weights v{event.min_version}"
        case SegmentsSpilled():
            return f"attempt {event.attempt}: {event.instance} stored {_samples(event.samples)}"
        case GroupCompleted():
            took = f"rollout {event.rollout_time_s:.3f} s, scores {event.reward_time_s:.3f} s"
            return f"attempt {event.attempt} completed by {event.instance}: {_samples(event.samples)}; {took}"
        case GroupAborted():
            what = _samples(event.samples) if event.samples else "no tokens yet"
            return f"attempt {event.attempt} halted, {event.instance} had {what}"
        case GroupFailed():
            return f"attempt {event.attempt} failed at {event.instance}: {event.reason}"
        case VerdictGiven():
            return f"verdict on attempt {event.attempt}: {event.outcome}{f', {event.reason}' if event.reason else ''}"
        case BatchReady():
            return f"put into the batch of step {event.step + 1}" if event.groups else "passed over by the selection"
        case BatchTrained():
            return f"{_trained(event)} in step {event.step + 1}"
        case PayloadsMissing():
            return f"taken out of the batch of step {event.step + 1}: {event.reason}"
        case GroupsClosed():
            return f"{event.outcome}: {event.reason}"
        case MessageDeadLettered():
            return f"its task could not be read: {event.reason}"
        case _:
            return f"trained, as {type(event).__name__} implies"


def _samples(samples: Sequence[SampleSummary]) -> str:
    """Say how many samples there are, in which state, with how many tokens of which weights, and their mean reward."""
    states = ", ".join(f"{count} {state}" for state, count in Counter(s.status.value for s in samples).items())
    versions = sorted({v for s in samples for v in (s.first_version, s.last_version) if v is not None})
    of = f" of weights v{versions[0]}" if versions else ""
    of += f" to v{versions[-1]}" if len(versions) > 1 else ""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
    tokens = sum(sample.response_len for sample in samples)
    return f"{count_of(len(samples), 'sample')} ({states}) with {count_of(tokens, 'token')}{of}{mean}"


def _trained(event: BatchTrained) -> str:
    what = "skipped, without a gradient," if event.skipped_groups else "trained"
    without = sum(len(untrained.samples) for untrained in event.untrained)
    but = f", {count_of(without, 'sample')} without a gradient," if without and not event.skipped_groups else ""
    return f"{what}{' again' if event.replay else ''}{but}"
