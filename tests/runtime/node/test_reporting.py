"""Reporting on a run whose archive is damaged, and on one that ends while many events are queued."""

import gzip
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from messages import Plane
from runtime.bus.bus import Bus
from runtime.ledger.archive import archive
from runtime.node import reporting as reporting_module
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
    shown = await shown_of(bus, tmp_path)
    assert any(f"{path.name}, at line 2: " in line and "newest snapshot" in line for line in shown)
    assert shown[-2:] == ["group failed: reason 3", "group failed: reason 4"]


async def shown_of(bus: Bus, run_dir: Path) -> list[str]:
    """What reporting shows of the log so far, ended after its last event."""
    started, shown = time.time() - 60, list[str]()
    plan = NodePlan(
        run=bus.run, node="local", run_dir=run_dir, incarnation=1, num_steps=1, started=started, processes=()
    )
    reporting = Reporting(plan, show=shown.append, rewrite=None)
    with anyio.fail_after(200):
        async with anyio.create_task_group() as tasks, bus.read() as events:
            tasks.start_soon(reporting.display.run)
            tasks.start_soon(reporting.run, bus)
            async for received in events.so_far():
                await reporting.take(received)
            await reporting.finish()
            reporting.close()
            await reporting.display.close()
            tasks.cancel_scope.cancel()  # an event that takes too long
    return shown


@pytest.mark.parametrize(("each_s", "num_shown"), [(0.12, 20), (30.0, 0)], ids=["slow", "stuck"])
async def test_at_the_end_queued_events_are_shown_unless_one_takes_too_long(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each_s: float, num_shown: int
) -> None:
    show = Reporting._show

    async def show_slowly(reporting: Reporting, *args: Any, **options: Any) -> None:
        await anyio.sleep(each_s)
        await show(reporting, *args, **options)

    monkeypatch.setattr(Reporting, "_show", show_slowly)
    monkeypatch.setattr(reporting_module, "FINISH_TIMEOUT_S", 2.0)  # for one event, not for twenty
    for number in range(20):
        await bus.publish(group_failed(number, reason=f"reason {number}"))
    shown = await shown_of(bus, tmp_path)
    assert len([line for line in shown if line.startswith("group failed")]) == num_shown
