"""A halt that is refused says why: the run is over, or its directory cannot be read."""

from pathlib import Path

import pytest

from runtime.bus.bus import Bus
from runtime.node.halting import NotHalted, halt_round
from runtime.node.reopen import FoundRun
from tests.fixtures.nats import NatsServer

pytestmark = pytest.mark.anyio


@pytest.fixture
def run(nats_server: NatsServer, run_name: str, tmp_path: Path) -> FoundRun:
    """A run on an external server."""
    return FoundRun(name=run_name, directory=tmp_path, bus_url=nats_server.url)


async def test_a_run_without_a_buffer_may_be_over(bus: Bus, run: FoundRun) -> None:
    with pytest.raises(NotHalted, match=r"does not run: the run is over, or it restarts \(try again\)"):
        await halt_round(run)


@pytest.mark.parametrize("name", ["bus.url", "bus/certificate.pem", "agent.lock"])
async def test_a_file_that_cannot_be_read_is_named(run: FoundRun, name: str) -> None:
    unreadable = run.directory / name
    unreadable.mkdir(parents=True)  # a reader gets an OSError, also if it is root
    with pytest.raises(NotHalted, match=rf"only a user who may read the login .*{name}"):
        await halt_round(run)
