"""Whatever the log says, the trainer knows the same batches as the ledger, from its beginning or from a snapshot."""

from collections.abc import Iterable

from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from actors.trainer.data.history import HISTORY, History
from messages import GroupRef, Message, SnapshotTaken
from runtime.ledger.snapshots import content_of
from tests.actors.buffer.test_any_log import AnyLog

Batches = dict[int, tuple[tuple[GroupRef, ...], bool]]


class AnyHistory(AnyLog):
    """The log that the ledger is tested on, followed by a trainer too."""

    def add(self, event: Message) -> int:
        if not self.log:
            self.history = History()
        seq = super().add(event)
        take(self.history, [(seq, event)])
        return seq

    @invariant()
    def the_trainer_knows_the_batches_of_the_ledger(self) -> None:
        self.agrees(self.history)

    def agrees(self, history: History) -> None:
        state = self.state
        assert batches_of(history) == {step: (batch.groups, batch.trained) for step, batch in state.batches.items()}
        assert (history.frontier, history.incarnation) == (state.trained_steps, state.trainer_incarnation)
        assert history._steps.checkpoint_step == state.checkpoint_step
        assert history.version >= state.version  # versions of a replaced trainer too are never reused
        needed = {version: state.version_steps[version] for version in state.version_steps}
        assert needed.items() <= history.steps_of_versions.items()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "log"):
            for snapshot in [event for event in self.log if isinstance(event, SnapshotTaken)]:
                history = History(content_of(snapshot))
                take(history, list(enumerate(self.log, start=1))[history.from_seq - 1 :])
                self.agrees(history)


def take(history: History, events: Iterable[tuple[int, Message]]) -> None:
    for seq, event in events:
        if isinstance(event, HISTORY):
            history.fold(event, seq)


def batches_of(history: History) -> Batches:
    return {step: (batch.groups, step in history.trained) for step, batch in history.batches.items()}


def test_the_trainer_and_the_ledger_agree_on_the_batches_of_any_log() -> None:
    run_state_machine_as_test(
        AnyHistory,
        settings=settings(
            max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
