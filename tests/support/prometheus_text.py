"""Metrics as Prometheus's own client library reads them, which is installed for the tests that ask for it."""

import importlib
import sys
from collections import Counter
from functools import cache
from typing import Any, Final

import aiohttp

from runtime.node.supervisor.ports import free_port
from tests.support.extra_packages import installed

OPENMETRICS: Final = {"Accept": "application/openmetrics-text; version=1.0.0"}
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]  # values by name and labels


@cache
def _parsers() -> tuple[Any, Any]:
    sys.path.append(str(installed("prometheus", "prometheus-client==0.26.0")))
    names = ("prometheus_client.openmetrics.parser", "prometheus_client.parser")
    return tuple(importlib.import_module(name).text_string_to_metric_families for name in names)  # pyright: ignore[reportReturnType]


def parsed(text: str, *, openmetrics: bool) -> Series:
    """Parse a text strictly. No series may be in it twice."""
    parse = _parsers()[0 if openmetrics else 1]
    samples = [sample for family in parse(text) for sample in family.samples]
    keys = [(sample.name, frozenset(sample.labels.items())) for sample in samples]
    assert max(Counter(keys).values()) == 1
    return dict(zip(keys, (sample.value for sample in samples), strict=True))


async def scrape(address: str) -> Series:
    """Scrape an address in both formats; both have the same series. {} while nothing answers."""
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as client:
            url = f"http://{address}/metrics"
            plain = await (await client.get(url)).text()
            open_metrics = await (await client.get(url, headers=OPENMETRICS)).text()
    except (aiohttp.ClientError, TimeoutError):
        return {}
    found = parsed(open_metrics, openmetrics=True)
    assert {name for name, _ in parsed(plain, openmetrics=False)} <= {name for name, _ in found}
    return found


def value(series: Series, name: str, **labels: str) -> float:
    """Return the sum of the series of a name with these labels among others."""
    wanted = set(labels.items())
    return sum(number for (known, its), number in series.items() if known == f"physarum_{name}" and wanted <= its)


def free_address() -> str:
    """Return a loopback address with a free port that the kernel gives to no connection."""
    return f"127.0.0.1:{free_port()}"
