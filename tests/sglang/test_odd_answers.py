"""Unusual answers (tests/support/odd_answers.py) of SGLang's own server behind a proxy that spoils them."""

from pathlib import Path
from typing import Final

import anyio
import pytest

from actors.rollout.requests.watching import TokenTimeouts
from tests.sglang.router import Router
from tests.sglang.server import TP1, Servers
from tests.support.odd_table import check_every_row

pytestmark = [pytest.mark.anyio, pytest.mark.nightly, pytest.mark.timeout(1800)]

LIMIT_S: Final = 400.0  # six requests run at a time
PATIENCE: Final = TokenTimeouts(first_s=20.0, next_s=20.0)


async def test_no_unusual_answer_of_sglang_is_believed_and_each_request_is_answered_in_the_end(
    servers: Servers, session_router: Router, contract_model: Path, weights: dict[int, Path]
) -> None:
    server = await anyio.to_thread.run_sync(servers.get, TP1)
    await check_every_row(
        server.url, session_router.url, contract_model, limits=PATIENCE, limit_s=LIMIT_S, weights=weights[1]
    )
