"""Whatever the log says, the recorder holds open what the ledger holds open, and writes the ledger's batches."""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from actors.buffer.storage.records import Records
from messages import BatchReady, Message
from runtime.ledger.fold import Stage
from tests.actors.buffer.test_any_log import AnyLog

ENDED = (Stage.BATCHED, Stage.PASSED_OVER)  # in a pair by now


class AnyRecords(AnyLog):
    """The log that the ledger is tested on, followed by a recorder too."""

    def add(self, event: Message) -> int:
        if not self.log:
            self.records, self.purged_below = Records(), 0
            self.files: dict[int, dict[int, Any]] = {}
        seq = super().add(event)
        pair = self.records.fold(event, seq)
        if pair is not None:
            completed = [record.completed for record in pair.records if record.completed is not None]
            cited = [ref.seq for done in completed for sample in done.samples for ref in sample.segments]
            assert self.purged_below <= min(cited, default=self.purged_below)
            self.files[pair.step] = {record.group_id: record.fate.step for record in pair.records}
            assert isinstance(event, BatchReady)
            in_batch = [group_id for group_id, step in self.files[pair.step].items() if step == pair.step]
            assert in_batch == [ref.group_id for ref in event.groups]
        self.purged_below = max(self.purged_below, self.records.low_water())
        return seq

    @invariant()
    def the_same_groups_are_open(self) -> None:
        live = {group.group_id for group in self.state.groups.values() if group.stage not in ENDED}
        assert self.records._open.keys() == live

    @invariant()
    def what_may_be_written_is_not_purged(self) -> None:
        held = [record.completed for record in self.records._held() if record.completed is not None]
        cited = [ref.seq for event in held for sample in event.samples for ref in sample.segments]
        assert self.records.low_water() <= min(cited, default=self.records.low_water())

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "files"):
            given_up = [group_id for groups in self.files.values() for group_id, step in groups.items() if step is None]
            assert len(given_up) == len(set(given_up))


def test_the_recorder_and_the_ledger_agree_on_any_log() -> None:
    run_state_machine_as_test(
        AnyRecords,
        settings=settings(
            max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
