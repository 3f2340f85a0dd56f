"""Calls a grader, built-in or a user's, on a sample or a group, and converts its answer into grades."""

import inspect
import math
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from actors.reward.causes import cause_of, is_of_machine, retry_after_s
from actors.reward.grades import Graded, GraderSpec
from actors.reward.samples import GradedSample
from runtime.functions.load import find, is_plugin
from runtime.functions.table import GRADER, PARSER
from runtime.util.rewards import reward_problem
from runtime.util.tracebacks import shown_error, user_traceback

GRADER_KEY = "rm_type"  # names of settings in plug-in errors
PARSER_KEY = "parser"
MAX_REASON_CHARS = 500
MAX_DETAILS = 32
MAX_DETAIL_BYTES = 1024

Call = Callable[[Any], Any]
Wait = Callable[[Awaitable[Any]], Any]


def resolve_grader(spec: GraderSpec, base_dirs: Sequence[Path] = ()) -> Call:
    """Find the function of an rm_type or a parser; check that it takes a sample, or a list of samples of a group.

    Raises:
        ValueError: no built-in grader has this name; PluginError if a user's function cannot be used.
    """
    kind, key = (PARSER, PARSER_KEY) if spec.parses else (GRADER, GRADER_KEY)
    grader = find(kind, key, spec.name, base_dirs, several=spec.group)
    if is_plugin(spec.name):
        return grader
    if spec.group and is_async(grader):
        return lambda samples: _all_of(grader, samples)
    if spec.group:
        return lambda samples: [grader(sample) for sample in samples]
    return grader


async def _all_of(grader: Call, samples: Sequence[GradedSample]) -> list[Any]:
    """The answers of an async grader to the samples of a group, which it gets together."""
    import asyncio  # takes as long to import as everything else here

    return list(await asyncio.gather(*map(grader, samples)))


def grade_sample(grader: Call, sample: GradedSample, *, reward_key: str | None, wait: Wait) -> Graded:
    """Grade one sample. Any exception or invalid answer of the grader becomes an error in the grade.

    Args:
        grader: takes the sample; returns a number, a dict with `reward_key`, or an awaitable of one.
        sample: the sample to grade.
        reward_key: key of the reward in a dict answer.
        wait: runs an awaitable to its end.
    """
    start = time.perf_counter()
    answer, failure = _call(grader, sample, wait)
    graded = failure or grade_of(answer, reward_key, sample)
    return msgspec.structs.replace(graded, took_s=time.perf_counter() - start)


def grade_group(
    grader: Call, samples: Sequence[GradedSample], *, reward_key: str | None, wait: Wait
) -> tuple[Graded, ...]:
    """Grade all samples of a prompt group or a batch in one call; an invalid answer fails all of them.

    An exception in the list that the grader returns fails its sample alone.
    """
    start = time.perf_counter()
    answer, failure = _call(grader, list(samples), wait)
    return _grades_of(answer, failure, samples, reward_key, time.perf_counter() - start)


async def grade_together(
    grader: Call, samples: Sequence[GradedSample], *, group: bool, reward_key: str | None
) -> tuple[Graded, ...]:
    """Grade with an async function while other calls run: a sample, or all samples of a prompt group.

    Any exception or invalid answer becomes an error in the grades, as in `grade_sample` and `grade_group`.
    """
    from asyncio import CancelledError  # imported already where calls run together

    start = time.perf_counter()
    answer, failure = None, None
    try:
        answer = await grader(list(samples) if group else samples[0])
    except CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - a user's grader may raise anything; the sample fails
        failure = _raised(error)
    took_s = time.perf_counter() - start
    if group:
        return _grades_of(answer, failure, samples, reward_key, took_s)
    return (msgspec.structs.replace(failure or grade_of(answer, reward_key, samples[0]), took_s=took_s),)


def is_async(grader: Call) -> bool:
    """Whether a grader is an async function, or an object whose call is one."""
    return inspect.iscoroutinefunction(grader) or inspect.iscoroutinefunction(getattr(grader, "__call__", None))  # noqa: B004


def _grades_of(
    answer: Any, failure: Graded | None, samples: Sequence[GradedSample], reward_key: str | None, took_s: float
) -> tuple[Graded, ...]:
    """The grades of a group from one answer for all of its samples."""
    rewards, number = _as_list(answer), len(samples)
    if failure is None and rewards is None:
        failure = _bad(f"returned {_shown(answer)}, not a list of {number} rewards")
    elif failure is None and len(rewards or ()) != number:
        failure = _bad(f"returned {len(rewards or ())} rewards for {number} samples")
    took_s /= max(number, 1)
    if failure is not None or rewards is None:
        return (msgspec.structs.replace(failure or Graded(), took_s=took_s, of_call=True),) * number
    return tuple(
        msgspec.structs.replace(grade_of(reward, reward_key, sample), took_s=took_s)
        for reward, sample in zip(rewards, samples, strict=True)
    )


ANY_SAMPLE: Final = GradedSample()


def grade_of(answer: Any, reward_key: str | None, sample: GradedSample = ANY_SAMPLE) -> Graded:
    """Parse a grader's answer: a finite number, or a dict with one under `reward_key`.

    In place of the number it may be a list, if `sample.per` says what it is for.
    """
    if isinstance(answer, Exception):
        return _raised(answer)
    if not isinstance(answer, Mapping):
        return _grade_of_value(answer, None, sample)
    by_key = cast("Mapping[Any, Any]", answer)
    if reward_key is None:
        return _bad(f"returned {_shown(by_key)}; set reward_key to say which value is the reward")
    if reward_key not in by_key:
        keys = ", ".join(repr(key) for key in by_key)
        return _bad(f"the dict it returned has no {reward_key!r}, only {_cut(keys) or 'nothing'}")
    return _grade_of_value(by_key[reward_key], _plain(by_key), sample)


def _grade_of_value(value: Any, details: dict[str, Any] | None, sample: GradedSample) -> Graded:
    rewards = None if sample.per == "sample" else _as_list(value)
    if rewards is None:
        return _grade_of_number(value, details)
    number = sample.response_len if sample.per == "token" else len(sample.turns)
    if len(rewards) != number:
        return _bad(f"returned {len(rewards)} rewards for {number} {sample.per}s")
    try:
        numbers = array("d", rewards)
        found = array("f", numbers)
    except Exception as error:  # noqa: BLE001 - a third-party number type may raise anything
        return _bad(f"returned a list of rewards that are not all numbers: {_cut(str(error))}")
    for place, reward in enumerate(found):
        if (problem := reward_problem(reward)) is not None:
            return _bad(f"the reward of {sample.per} {place} is {_shown(rewards[place])}, {problem}")
    if sample.per == "turn":
        of_turns, found = found, array("f", bytes(4 * sample.response_len))
        for turn, reward in zip(sample.turns, of_turns, strict=True):
            found[turn.end - 1] += reward
    graded = _grade_of_number(math.fsum(numbers), details)
    return graded if graded.error is not None else msgspec.structs.replace(graded, token_rewards=found.tobytes())


def _grade_of_number(number: Any, details: dict[str, Any] | None) -> Graded:
    # NumPy and torch numbers are not int or float, but have __float__
    if number is None or isinstance(number, str | bytes) or not hasattr(number, "__float__"):
        hint = '; reward.per = "turn" or "token" allows a list' if _as_list(number) is not None else ""
        return _bad(f"returned {_shown(number)}, not a number{hint}")
    try:
        reward = float(number)
    except Exception as error:  # noqa: BLE001 - a third-party number type may raise anything
        return _bad(f"returned {_shown(number)}, which is not a single number: {error}")
    if (problem := reward_problem(reward)) is not None:
        return _bad(f"returned {reward}, {problem}")
    return Graded(reward=reward, details=details)


def _call(grader: Call, argument: Any, wait: Wait) -> tuple[Any, Graded | None]:
    """Call a grader; return its answer, or the grade of a call that raised."""
    try:
        answer = grader(argument)
        return (wait(answer) if inspect.isawaitable(answer) else answer), None
    except BaseException as error:  # noqa: BLE001 - a user's grader may raise anything; the sample fails
        return None, _raised(error)


def _raised(error: BaseException) -> Graded:
    trace = None if error.__traceback__ is None else user_traceback(error)
    return Graded(
        error=_cut(f"raised {shown_error(error)}"),
        trace=trace,
        cause=cause_of(error),
        of_machine=is_of_machine(error),
        wait_s=retry_after_s(error),
    )


def _bad(reason: str) -> Graded:
    return Graded(error=reason, cause="bad_answer")


def _as_list(answer: Any) -> list[Any] | None:
    """The items of a list, tuple or one-dimensional array; None for anything else."""
    if isinstance(answer, str | bytes | Mapping | set) or not hasattr(answer, "__len__"):
        return None
    try:
        return list(cast("Iterable[Any]", answer))
    except TypeError:
        return None


def _plain(answer: Mapping[Any, Any]) -> dict[str, Any]:
    """The first entries of a dict, as values that messages can carry."""
    return {_cut(str(key), 120): _plain_value(value) for key, value in islice(answer.items(), MAX_DETAILS)}


def _plain_value(value: Any) -> Any:
    """Convert a value for messages: values that JSON cannot represent, and large ones, become a short text."""
    try:
        plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_plain_object)
        return plain if len(msgspec.msgpack.encode(plain)) <= MAX_DETAIL_BYTES else _shown(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return _shown(value)


def _plain_object(value: Any) -> Any:
    item = getattr(value, "item", None)  # a NumPy or torch number
    if not callable(item):
        raise TypeError(type(value).__name__)
    return item()


def _shown(value: Any) -> str:
    try:
        return _cut(f"{value!r} ({type(value).__name__})" if value is not None else "None", 120)
    except Exception as error:  # noqa: BLE001 - a user's __repr__ may raise anything
        return f"a {type(value).__name__} whose repr raised {type(error).__name__}"


def _cut(text: str, limit: int = MAX_REASON_CHARS) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
