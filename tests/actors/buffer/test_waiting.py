"""What the buffer says that it waits for."""

import time
from pathlib import Path

import anyio
import msgspec
import pytest

from actors.buffer.actor import BufferActor
from actors.buffer.deciding.decide import Schedule
from actors.buffer.waiting import Activity, describe_wait
from actors.registry import hosted
from messages import (
    CheckpointSaved,
    EvalIssued,
    EvalSetSize,
    GroupRef,
    PayloadsMissing,
    StatsGiven,
    StatsRequested,
)
from runtime.bus.bus import Bus
from runtime.bus.errors import CallError
from runtime.ledger.fold import LedgerState, fold
from runtime.process.hosting import host
from tests.build.events import announced, batch, completed, issued, trained, verdict
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually

MODEL = Path(__file__).resolve().parents[3] / "topologies/demo/models/reverse-digits"
SCHEDULE = Schedule(num_steps=2, rollout_batch_size=3, over_sampling_batch_size=3)


def words(*events: object) -> str:
    state = LedgerState()
    for seq, event in enumerate(events, start=1):
        fold(state, event, seq)  # pyright: ignore[reportArgumentType]
    return describe_wait(state, SCHEDULE)


def test_the_ledger_says_what_it_lacks() -> None:
    assert words() == "the first weights"
    begun = (announced(1, 0), issued(0, 1, 2), completed(0), completed(1), verdict(0, 3))
    assert words(*begun) == "3 groups for the batch of step 1: 1 ready, 1 waiting for a verdict, 1 being generated"
    full = (*begun, completed(2), verdict(1, 4), verdict(2, 6), batch(0, (0, 3), (1, 4), (2, 6)))
    assert words(*full) == "the batch of step 1 to be trained; weights of step 1 (newest: v1 of step 0)"
    assert words(*full, trained(0), announced(2, 1)) == "3 groups for the batch of step 2: none issued"
    lost = (GroupRef(group_id=1, attempt=0, event_seq=4),)
    assert words(*full, PayloadsMissing(step=0, incarnation=1, groups=lost, reason="purged")) == (
        "3 groups for the batch of step 1: 2 ready"
    )
    evaluation = EvalIssued(incarnation=1, step=0, version=1, sets=(EvalSetSize(set="heldout", num_items=2),))
    assert words(announced(1, 0), evaluation) == (
        "the evaluation after step 0: 0 of 2 items of heldout; 3 groups for the batch of step 1: none issued"
    )
    second = (trained(0), announced(2, 1), issued(5, 6, 7, round=1), completed(5), completed(6), completed(7))
    judged = (verdict(5, 13), verdict(6, 14), verdict(7, 15), batch(1, (5, 13), (6, 14), (7, 15)))
    rest = (*second, *judged, trained(1), announced(3, 2))
    assert words(*full, *rest) == "the last checkpoint"
    saved = CheckpointSaved(step=2, incarnation=1, path="c", oldest_step=0, took_s=0.1)
    assert words(*full, *rest, saved) == "the running groups to end"


def test_what_takes_a_moment_only_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    doing = Activity()
    with doing("the data to be loaded"):
        now += 0.5
        assert doing.words() == ""
        now += 3.0
        assert doing.words() == "the data to be loaded, for 3.5s"
    assert doing.words() == ""


@pytest.mark.anyio
async def test_a_data_function_that_hangs_is_named(bus: Bus, tmp_path: Path) -> None:
    source, go_on = tmp_path / "mine.py", tmp_path / "go_on"
    source.write_text(
        f"import pathlib, time\ndef endless(number):\n    while not pathlib.Path({str(go_on)!r}).exists():\n"
        "        time.sleep(0.01)\n    return {'input': '7', 'label': '7'}\n"
    )
    data = [{"name": "d", "source": f"{source}:endless", "rm_type": "exact_match"}]
    topology = topology_with(model={"hf_checkpoint": str(MODEL)}, data=data)

    async def is_named() -> bool:
        try:
            given = await bus.call("buffer", StatsRequested(), StatsGiven, timeout_s=40)
        except CallError:  # it is not there yet
            return False
        return given.waits_for.startswith(f"the data source {source}:endless, for ")

    async with anyio.create_task_group() as group:
        buffer = msgspec.structs.replace(
            hosted("buffer", topology, tmp_path),
            build=lambda view: BufferActor(topology, view, tmp_path, long_activity_s=0.05),
        )
        group.start_soon(host, bus, [buffer])
        try:
            await eventually(is_named)
        finally:
            go_on.touch()
        group.cancel_scope.cancel()
