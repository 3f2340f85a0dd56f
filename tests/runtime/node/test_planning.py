"""What a node daemon starts, from the topology."""

from pathlib import Path

import pytest

from runtime.bus.nats.server import render_config
from runtime.node import planning
from tests.build.topology import topology_with


@pytest.mark.parametrize(
    ("table", "line"), [({}, 'sync_interval: "10s"'), ({"sync": "always"}, 'sync_interval: "always"')]
)
def test_the_runs_own_server_syncs_as_the_topology_says(tmp_path: Path, table: dict[str, str], line: str) -> None:
    server = planning._server(topology_with(bus=table), tmp_path, None)
    assert line in render_config(server)
