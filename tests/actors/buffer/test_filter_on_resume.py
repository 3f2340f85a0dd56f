"""Runs with and without a filter, on a real bus: which groups need a verdict, and a resume that changes it."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.registry import Role, hosted
from messages import (
    BatchReady,
    BufferStarted,
    GroupCompleted,
    GroupsIssued,
    Message,
    SampleStatus,
    SampleSummary,
    VerdictGiven,
)
from messages.codec import TYPE_HEADER
from messages.subjects import filter_of
from runtime.bus.bus import Bus
from runtime.ledger.fold import LEDGER_EVENTS, LedgerState, fold
from runtime.ledger.state import Stage
from runtime.process.hosting import host
from runtime.settings.topology import Topology
from tests.build.topology import SCRIPTED_MODEL as MODEL
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import announcement

pytestmark = pytest.mark.anyio

OLD = {  # as written before the buffer said whether verdicts are needed
    "buffer_started": b'{"type":"buffer_started","incarnation":1}',
    "groups_issued": b'{"type":"groups_issued","incarnation":1,"round":0,"min_version":1,"groups":['
    b'{"group_id":0,"attempt":0,"prompt":0},{"group_id":1,"attempt":0,"prompt":1}],"num_samples":2}',
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with ten prompts."""
    rows = (json.dumps({"input": str(number), "label": "1"}) for number in range(10))
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    return tmp_path


def topology_of(folder: Path, dynamic_filter: str | None) -> Topology:
    """Batches of two groups of two samples."""
    data = [{"name": "d", "path": str(folder / "prompts.jsonl"), "rm_type": "exact_match"}]
    return topology_with(model={"hf_checkpoint": str(MODEL)}, data=data, rollout={"dynamic_filter": dynamic_filter})


@asynccontextmanager
async def running(bus: Bus, folder: Path, dynamic_filter: str | None = None) -> AsyncGenerator[None]:
    """A buffer, and a filter if the recipe has one."""
    topology = topology_of(folder, dynamic_filter)
    roles: tuple[Role, ...] = ("buffer", "filter") if dynamic_filter else ("buffer",)
    async with anyio.create_task_group() as group:
        group.start_soon(host, bus, [hosted(role, topology, folder) for role in roles])
        yield
        group.cancel_scope.cancel()


async def complete(bus: Bus, group_id: int, *rewards: float) -> int:
    samples = tuple(
        SampleSummary(index=index, status=SampleStatus.COMPLETED, reward=reward) for index, reward in enumerate(rewards)
    )
    done: dict[str, Any] = {"lease": "l", "round": 0, "instance": "rollout", "data": "d", "samples": samples}
    return await bus.publish(GroupCompleted(group_id=group_id, attempt=0, **done))


async def log_of(bus: Bus) -> list[Message]:
    async with bus.read() as events:
        return [received.message async for received in events.so_far()]


async def until(bus: Bus, event_type: type[Message], number: int) -> list[Any]:
    """Wait for a number of events of a type, and return them."""
    found: list[Message] = []

    async def there() -> bool:
        found[:] = [event for event in await log_of(bus) if isinstance(event, event_type)]
        return len(found) >= number

    await eventually(there)
    return found


async def state_of(bus: Bus) -> LedgerState:
    state = LedgerState()
    async with bus.read(*LEDGER_EVENTS) as events:
        async for received in events.so_far():
            fold(state, received.message, received.seq)
    return state


def groups_of(batch: BatchReady) -> list[int]:
    return [ref.group_id for ref in batch.groups]


@pytest.mark.parametrize("dynamic_filter", [None, "none"])
async def test_without_a_filter_a_batch_is_made_of_completed_groups_without_verdicts(
    bus: Bus, folder: Path, dynamic_filter: str | None
) -> None:
    topology = topology_of(folder, dynamic_filter)
    async with anyio.create_task_group() as group:
        group.start_soon(host, bus, [hosted("buffer", topology, folder)])
        await bus.publish(announcement(1))
        (issued,) = await until(bus, GroupsIssued, 1)
        for group_id in (1, 0):
            await complete(bus, group_id, 1.0, 1.0)
        (batch,) = await until(bus, BatchReady, 1)
        group.cancel_scope.cancel()
    (started,) = await until(bus, BufferStarted, 1)
    assert (started.verdicts, issued.verdicts, groups_of(batch)) == (False, False, [0, 1])
    assert not [event for event in await log_of(bus) if isinstance(event, VerdictGiven)]


async def test_a_filter_that_is_added_judges_the_next_groups(bus: Bus, folder: Path) -> None:
    async with running(bus, folder):
        await bus.publish(announcement(1))
        await until(bus, GroupsIssued, 1)
        kept = await complete(bus, 0, 1.0, 1.0)  # which the filter would drop
        await eventually(lambda: _is_in(bus, 0, Stage.READY))
    async with running(bus, folder, "nonzero_std"):
        await until(bus, BufferStarted, 2)
        await complete(bus, 1, 0.0, 0.0)
        issued = (await until(bus, GroupsIssued, 2))[-1]  # a new group in place of the dropped one
        assert [group.group_id for group in issued.groups] == [2, 3]
        for group_id in (2, 3):
            await complete(bus, group_id, 0.0, 1.0)
        (batch,) = await until(bus, BatchReady, 1)
        verdicts = await until(bus, VerdictGiven, 3)
    state = await state_of(bus)
    assert groups_of(batch) == [0, 2]
    assert state.dropped == {"zero_std_0.0": 1}
    assert state.books().closed
    assert [event.event_seq == kept for event in verdicts if event.group_id == 0] in ([], [True])  # too late to count


async def test_a_filter_that_is_removed_leaves_no_group_waiting(bus: Bus, folder: Path) -> None:
    """The filter ended before it judged the last groups: the next buffer keeps them."""
    topology = topology_of(folder, "nonzero_std")
    async with anyio.create_task_group() as group:
        group.start_soon(host, bus, [hosted("buffer", topology, folder)])  # and no filter
        await bus.publish(announcement(1))
        await until(bus, GroupsIssued, 1)
        for group_id in (0, 1):
            await complete(bus, group_id, 1.0, 1.0)
        await eventually(lambda: _is_in(bus, 1, Stage.COMPLETED))
        group.cancel_scope.cancel()
    async with running(bus, folder):
        (batch,) = await until(bus, BatchReady, 1)
    assert groups_of(batch) == [0, 1]


async def test_a_log_from_before_goes_on_without_its_filter(bus: Bus, folder: Path) -> None:
    """Its buffer did not say whether verdicts are needed: group 0 has one, group 1 waits for one."""
    await _put(bus, BufferStarted, "buffer_started")
    await bus.publish(announcement(1))
    await _put(bus, GroupsIssued, "groups_issued")
    seq = await complete(bus, 0, 1.0, 1.0)
    await bus.publish(VerdictGiven(group_id=0, attempt=0, event_seq=seq, outcome="drop", reason="dull"))  # pyright: ignore[reportArgumentType]
    await complete(bus, 1, 1.0, 1.0)
    before = await state_of(bus)
    assert (before.verdicts, before.groups[1].stage, before.dropped) == (True, Stage.COMPLETED, {"dull": 1})
    async with running(bus, folder):
        issued = (await until(bus, GroupsIssued, 2))[-1]
        assert ([group.group_id for group in issued.groups], issued.verdicts) == ([2, 3], False)
        await complete(bus, 2, 1.0, 1.0)
        (batch,) = await until(bus, BatchReady, 1)
    assert groups_of(batch) == [1, 2]
    assert (await state_of(bus)).books().closed


async def _put(bus: Bus, event_type: type[Message], tag: str) -> None:
    await bus._store.put(filter_of(bus.run, event_type), OLD[tag], {TYPE_HEADER: tag})


async def _is_in(bus: Bus, group_id: int, stage: Stage) -> bool:
    group = (await state_of(bus)).groups.get(group_id)
    return group is not None and group.stage is stage
