"""Full streams: a checkpoint is asked for in time, issuing waits for room, and nothing waits for ever."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from actors.buffer.actor import BufferActor
from actors.buffer.storage.pressure import RECHECK_S, Pressure, fullest, makes_room_later
from actors.registry import hosted
from messages import (
    BatchReady,
    BatchTrained,
    CheckpointRequested,
    CheckpointSaved,
    GroupCompleted,
    GroupFailed,
    GroupRef,
    GroupsIssued,
    Message,
    Outcome,
    PayloadsMissing,
    Plane,
    RoundHalted,
    RunFinished,
    SampleStatus,
    SampleSummary,
    SegmentRef,
    SegmentsPublished,
    VerdictGiven,
)
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.bus.limits import KIB, StreamLimits
from runtime.ledger.archive import history
from runtime.ledger.books import LedgerReport
from runtime.ledger.fold import LedgerState, fold
from runtime.process.hosting import host
from runtime.settings.topology import Topology
from tests.actors.buffer.storage.test_trimming import topology_of
from tests.build.events import announced, batch, completed, issued, trained, verdict
from tests.fixtures.nats import TEST_STREAMS, NatsServer
from tests.support.rollout import announcement, next_event

pytestmark = pytest.mark.anyio

NUM_STEPS = 30
TEXT = "x" * 15_000  # of a group's payload: two of them a step


class Others:
    """Rollout, reward, filter and a trainer that saves when it is asked to, and at the end."""

    def __init__(self, bus: Bus, num_steps: int) -> None:
        self._bus = bus
        self._num_steps = num_steps
        self._saved = 0
        self._trained = 0
        self._asked = False

    async def run(self) -> None:
        await self._bus.publish(announcement(1))
        async with self._bus.read() as events:
            async for received in events:
                match received.message:
                    case GroupsIssued() as issued:
                        for group in issued.groups:
                            await self._complete(group.group_id)
                    case BatchReady() as ready:
                        await self._train(ready.step)
                    case CheckpointRequested():
                        self._asked = True
                        await self._save()
                    case _:
                        pass

    async def _complete(self, group_id: int) -> None:
        payload = SegmentsPublished(group_id=group_id, attempt=0, lease="l", segments=(), prompt=TEXT)
        refs = (SegmentRef(seq=await self._bus.publish(payload), position=0),)
        samples = tuple(
            SampleSummary(index=index, status=SampleStatus.COMPLETED, reward=1.0, segments=refs) for index in range(2)
        )
        who: dict[str, Any] = {"lease": "l", "round": 0, "instance": "rollout", "data": "d"}
        seq = await self._bus.publish(GroupCompleted(group_id=group_id, attempt=0, samples=samples, **who))
        await self._bus.publish(VerdictGiven(group_id=group_id, attempt=0, event_seq=seq, outcome=Outcome.KEEP))

    async def _train(self, step: int) -> None:
        told: dict[str, Any] = {"num_groups": 2, "num_samples": 4, "num_tokens": 8, "metrics": {}}
        await self._bus.publish(BatchTrained(step=step, incarnation=1, **told))
        self._trained = step + 1
        await self._bus.publish(announcement(step + 2, step=step + 1))
        if self._asked or self._trained == self._num_steps:
            await self._save()

    async def _save(self) -> None:
        if self._trained > self._saved:
            self._saved, self._asked = self._trained, False
            done = self._trained
            await self._bus.publish(CheckpointSaved(step=done, incarnation=1, path="", oldest_step=done, took_s=0))


def give_rows(topology: Topology, metadata: str) -> None:
    """Four rows that have to be stored, for the size of their metadata."""
    row = json.dumps({"input": "1", "label": "1", "metadata": {"text": metadata}})
    Path(topology.data[0].path or "").write_text(f"{row}\n" * 4)


@asynccontextmanager
async def at_work(
    bus: Bus,
    tmp_path: Path,
    *,
    num_steps: int = NUM_STEPS,
    metadata: str | None = None,
    recheck_s: float = RECHECK_S,
) -> AsyncGenerator[None]:
    topology = topology_of(tmp_path, trim_min_events=10_000)
    topology = msgspec.structs.replace(topology, train=msgspec.structs.replace(topology.train, num_steps=num_steps))
    if metadata is not None:
        give_rows(topology, metadata)
    async with anyio.create_task_group() as group:
        buffer = msgspec.structs.replace(
            hosted("buffer", topology, tmp_path),
            build=lambda view: BufferActor(topology, view, tmp_path, recheck_s=recheck_s),
        )
        group.start_soon(host, bus, [buffer])
        group.start_soon(Others(bus, num_steps).run)
        yield
        group.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("limits", "stream"),
    [({"data_bytes": 256 * KIB}, "data"), ({"event_bytes": 96 * KIB}, "event")],
    ids=["data", "event"],
)
async def test_a_run_passes_through_streams_that_hold_a_part_of_it(
    bus: Bus, tmp_path: Path, limits: dict[str, int], stream: str
) -> None:
    tiny: StreamLimits = msgspec.structs.replace(TEST_STREAMS, **limits)
    await bus.ensure_streams(tiny)
    async with at_work(bus, tmp_path, recheck_s=0.0):  # these streams are full in a moment
        finished, _ = await next_event(bus, RunFinished, timeout_s=40)
    assert isinstance(finished, RunFinished)
    async with history(bus, tmp_path) as events:
        log = [(received.seq, received.message) async for received in events.so_far()]
    assert [seq for seq, _ in log] == list(range(1, len(log) + 1))
    report = LedgerReport()
    for seq, event in log:
        report.take(event, seq)
    assert report.trained == [(step, (2 * step, 2 * step + 1)) for step in range(NUM_STEPS)]
    requested = [event for _, event in log if isinstance(event, CheckpointRequested)]
    assert {event.stream for event in requested} == {stream}
    assert [event.step for event in requested] == sorted({event.step for event in requested})
    assert all(event.used >= 0.7 for event in requested)  # rounded
    assert 0 < len(requested) < NUM_STEPS


async def test_issuing_waits_for_room_for_large_rows(bus: Bus, tmp_path: Path) -> None:
    """Two rows fit, two more do not, while the stream is less full than where a checkpoint is asked for."""
    await bus.ensure_streams(msgspec.structs.replace(TEST_STREAMS, data_bytes=400 * KIB))
    async with at_work(bus, tmp_path, num_steps=4, metadata="x" * 110_000, recheck_s=0.0):
        finished, _ = await next_event(bus, RunFinished, timeout_s=40)
    assert isinstance(finished, RunFinished)


async def test_a_task_that_the_bus_refuses_fails_its_group(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.buffer.prompts.storing.is_large", lambda _prompt: False)
    async with at_work(bus, tmp_path, metadata="x" * (9 << 20)):
        failed, _ = await next_event(bus, GroupFailed, timeout_s=40)
    assert isinstance(failed, GroupFailed)
    assert failed.reason.startswith("task: ")
    assert "allowed: at most" in failed.reason


def ledger_of(*events: Message) -> LedgerState:
    state = LedgerState()
    for seq, event in enumerate(events, start=1):
        fold(state, event, seq)
    return state


def test_issuing_waits_only_while_something_else_will_make_room() -> None:
    """Otherwise the groups that it holds back would be what everything waits for."""
    assert not makes_room_later(ledger_of(announced(1, 0)), checkpoint_requested=False)
    begun = (announced(1, 0), issued(0, 1), completed(0), verdict(0, 3))
    assert makes_room_later(ledger_of(*begun), checkpoint_requested=False)  # group 1 will end
    ready = (*begun, completed(1), verdict(1, 5), RoundHalted(incarnation=1, round=0))
    assert not makes_room_later(ledger_of(*ready), checkpoint_requested=False)
    batched = (*ready, batch(0, (0, 3), (1, 5)))
    assert makes_room_later(ledger_of(*batched), checkpoint_requested=False)  # it will be trained
    done = ledger_of(*batched, trained(0), announced(2, 1))
    assert not makes_room_later(done, checkpoint_requested=False)
    assert makes_room_later(done, checkpoint_requested=True)


def test_a_batch_behind_one_that_is_made_again_makes_no_room() -> None:
    """The trainer trains step 1 after step 0, which needs a group that is issued again."""
    both = (announced(1, 0), issued(0, 1), completed(0), verdict(0, 3), completed(1), verdict(1, 5))
    lost = (GroupRef(group_id=0, attempt=0, event_seq=3),)
    missing = PayloadsMissing(step=0, incarnation=1, groups=lost, reason="purged")
    batched = (*both, batch(0, (0, 3)), batch(1, (1, 5)))
    assert makes_room_later(ledger_of(*batched), checkpoint_requested=False)
    assert not makes_room_later(ledger_of(*batched, missing), checkpoint_requested=False)


async def test_issuing_waits_above_nine_tenths_and_goes_on_below(bus: Bus) -> None:
    busy = False
    pressure = Pressure(bus, lambda: busy, recheck_s=60.0)
    assert not await pressure.holds(LedgerState())  # and has looked
    running = ledger_of(announced(1, 0), issued(0, 1))
    pressure._used = {Plane.EVENT: 0.2, Plane.DATA: 0.89, Plane.WORK: 0.1}
    assert not await pressure.holds(running)
    pressure._used[Plane.WORK] = 0.93
    assert await pressure.holds(running)
    assert pressure.holding == "work stream 93% full"
    assert not await pressure.holds(ledger_of(announced(1, 0)))  # nothing else would make room,
    busy = True
    assert await pressure.holds(ledger_of(announced(1, 0)))  # but what is being trimmed
    pressure._used[Plane.WORK] = 0.5
    assert not await pressure.holds(running)
    assert pressure.holding == ""


async def test_a_measurement_that_fails_raises_one_error_of_the_bus(nats_server: NatsServer) -> None:
    async with Bus.connect(nats_server.url, "no-streams", name="test") as bus:
        with pytest.raises(BusError):
            await Pressure(bus, lambda: False).holds(LedgerState())


async def test_issuing_after_a_train_step_waits_for_no_measurement(bus: Bus) -> None:
    looks, state = 0, ledger_of(announced(1, 0), issued(0, 1))
    pressure = Pressure(bus, lambda: False, recheck_s=0.0)
    measure = pressure._measure

    async def counted() -> None:
        nonlocal looks
        looks += 1
        await measure()

    pressure._measure = counted
    pressure.folded(completed(0), state)
    await pressure.holds(state)
    for event in (batch(0, (0, 3)), trained(0), announced(2, 1)):
        pressure.folded(event, state)
        await pressure.holds(state)
    assert looks == 1
    pressure.folded(completed(1), state)
    await pressure.holds(state)
    assert looks == 2


def test_a_checkpoint_is_asked_for_streams_that_it_empties() -> None:
    assert fullest({Plane.EVENT: 0.2, Plane.DATA: 0.8, Plane.WORK: 0.95}) == (Plane.DATA, 0.8)
    assert fullest({}) == (Plane.EVENT, 0.0)


async def test_what_a_stream_holds_is_told_with_its_limit(bus: Bus) -> None:
    await bus.ensure_streams(msgspec.structs.replace(TEST_STREAMS, data_bytes=100 * KIB))
    before = await bus.state(Plane.DATA)
    assert (before.used, before.max_bytes) == (0.0, 100 * KIB)
    await bus.publish(SegmentsPublished(group_id=1, attempt=0, lease="l", segments=(), prompt="x" * 50 * KIB))
    assert 0.5 < (await bus.state(Plane.DATA)).used < 0.55


@pytest.mark.slow
async def test_what_is_asked_while_the_first_look_is_under_way_is_answered(bus: Bus, monkeypatch: Any) -> None:
    pressure, looked, go_on, state = Pressure(bus, lambda: False), anyio.Event(), anyio.Event(), bus.state

    async def held_up_once(plane: Plane) -> Any:
        if plane is Plane.DATA and not looked.is_set():
            looked.set()
            await go_on.wait()
        return await state(plane)

    monkeypatch.setattr(bus, "state", held_up_once)
    async with anyio.create_task_group() as group:
        group.start_soon(pressure.run)
        await looked.wait()
        assert not await pressure.holds(LedgerState(), adding=100)
        go_on.set()
        group.cancel_scope.cancel()
