"""Makes and scores tasks of reasoning-gym. Runs in an interpreter of its own, so it imports nothing of ours.

It reads a JSON object per line from standard input and answers with one per line, until its input ends. A request that
takes longer than its `timeout_s` ends the process.
"""

import importlib
import json
import os
import signal
import sys
from typing import Any


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    gym: Any = importlib.import_module("reasoning_gym")
    dataset = gym.create_dataset(request["task"], seed=request["seed"], size=1, **request["config"])
    entry = dataset[0]
    if "answer" in request:
        return {"score": float(dataset.score_answer(request["answer"], entry))}
    return {"question": str(entry["question"]), "answer": None if entry["answer"] is None else str(entry["answer"])}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a task prints goes to standard error
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])  # SIGALRM ends a process that does not handle it
        try:
            answer = _answer(request)
        except Exception as error:  # noqa: BLE001 - a task may raise anything; the caller reports it
            answer = {"error": f"{type(error).__name__}: {error}"[:500], "missing": getattr(error, "name", None)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
