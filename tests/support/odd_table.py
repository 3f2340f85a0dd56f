"""Runs the table of unusual answers on one engine: all rows at once, among requests with normal answers."""

from pathlib import Path
from typing import Any, Final

import anyio

from actors.rollout.requests.watching import TokenTimeouts
from tests.support.behind_proxies import LONG, SHORT, behind_proxies, outcome, request
from tests.support.odd_answers import CASES
from tests.support.spoiling_proxy import Case

NUM_GOOD: Final = 60  # requests with normal answers, sent among the others
SPREAD_S: Final = 5.0  # seconds over which they are sent


def first_try_of_each_row(body: dict[str, Any]) -> Case | None:
    """Choose the row for the first try of a request."""
    how, _, rest = body["rid"].partition(".")
    if how not in ("streamed", "whole") or not body["rid"].endswith("-0"):
        return None
    return CASES[int(rest.partition("-")[0])]


async def check_every_row(
    engine: str, router: str | None, model: Path, *, limits: TokenTimeouts, limit_s: float, weights: Path | None = None
) -> None:
    """Corrupt the first try of a request for each row, streamed and whole. Each must end with the engine's answer.

    Args:
        engine: URL of the engine.
        router: URL of a router without engines. None: the actor chooses the engines.
        model: Directory of the served model.
        limits: Limits of the watchdog.
        limit_s: Seconds for one request.
        weights: Directory of the model's weights. None: the model directory.
    """
    found: dict[str, str] = {}
    async with (
        behind_proxies([engine], router, model, [first_try_of_each_row], limits=limits, weights=weights) as behind,
        anyio.create_task_group() as group,
    ):

        async def ask(name: str, rid: str, streamed: bool) -> None:
            asked = request(rid, LONG if streamed else SHORT, members=1 if streamed else 3, streamed=streamed)
            found[name] = await outcome(behind, asked, limit_s=limit_s)

        for index, case in enumerate(CASES):
            if case.streamed:
                group.start_soon(ask, f"{case.name}, streamed", f"streamed.{index}-0-1", True)
            if case.whole:
                group.start_soon(ask, f"{case.name}, whole", f"whole.{index}-0-1", False)
        for number in range(NUM_GOOD):
            group.start_soon(ask, f"good {number}", f"good.{number}-0-1", number % 2 == 0)
            await anyio.sleep(SPREAD_S / NUM_GOOD)
    assert set(behind.proxies[0].spoiled) == {case.name for case in CASES}
    wrong = [f"{name}: {came}" for name, came in found.items() if came != "good"]
    assert not wrong, "\n".join(wrong)
