"""User generate function that blocks half of an evaluation's items until a file exists."""

import json
import os
from pathlib import Path
from typing import Any, Final

import anyio

GATE: Final = "PHYSARUM_TEST_GATE"  # environment variable with the path of the file
LIMIT_S: Final = 200.0
LOOK_S: Final = 0.05  # seconds between two checks for the file
ITEMS: Final = Path(__file__).parents[2] / "topologies" / "demo" / "data" / "reverse-digits" / "eval.jsonl"
LABELS: Final = [str(json.loads(line)["label"]) for line in ITEMS.read_text().splitlines()]
GATED: Final = frozenset(LABELS[::2])  # none of these labels occurs in the training data


async def at_the_gate(conversation: Any) -> None:
    """Generate one turn of the model, after the gate opens for a gated item."""
    if conversation.label in GATED:
        gate = anyio.Path(os.environ[GATE])
        with anyio.fail_after(LIMIT_S):
            while not await gate.exists():  # noqa: ASYNC110 - another process makes the file
                await anyio.sleep(LOOK_S)
    await conversation.generate()
