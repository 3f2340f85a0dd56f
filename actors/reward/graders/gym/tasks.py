"""Tasks of reasoning-gym as rows without end, and the grader of their answers."""

import hashlib
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final

from actors.reward.graders.responses import after_thought
from actors.reward.samples import GradedSample

WORKER: Final = Path(__file__).with_name("worker.py")
ASK: Final = "Give the final answer between <answer> and </answer>."
MAX_ANSWER_BYTES: Final = 4 << 20
IMPORT_S: Final = 300.0  # for the process to start and to import reasoning-gym
MORE_S: Final = 20.0  # for an answer, beyond the time after which the process ends itself
EXTRA: Final = 'pip install "physarum[gym]"'
_ANSWER: Final = re.compile(r"<answer>(.*?)</answer>", re.S)


class GymError(Exception):
    """A task could not be made or scored."""


class Gym:
    """Tasks of reasoning-gym, each a pure function of the seed and the number of its prompt.

    `row` is a data function (`data.source`), `grade` the grader of its rows (`data.rm_type`). Both ask a process of the
    interpreter `python`, which starts with this object, so that the first score need not wait for its import.
    """

    def __init__(
        self,
        tasks: Mapping[str, Mapping[str, Any]],
        *,
        seed: int = 0,
        python: str | Path = sys.executable,
        ask: str = ASK,
        timeout_s: float = 10.0,
        exact: bool = False,
    ) -> None:
        """Name the tasks.

        Args:
            tasks: The settings of each task by its name, as reasoning-gym documents them. `weight` says how often it is
                drawn, 1 by default.
            seed: Another seed gives other tasks.
            python: Interpreter that has reasoning-gym.
            ask: Text after each question. Without it the whole answer is scored, not the part between the tags.
            timeout_s: Seconds that making or scoring one task may take, without the import of reasoning-gym.
            exact: Whether only the full score of a task counts, as 1. By default each part of it does: more than half
                of the tasks give a wrong answer a part because it contains the label.

        Raises:
            ValueError: there is no task, or a weight is not positive.
        """
        self._configs = {name: {key: value for key, value in tasks[name].items() if key != "weight"} for name in tasks}
        self._weights = [float(config.get("weight", 1)) for config in tasks.values()]
        if not self._weights or not all(weight > 0 for weight in self._weights):
            raise ValueError(f"tasks must name at least one task, each with a positive weight, not {dict(tasks)!r}")
        self._seed = seed
        self._ask = ask
        self._timeout_s = timeout_s
        self._exact = exact
        self._worker = _Worker(str(python))
        self._worker.begin()

    def row(self, number: int) -> dict[str, Any]:
        """The row of prompt `number`: question, label and what `grade` needs."""
        digest = hashlib.sha256(f"{self._seed}\0{number}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big") >> 1
        (task,) = Random(digest).choices(list(self._configs), self._weights)
        made = self._request(task, seed)
        text = f"{made['question']}\n\n{self._ask}" if self._ask else made["question"]
        return {"input": text, "label": made["answer"], "metadata": {"task": task, "seed": seed}}

    def grade(self, sample: GradedSample) -> float:
        """Score a response by the task's own rule, from 0 to 1. Only what follows the last `</think>` counts.

        A wrong answer that contains the label earns a part in more than half of the tasks, but not with `exact`.
        """
        task, seed = sample.metadata["task"], sample.metadata["seed"]
        said = after_thought(sample.response)
        tagged = _ANSWER.findall(said)
        if not tagged and self._ask:
            return 0.0
        score = float(self._request(task, seed, answer=(tagged[-1] if tagged else said).strip())["score"])
        return float(score >= 1) if self._exact else score

    def close(self) -> None:
        """End the process. The next call starts another."""
        self._worker.end()

    def _request(self, task: str, seed: int, **more: Any) -> dict[str, Any]:
        if task not in self._configs:
            raise GymError(f"no task {task!r} here; there are: {', '.join(self._configs)}")
        request = {"task": task, "seed": seed, "config": self._configs[task], "timeout_s": self._timeout_s, **more}
        answer = self._worker.ask(request, self._timeout_s)
        if answer.get("missing") == "reasoning_gym":
            raise GymError(f"{self._worker.python} has no reasoning-gym: {EXTRA} in an environment of its own")
        if "error" in answer:
            raise GymError(f"the task {task} with {self._configs[task]}: {answer['error']}")
        return answer


def _environment() -> dict[str, str]:
    """Without our import path. Five tasks depend on the order of sets: with one hash seed it is always the same."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "PYTHONHASHSEED": "0"}


class _Worker:
    """The process of the other interpreter. It ends with its input, so with this process."""

    def __init__(self, python: str) -> None:
        self.python = python
        self._process: subprocess.Popen[bytes] | None = None
        self._has_imported = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Start the process, without waiting; the next request says why it cannot be started."""
        with self._lock, suppress(GymError):
            self._started()

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        with self._lock:
            process = self._started()
            try:
                if not self._has_imported:
                    if problem := self._line(process, IMPORT_S, "the import of reasoning-gym"):
                        self._end()
                        return problem
                    self._has_imported = True
                assert process.stdin is not None
                process.stdin.write(json.dumps(request).encode() + b"\n")
                return self._line(process, timeout_s + MORE_S, f"a task that takes over {timeout_s:g} s ends it")
            except (OSError, ValueError, TimeoutError) as error:
                self._end()
                raise GymError(f"the process of {self.python} gave no answer: {error}") from error

    def end(self) -> None:
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._has_imported = False
            try:
                self._process = subprocess.Popen(
                    [self.python, "-P", "-s", str(WORKER)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    bufsize=0,
                    env=_environment(),
                )
            except OSError as error:
                raise GymError(f"the interpreter {self.python} cannot be started: {error}") from error
        return self._process

    def _line(self, process: subprocess.Popen[bytes], limit_s: float, doing: str) -> dict[str, Any]:
        assert process.stdout is not None
        read, until = bytearray(), time.monotonic() + limit_s
        while not read.endswith(b"\n"):
            if not select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"nothing after {limit_s:g} s ({doing})")
            part = process.stdout.read(1 << 16)
            read += part
            if not part:
                raise OSError(f"it ended with code {process.wait(10)} ({doing})")
            if len(read) > MAX_ANSWER_BYTES:
                raise ValueError(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
        return json.loads(read)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None
