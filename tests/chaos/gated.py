"""A generate function of a user, which holds up an evaluation: half of its items wait until a file is there."""

import json
import os
from pathlib import Path
from typing import Any, Final

import anyio

GATE: Final = "PHYSARUM_TEST_GATE"  # environment variable: the file
LIMIT_S: Final = 200.0
LOOK_S: Final = 0.05  # between two looks
ITEMS: Final = Path(__file__).parents[2] / "topologies" / "demo" / "data" / "reverse-digits" / "eval.jsonl"
LABELS: Final = [str(json.loads(line)["label"]) for line in ITEMS.read_text().splitlines()]
GATED: Final = frozenset(LABELS[::2])  # no label of theirs is one of the data that trains


async def at_the_gate(conversation: Any) -> None:
    """One turn of the model."""
    if conversation.label in GATED:
        gate = anyio.Path(os.environ[GATE])
        with anyio.fail_after(LIMIT_S):
            while not await gate.exists():  # noqa: ASYNC110 - another process makes the file
                await anyio.sleep(LOOK_S)
    await conversation.generate()
