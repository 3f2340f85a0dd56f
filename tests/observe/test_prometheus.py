"""Debian's Prometheus and promtool: each expression of the dashboard and the alerts has a value on a real run.

They need the package prometheus of Debian; without it these tests say so.
"""

import json
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from tests.chaos.harness import Run
from tests.fixtures.nats import eventually
from tests.support.prometheus_text import free_address

SHIPPED = Path(__file__).parents[2] / "docs" / "run" / "prometheus"
MISSING = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.observe,
    pytest.mark.anyio,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"observe: not run here, because {', '.join(MISSING)} is missing: apt-get install prometheus",
    ),
]


def promtool(*arguments: str, cwd: Path) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_on_the_sick_run_of_its_kind_alone(tmp_path: Path) -> None:
    shutil.copy(SHIPPED / "alerts.yml", tmp_path)
    shutil.copy(Path(__file__).parent / "alerts_test.yml", tmp_path)
    promtool("check", "rules", "alerts.yml", cwd=tmp_path)
    promtool("test", "rules", "alerts_test.yml", cwd=tmp_path)


def expressions_of_alerts() -> Iterator[str]:
    """The expressions before their thresholds: an alert that does not fire has no series."""
    text = (SHIPPED / "alerts.yml").read_text()
    for found in re.finditer(r"expr: (?:>-\n)?((?:.|\n)*?)\n        (?=for|labels)", text):
        expression, number = re.subn(r" [<>] [0-9.]+$", "", " ".join(found[1].split()))
        assert number == 1
        yield expression


def expressions_of_the_dashboard() -> Iterator[str]:
    panels: list[dict[str, Any]] = json.loads((SHIPPED / "dashboard.json").read_text())["panels"]
    for panel in panels:
        for target in panel["targets"]:
            yield target["expr"].replace("$run", ".*")


@asynccontextmanager
async def prometheus(directory: Path, target: str) -> AsyncGenerator[str]:
    """Run Prometheus, which scrapes a target each second. Yield its address."""
    address = free_address()
    shutil.copy(SHIPPED / "alerts.yml", directory)
    (directory / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [alerts.yml]\n"
        f"scrape_configs: [{{job_name: physarum, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    promtool("check", "config", "prometheus.yml", cwd=directory)
    with (directory / "prometheus.log").open("wb") as log:
        process = await anyio.open_process(
            [
                "prometheus",
                "--config.file=prometheus.yml",
                f"--web.listen-address={address}",
                "--storage.tsdb.path=data",
            ],
            cwd=directory,
            stdout=log,
            stderr=log,
        )
        try:
            yield address
            assert process.returncode is None, (directory / "prometheus.log").read_text()
        finally:
            if process.returncode is None:
                process.kill()
            with anyio.CancelScope(shield=True):
                await process.aclose()


async def test_every_expression_has_a_series_while_prometheus_scrapes_a_run(tmp_path: Path) -> None:
    alerts, panels = list(expressions_of_alerts()), list(expressions_of_the_dashboard())
    assert len(alerts) == 6
    assert len(panels) > 20
    target = free_address()
    run = Run(tmp_path, num_steps=2_000, overrides=(f"observe.prometheus={target}",), paced=False)
    async with (
        run.started() as command,
        prometheus(tmp_path, target) as address,
        aiohttp.ClientSession(f"http://{address}") as client,
    ):

        async def value_of(expression: str) -> list[Any]:
            try:
                answer = await (await client.get("/api/v1/query", params={"query": expression})).json()
            except aiohttp.ClientError:  # it starts
                return []
            assert answer["status"] == "success", answer
            return answer["data"]["result"]

        async def all_have_one() -> bool:
            nonlocal left
            left = [expression for expression in left if not await value_of(expression)]
            return not left

        left = [*alerts, *panels]
        try:
            await eventually(all_have_one)
        except TimeoutError:
            pytest.fail(f"no series for {left}")
        assert await value_of('up{job="physarum"} == 1')
        (scraped,) = await value_of("scrape_duration_seconds")
        assert float(scraped["value"][1]) < 5
        command.send(signal.SIGINT)
        assert await command.end() == 130
