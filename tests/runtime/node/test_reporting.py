"""Reporting on a run whose archive is damaged."""

import gzip
import time
from pathlib import Path

import anyio
import pytest

from messages import Plane
from runtime.bus.bus import Bus
from runtime.ledger.archive import archive
from runtime.node.node_plan import NodePlan
from runtime.node.reporting import Reporting
from tests.fixtures.nats import group_failed

pytestmark = pytest.mark.anyio


async def test_a_torn_line_of_the_archive_is_said_and_what_follows_is_shown(bus: Bus, tmp_path: Path) -> None:
    for number in range(5):
        await bus.publish(group_failed(number, reason=f"reason {number}"))
    path, _ = await archive(bus, tmp_path, below_seq=4)
    await bus.purge(Plane.EVENT, below_seq=4)
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    path.write_bytes(gzip.compress(lines[0] + lines[1][:30] + b"\n" + lines[2]))
    shown: list[str] = []
    plan = NodePlan(
        run=bus.run, node="local", run_dir=tmp_path, incarnation=1, num_steps=1, started=time.time() - 60, processes=()
    )
    reporting = Reporting(plan, show=shown.append, rewrite=None)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks, bus.read() as events:
            tasks.start_soon(reporting.display.run)
            tasks.start_soon(reporting.run, bus)
            async for received in events.so_far():
                await reporting.take(received)
            await reporting.finish()
            reporting.close()
            await reporting.display.close()
    assert any(f"{path.name}, at line 2: " in line and "newest snapshot" in line for line in shown)
    assert shown[-2:] == ["group failed: reason 3", "group failed: reason 4"]
