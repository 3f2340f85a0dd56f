"""Makes and scores tasks of reasoning-gym. Runs in an interpreter of its own, so it imports no module of this project.

It writes an empty JSON object once it has imported the package, or the reason why it cannot. Then it reads a JSON
object per line from standard input and answers with one per line, until its input ends. A request that takes longer
than its `timeout_s` ends the process.
"""

import importlib
import json
import os
import signal
import sys
from typing import Any


def _answer(gym: Any, request: dict[str, Any]) -> dict[str, Any]:
    dataset = gym.create_dataset(request["task"], seed=request["seed"], size=1, **request["config"])
    entry = dataset[0]
    if "answer" in request:
        return {"score": float(dataset.score_answer(request["answer"], entry))}
    return {"question": str(entry["question"]), "answer": None if entry["answer"] is None else str(entry["answer"])}


def _problem(error: Exception) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}"[:500], "missing": getattr(error, "name", None)}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a task prints goes to standard error

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        gym = importlib.import_module("reasoning_gym")
    except Exception as error:  # noqa: BLE001 - the caller reports it
        return say(_problem(error))
    say({})
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])  # SIGALRM ends a process that does not handle it
        try:
            answer = _answer(gym, request)
        except Exception as error:  # noqa: BLE001 - a task may raise anything; the caller reports it
            answer = _problem(error)
        signal.setitimer(signal.ITIMER_REAL, 0)
        say(answer)
    return None


if __name__ == "__main__":
    main()
