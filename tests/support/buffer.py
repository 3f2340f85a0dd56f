"""A buffer on a real bus, for tests that play its other actors."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from actors.registry import hosted
from messages import (
    GroupCompleted,
    Outcome,
    SampleStatus,
    SampleSummary,
    VerdictGiven,
)
from runtime.bus.bus import Bus
from runtime.process.hosting import host
from runtime.settings.topology import Topology
from tests.build.topology import topology_with

MODEL = Path(__file__).resolve().parents[2] / "topologies/demo/models/reverse-digits"


def small_topology(tmp_path: Path) -> Topology:
    """Three steps of two groups with two samples, on ten prompts."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": str(number), "label": "1"}) + "\n" for number in range(10)))
    data = [{"name": "d", "path": str(path), "rm_type": "exact_match"}]
    rollout = {"dynamic_filter": "nonzero_std"}  # `complete` gives its verdicts
    return topology_with(model={"hf_checkpoint": str(MODEL)}, data=data, rollout=rollout)


@asynccontextmanager
async def buffer(bus: Bus, topology: Topology) -> AsyncGenerator[None]:
    """A buffer at work."""
    async with anyio.create_task_group() as group:
        group.start_soon(host, bus, [hosted("buffer", topology, Path())])
        yield
        group.cancel_scope.cancel()


async def put_raw(bus: Bus, subject: str, payload: bytes = b"{") -> None:
    """Store what no codec wrote."""
    await bus._store.put(subject, payload, {})


async def complete(bus: Bus, group_id: int, attempt: int = 0) -> None:
    """What rollout and filter say of a group that is kept."""
    samples = tuple(SampleSummary(index=index, status=SampleStatus.COMPLETED, reward=1.0) for index in range(2))
    done: dict[str, Any] = {"lease": "l", "round": 0, "instance": "rollout", "data": "d", "samples": samples}
    seq = await bus.publish(GroupCompleted(group_id=group_id, attempt=attempt, **done))
    await bus.publish(VerdictGiven(group_id=group_id, attempt=attempt, event_seq=seq, outcome=Outcome.KEEP))
