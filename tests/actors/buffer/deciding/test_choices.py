"""The buffer on a real bus with functions of the user that choose among groups."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.registry import hosted
from messages import (
    BatchReady,
    GroupAborted,
    GroupCompleted,
    GroupsClosed,
    GroupsIssued,
    Outcome,
    PayloadsMissing,
    RolloutRequested,
    RoundHalted,
    SampleStatus,
    SampleSummary,
    VerdictGiven,
)
from runtime.bus.bus import Bus
from runtime.process.hosting import host
from tests.build.topology import topology_with
from tests.support.rollout import announcement, next_event

pytestmark = pytest.mark.anyio

MODEL = Path(__file__).resolve().parents[4] / "topologies/demo/models/reverse-digits"
FUNCTIONS = """
def last_issued(groups): return sorted(groups, key=lambda group: -group.group_id)
def last_pooled(groups, n): return [group.group_id for group in groups][::-1][:n]
def raises(groups): raise RuntimeError("no")
def doubles(groups, n): return [groups[0]] * 2
"""


@asynccontextmanager
async def buffer(bus: Bus, folder: Path, **rollout: Any) -> AsyncGenerator[None]:
    """A buffer at work on batches of two, chosen from four, with functions of a user's file."""
    (folder / "mine.py").write_text(FUNCTIONS)
    rows = "".join(json.dumps({"input": str(number), "label": "1"}) + "\n" for number in range(10))
    (folder / "prompts.jsonl").write_text(rows)
    named = {key: f"{folder}/mine.py:{name}" for key, name in rollout.items()}
    topology = topology_with(
        model={"hf_checkpoint": str(MODEL)},
        data=[{"name": "d", "path": str(folder / "prompts.jsonl"), "rm_type": "exact_match"}],
        rollout={"over_sampling_batch_size": 4, "dynamic_filter": "nonzero_std", **named},
    )
    async with anyio.create_task_group() as group:
        group.start_soon(host, bus, [hosted("buffer", topology, folder)])
        await bus.publish(announcement(1))
        yield
        group.cancel_scope.cancel()


async def complete(bus: Bus, *group_ids: int) -> None:
    samples = tuple(SampleSummary(index=index, status=SampleStatus.COMPLETED, reward=1.0) for index in range(2))
    done: dict[str, Any] = {"lease": "l", "round": 0, "instance": "rollout", "data": "d", "samples": samples}
    for group_id in group_ids:
        seq = await bus.publish(GroupCompleted(group_id=group_id, attempt=0, **done))
        await bus.publish(VerdictGiven(group_id=group_id, attempt=0, event_seq=seq, outcome=Outcome.KEEP))


@pytest.mark.parametrize(("name", "chosen"), [("last_issued", [2, 3]), ("raises", [0, 1])])
async def test_a_users_over_sampling_filter_makes_the_batch(
    bus: Bus, tmp_path: Path, name: str, chosen: list[int]
) -> None:
    async with buffer(bus, tmp_path, over_sampling_filter=name):
        await next_event(bus, GroupsIssued)
        await complete(bus, 0, 1, 2, 3)
        batch, _ = await next_event(bus, BatchReady)
        closed, _ = await next_event(bus, GroupsClosed)
    assert isinstance(batch, BatchReady)
    assert isinstance(closed, GroupsClosed)
    assert [ref.group_id for ref in batch.groups] == chosen
    assert {*chosen, *closed.group_ids} == {0, 1, 2, 3}
    assert closed.reason == "over_sampling_filter"


@pytest.mark.parametrize(("name", "first"), [("last_pooled", 3), ("doubles", 2)])
async def test_a_users_buffer_filter_says_who_goes_on(bus: Bus, tmp_path: Path, name: str, first: int) -> None:
    async with buffer(bus, tmp_path, buffer_filter=name):
        await next_event(bus, GroupsIssued)
        await complete(bus, 0, 1)
        _, seq = await next_event(bus, RoundHalted)
        for group_id in (2, 3):
            who = {"group_id": group_id, "lease": "l", "round": 0, "instance": "rollout"}
            seq = await bus.publish(GroupAborted(attempt=0, **who))
        await bus.publish(announcement(2, step=1))
        issued, _ = await next_event(bus, GroupsIssued, from_seq=seq)
    assert isinstance(issued, GroupsIssued)
    assert (issued.groups[0].group_id, issued.groups[0].attempt) == (first, 1)
    assert [group.group_id for group in issued.groups[2:]] == [4, 5]


async def test_a_batch_with_lost_payloads_is_made_again_from_new_tasks(bus: Bus, tmp_path: Path) -> None:
    async with buffer(bus, tmp_path), bus.consume(RolloutRequested, durable="rollout-policy") as tasks:
        _, seq = await next_event(bus, GroupsIssued)
        await complete(bus, 0, 1)
        batch, seq = await next_event(bus, BatchReady)
        assert isinstance(batch, BatchReady)
        await bus.publish(PayloadsMissing(step=0, incarnation=1, groups=batch.groups[:1], reason="purged"))
        await complete(bus, 2)  # it runs already, and may fill the batch
        again, _ = await next_event(bus, BatchReady, from_seq=seq + 1)
        await bus.publish(announcement(2, step=1))
        asked = [(await anext(tasks)).message for _ in range(5)]
    assert isinstance(again, BatchReady)
    assert (again.step, [ref.group_id for ref in again.groups]) == (0, [1, 2])
    assert [(task.group_id, task.attempt, task.carried) for task in asked][-1] == (0, 1, ())
