"""What a grader process answers, in runtime/functions/worker.py. Imports little, since a killed one is replaced."""

import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from actors.reward.graders.calling import (
    Call,
    grade_group,
    grade_sample,
    grade_together,
    is_async,
    resolve_grader,
)
from actors.reward.grades import GATHER_S, Grade, Graded, GraderSpec, Hello, encoded_grades, gathers
from runtime.functions.answers import Answers
from runtime.functions.limits import CpuLimit

if TYPE_CHECKING:
    import asyncio

GRADE = msgspec.msgpack.Decoder(Grade)
CPU_KEY = "reward.cpu_s"


class Waiter:
    """Runs awaitables in one event loop, created on first use because most graders are plain functions."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def __call__(self, awaitable: Awaitable[Any]) -> Any:
        import asyncio  # takes as long to import as everything else here

        async def wait() -> Any:
            return await awaitable

        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(wait())


class Graders:
    """Grades the samples of calls with the graders of this process."""

    def __init__(self, hello: Hello) -> None:
        self._hello = hello
        self._base_dirs = [Path(base) for base in hello.base_dirs]
        self._graders: dict[GraderSpec, Call] = {}
        self._wait = Waiter()
        self._begin_call = _unlimited if hello.cpu_s is None else CpuLimit(hello.cpu_s, CPU_KEY).begin

    def answer(self, payload: bytes) -> Iterator[bytes]:
        """Grade samples and yield their grades: those of a user's function one by one, since it may end this process.

        Grades of a built-in grader are yielded together, but no later than GATHER_S after the first of them was begun.
        """
        grade = GRADE.decode(payload)
        try:
            grader = self.grader(grade.grader)
        except ValueError as error:
            yield encoded_grades(_refused(error, grade))
            return
        reward_key = self._hello.reward_key
        if grade.grader.group:
            self._begin_call()
            yield encoded_grades(grade_group(grader, grade.samples, reward_key=reward_key, wait=self._wait))
            return
        gathered, until = list[Graded](), 0.0
        gather_s = GATHER_S if gathers(grade.grader) else 0.0
        for sample in grade.samples:
            if not gathered:
                self._begin_call()
                until = time.monotonic() + gather_s
            gathered.append(grade_sample(grader, sample, reward_key=reward_key, wait=self._wait))
            if time.monotonic() >= until:
                yield encoded_grades(gathered)
                gathered.clear()
        if gathered:
            yield encoded_grades(gathered)

    async def answer_together(self, payload: bytes) -> bytes:
        """Grade samples by an async function while other calls run."""
        grade = GRADE.decode(payload)
        try:
            grader = self.grader(grade.grader)
        except ValueError as error:
            return encoded_grades(_refused(error, grade))
        group, reward_key = grade.grader.group, self._hello.reward_key
        return encoded_grades(await grade_together(grader, grade.samples, group=group, reward_key=reward_key))

    def grader(self, spec: GraderSpec) -> Call:
        """The function of a grader.

        Raises:
            ValueError: it cannot be used.
        """
        grader = self._graders.get(spec)
        if grader is None:
            grader = self._graders[spec] = resolve_grader(spec, self._base_dirs)
        return grader


def answering(hello: bytes) -> Answers:
    """Load the graders that a Hello names. The process then names those that are async functions.

    Raises:
        ValueError: a grader cannot be used.
    """
    given = msgspec.msgpack.decode(hello, type=Hello)
    graders = Graders(given)
    found = tuple(spec for spec in given.graders if is_async(graders.grader(spec)))
    return Answers(graders.answer, msgspec.msgpack.encode(found), graders.answer_together if given.together else None)


def _refused(error: ValueError, grade: Grade) -> list[Graded]:
    return [Graded(error=str(error), cause="refused") for _ in grade.samples]


def _unlimited() -> None:
    """Begin a call whose CPU time is not limited."""
