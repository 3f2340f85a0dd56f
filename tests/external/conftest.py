"""The server of a run, for programs that hold a credential alone."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.support.external import RunServer, run_server_in


@pytest.fixture
async def run_server(tmp_path: Path) -> AsyncGenerator[RunServer]:
    """The server of a run without actors."""
    async with run_server_in(tmp_path) as run:
        yield run
