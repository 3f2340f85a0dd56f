"""What answers /metrics: the facts of the machine at once, and the run's numbers once the whole log is read."""

import os
import re
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import anyio
import pytest

from actors.observer.exporter import PROCESS_VARIABLE, Exporter, follow, served, use_of_processes
from actors.observer.observed import Observed
from runtime.node.reopen import FoundRun
from tests.bin.test_ledger import RUN, make
from tests.support.log_of_a_run import LOG

pytestmark = pytest.mark.anyio

OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}


@asynccontextmanager
async def scraped(exporter: Exporter) -> AsyncGenerator[aiohttp.ClientSession]:
    async with (
        served(exporter, "127.0.0.1", 0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
    ):
        yield client


async def test_numbers_of_the_run_are_left_out_until_its_whole_log_is_read(tmp_path: Path) -> None:
    run_dir = await make(tmp_path / RUN)
    observed = Observed(RUN, 2)
    exporter = Exporter(RUN, "n0", run_dir, observed)
    async with scraped(exporter) as client:
        early = await (await client.get("/metrics")).text()
        assert f'physarum_exporter_caught_up{{run="{RUN}"}} 0.0\n' in early
        assert "physarum_train_steps" not in early
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow, FoundRun(name=RUN, directory=run_dir), observed, exporter)
            with anyio.fail_after(200):
                while f'physarum_exporter_caught_up{{run="{RUN}"}} 1.0\n' not in early:
                    early = await (await client.get("/metrics")).text()
            tasks.cancel_scope.cancel()
        assert f'physarum_train_steps_total{{run="{RUN}"}} 2.0\n' in early
        assert f'physarum_log_sequence{{run="{RUN}"}} {len(LOG)}.0\n' in early


async def test_a_node_without_the_log_tells_the_facts_of_its_machine_in_both_formats(tmp_path: Path) -> None:
    async with scraped(Exporter(RUN, "n1", tmp_path, None)) as client:
        plain = await client.get("/metrics")
        assert plain.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        open_metrics = await client.get("/metrics", headers=OPENMETRICS)
        assert open_metrics.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        text = await open_metrics.text()
        assert text.endswith("# EOF\n")
        assert (await client.get("/")).status == 404
        assert (await client.post("/metrics")).status == 405
    found = re.search(rf'physarum_node_memory_bytes{{run="{RUN}",node="n1",kind="total"}} (\S+)', text)
    assert found is not None
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    assert float(found[1]) == pytest.approx(pages * page_bytes, rel=0.01)
    assert "physarum_train_steps" not in text


async def test_a_disk_that_cannot_be_asked_costs_the_facts_alone(tmp_path: Path) -> None:
    exporter = Exporter(RUN, "n0", tmp_path / "gone", Observed(RUN))
    async with scraped(exporter) as client:
        answer = await client.get("/metrics")
        assert (answer.status, "physarum_node" in await answer.text()) == (200, False)


BUSY = "import time\nwhile time.process_time() < 0.5: pass"
PARENT = (
    f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}])\nprint('ended', flush=True)\ninput()"
)


def test_cpu_time_of_a_child_that_ended_still_counts() -> None:
    """It used half a second. The kernel counts in ticks, and cuts the last of each kind of time."""
    environment = {**os.environ, PROCESS_VARIABLE: "reward.0"}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ended\n"
        _, seconds = use_of_processes(os.getpid())
        process.communicate("\n")
    assert seconds["reward.0"] > 0.25  # the parent alone uses less than a tenth
