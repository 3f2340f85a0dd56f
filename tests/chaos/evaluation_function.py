"""An evaluation function that leaves out half of the prompts, and waits in the middle until a file exists."""

import os
from pathlib import Path
from typing import Any, Final

import anyio

GATE: Final = "PHYSARUM_TEST_GATE"  # environment variable with the path of the file
LIMIT_S: Final = 200.0
LOOK_S: Final = 0.05  # seconds between two checks for the file


def halves(gate: Path) -> Path:
    """The file with a line for each start of the function that reached its middle: train step, process id."""
    return gate.with_name("halves")


async def half_of_them(evaluation: Any) -> None:
    """Ask every second prompt once, and then again those of the first half."""
    asked = range(0, len(evaluation.prompts), 2)
    async with anyio.create_task_group() as tasks:
        for item in asked:
            tasks.start_soon(evaluation.sample, item)
    gate = Path(os.environ[GATE])
    with halves(gate).open("a") as file:
        file.write(f"{evaluation.step} {os.getpid()}\n")
    with anyio.fail_after(LIMIT_S):
        while not await anyio.Path(gate).exists():  # noqa: ASYNC110 - another process makes the file
            await anyio.sleep(LOOK_S)
    for item in asked[: len(asked) // 2]:
        await evaluation.sample(item)
