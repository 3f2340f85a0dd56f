"""State changes of an evaluation."""

from messages import EvalCompleted, EvalEnded, EvalIssued, SampleStatus, WeightsAnnounced
from runtime.ledger.state import MAX_ENDINGS_LOST, EvalItem, Evaluation, LedgerState


def evaluate(state: LedgerState, event: EvalIssued | EvalCompleted | EvalEnded) -> None:
    """Start an evaluation, record one of its items, or end it."""
    running = state.evaluation
    match event:
        case EvalIssued():
            if running is None and event.step > state.eval_step:
                sizes = {size.set: size.num_items for size in event.sets}
                items: dict[str, dict[int, EvalItem]] = {name: {} for name in sizes}
                state.evaluation = Evaluation(
                    step=event.step, version=event.version, sizes=sizes, items=items, payload_seq=event.payload_seq
                )
        case EvalCompleted():
            if running is not None and running.step == event.step:
                rewards = tuple(sample.reward or 0.0 for sample in event.samples)
                truncated = sum(sample.status is SampleStatus.TRUNCATED for sample in event.samples)
                own = max(running.version, running.same_until)
                newer = [v for sample in event.samples if (v := sample.last_version or 0) > own]
                ended = EvalItem(
                    rewards=rewards,
                    num_truncated=truncated,
                    num_newer=len(newer),
                    newest_version=max(newer, default=0),
                )
                end_item(running, event.set, event.item, ended)
        case EvalEnded():
            if running is not None and running.step <= event.step:
                state.evaluation = None
            state.eval_step = max(state.eval_step, event.step)


def note_same_weights(running: Evaluation, event: WeightsAnnounced) -> None:
    """Treat a version that republishes the evaluation's weights as the evaluation's own."""
    if 0 < event.again_of <= running.version < event.version:
        running.same_until = event.version


def end_item(running: Evaluation, name: str, item: int, ended: EvalItem) -> None:
    """Record the result of an item; only the first result counts."""
    if 0 <= item < running.sizes.get(name, 0):
        running.items[name].setdefault(item, ended)


def lose_item(running: Evaluation, key: str) -> None:
    """End an item without rewards, because its task or its result cannot be decoded."""
    step, _, rest = key.partition(".")
    name, _, number = rest.rpartition(".")
    if step == str(running.step) and number.isdecimal():
        end_item(running, name, int(number), EvalItem(rewards=(), num_truncated=0))


def lose_ending_of_item(running: Evaluation, key: str) -> None:
    """Count an undecodable result of an item. Its task is requeued until MAX_ENDINGS_LOST such results."""
    step, _, rest = key.partition(".")
    name, _, number = rest.rpartition(".")
    known = step == str(running.step) and number.isdecimal() and int(number) < running.sizes.get(name, 0)
    if known and int(number) not in running.items[name]:
        running.endings_lost[key] = running.endings_lost.get(key, 0) + 1
        if running.endings_lost[key] >= MAX_ENDINGS_LOST:
            lose_item(running, key)
