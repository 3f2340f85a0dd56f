"""Writes the prompts of recipes/sums.toml below topologies/: sums of two small numbers."""

import hashlib
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
NUM_HELD_OUT = 100
FIRST, SECOND = 40, 20  # the first number is below 40, the second below 20


def files() -> dict[str, str]:
    """Text of every file, by its path below topologies/demo."""
    tasks = {f"{a} + {b}": str(a + b) for a in range(FIRST) for b in range(SECOND)}
    mixed = sorted(tasks, key=lambda task: hashlib.sha256(task.encode()).hexdigest())
    parts = {"eval": mixed[:NUM_HELD_OUT], "train": mixed[NUM_HELD_OUT:]}
    return {
        f"data/sums/{name}.jsonl": "".join(
            json.dumps({"input": f"What is {task}? Answer with the number only.", "label": tasks[task]}) + "\n"
            for task in part
        )
        for name, part in parts.items()
    }


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / name).parent.mkdir(parents=True, exist_ok=True)
        (HERE / name).write_text(text, encoding="utf-8")
