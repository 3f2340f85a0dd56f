"""Calls of graders: those that a pool has in hand, what is sent of them, their limits, tries and sums."""

from array import array
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
import msgspec

from actors.reward.causes import Cause, late
from actors.reward.grades import GRADES, Grade, Graded, GraderSpec, unpacked
from actors.reward.samples import GradedSample
from runtime.functions.frames import LATE, RAISED, STUCK, FrameError
from runtime.util.retrying import Backoff
from runtime.util.rewards import reward_problem

PAUSES: Final = Backoff(first_s=0.2, max_s=5.0)  # between the grades of one sample

GradeBy = Callable[[str], Awaitable[Sequence[Graded]]]
GradeAll = Callable[[Sequence[GradedSample]], Awaitable[list[Graded]]]


class RateLimit:
    """Spreads calls evenly over time."""

    def __init__(self, per_s: float) -> None:
        """Start with calls allowed.

        Args:
            per_s: calls that may start per second.
        """
        self._interval_s = 1 / per_s
        self._next_at = 0.0  # loop time

    async def wait(self) -> None:
        """Wait for the turn of one call. Turns are given in the order of the callers."""
        now = anyio.current_time()
        turn = max(now, self._next_at)
        self._next_at = turn + self._interval_s
        if turn > now:
            await anyio.sleep(turn - now)


@dataclass(frozen=True, kw_only=True)
class CallLimits:
    """Limits of the calls of one grader."""

    timeout_s: float = 10.0  # per call, from the moment it may start
    rate: RateLimit | None = None


@dataclass(eq=False, kw_only=True)
class Grading:
    """One call of a grader, and the samples that it grades: a single one, a whole group, or a batch."""

    grader: GraderSpec
    samples: tuple[GradedSample, ...]
    timeout_s: float
    num_tries: int = 0  # processes that ended because of it
    abandoned: bool = False  # the caller no longer waits
    splits: bool = False  # if the call fails, its samples are graded again in smaller batches
    alone: bool = False  # it is sent without others: one of several ended a process
    grades: list[Graded] = field(default_factory=list[Graded])
    is_done: bool = False
    _waiting: anyio.Event | None = None  # made only if it is needed: most calls end before the wait for them

    async def wait(self) -> None:
        """Wait for the grades."""
        if not self.is_done:
            self._waiting = self._waiting or anyio.Event()
            await self._waiting.wait()

    def finish(self, grades: Sequence[Graded]) -> None:
        """Set the grades, one per sample."""
        self.grades, self.is_done = list(grades), True
        if self._waiting is not None:
            self._waiting.set()

    def payload(self) -> bytes:
        """Return what a process gets."""
        return msgspec.msgpack.encode(Grade(grader=self.grader, samples=self.samples))

    def end(self, kind: bytes, content: bytes) -> None:
        """Set the grades that a process answers, or an error in place of each.

        Args:
            kind: first byte of the answer's frame, as in runtime/functions/frames.py.
            content: the rest.

        Raises:
            ValueError: these are no grades.
        """
        if kind in (LATE, STUCK):
            self.fail(late(self.timeout_s), "timeout")
        elif kind == RAISED:  # it was cancelled by its own function
            self.fail(f"raised {content.decode(errors='replace').partition(chr(0))[0]}", "raised")
        elif len(grades := GRADES.decode(content)) == len(self.samples):
            self.finish(grades)
        else:
            raise ValueError(f"{len(grades)} grades of {len(self.samples)} samples")

    def refuse(self, error: FrameError) -> None:
        """Set an error, for a call that is too large to be sent."""
        self.fail(f"too large for a grader process: {error}", "refused")

    def fail(self, reason: str, cause: Cause) -> None:
        """Set an error in place of each grade."""
        final = cause == "sandbox_lost"  # the pool has replaced the process `max_tries` times
        self.finish([Graded(error=reason, cause=cause, of_call=True, final=final) for _ in self.samples])


async def graded_again(
    grade: GradeAll,
    samples: Sequence[GradedSample],
    *,
    causes: Collection[Cause],
    max_tries: int,
    max_wait_s: float,
    group: bool,
) -> list[Graded]:
    """Grade samples, and those again whose score failed for one of these causes and is not final.

    Args:
        grade: grades samples in order.
        samples: the samples of a request.
        causes: causes after which a sample is graded again.
        max_tries: number of times that a sample is graded at most.
        max_wait_s: longest wait for a server that said when it wants the next request.
        group: whether one call grades all samples; then all are graded again.

    Returns:
        The last grade of each sample, in order.
    """
    grades = await grade(samples)
    for num_tries in range(1, max_tries):
        places = [place for place, graded in enumerate(grades) if graded.cause in causes and not graded.final]
        if not places:
            break
        wanted_s = min(max_wait_s, max(grades[place].wait_s for place in places))
        places = list(range(len(samples))) if group else places
        await anyio.sleep(max(wanted_s, PAUSES.pause_s(num_tries)))
        again = await grade([samples[place] for place in places])
        for place, graded in zip(places, again, strict=True):
            grades[place] = graded
    return grades


async def summed(name: str, weights: Mapping[str, float], grade_by: GradeBy) -> list[Graded]:
    """Grade the same samples by all parts of a sum, which run together; return one grade per sample, in order.

    Args:
        name: name of the sum.
        weights: weight of each part, by the name of its grader; at least one.
        grade_by: grades the samples by the grader of this name, in their order.
    """
    grades: dict[str, Sequence[Graded]] = {}

    async def grade(part: str) -> None:
        grades[part] = await grade_by(part)

    async with anyio.create_task_group() as parts:
        for part in weights:
            parts.start_soon(grade, part)
    of_samples = zip(*(grades[part] for part in weights), strict=True)
    return [sum_of(name, weights, dict(zip(weights, of_sample, strict=True))) for of_sample in of_samples]


def sum_of(name: str, weights: Mapping[str, float], parts: Mapping[str, Graded]) -> Graded:
    """Return the weighted sum of the rewards of one sample. A failed part fails the sum with its cause.

    If several parts failed, the first one in the order of the weights gives the error and the cause.

    Args:
        name: name of the sum.
        weights: weight of each part, by name.
        parts: grade of each part, by name.

    Returns:
        The grade. Its details hold the reward of each part by name, and the details of a part as "part.key".
    """
    details: dict[str, Any] = {part: parts[part].reward for part in weights if parts[part].error is None}
    details |= {f"{part}.{key}": value for part in weights for key, value in (parts[part].details or {}).items()}
    took_s = sum(graded.took_s for graded in parts.values())
    for part in weights:
        if (error := parts[part].error) is not None:
            error = f"{error} (part {part} of reward.sums.{name})"
            return Graded(error=error, cause=parts[part].cause, details=details, took_s=took_s)
    reward = sum(weight * (parts[part].reward or 0.0) for part, weight in weights.items())
    if (problem := reward_problem(reward)) is not None:
        return Graded(
            error=f"reward.sums.{name} is {reward}, {problem}", cause="bad_answer", details=details, took_s=took_s
        )
    return Graded(reward=reward, details=details, took_s=took_s, token_rewards=_summed_tokens(weights, parts))


def _summed_tokens(weights: Mapping[str, float], parts: Mapping[str, Graded]) -> bytes | None:
    """Return the weighted sum of the parts' rewards per token. A part with one reward has it at the last token."""
    lists = {part: unpacked(found) for part in weights if (found := parts[part].token_rewards) is not None}
    size = max(map(len, lists.values()), default=0)
    if not size:
        return None
    total = array("f", bytes(4 * size))
    for part, weight in weights.items():
        if part in lists:
            total = array("f", (before + weight * reward for before, reward in zip(total, lists[part], strict=True)))
        else:
            total[-1] += weight * (parts[part].reward or 0.0)
    return total.tobytes()
