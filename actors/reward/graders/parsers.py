r"""Built-in parsers of judges' answers: they read a score from `sample.judge_answer`."""

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

from actors.reward.graders.boxed import Grader, last_boxed
from actors.reward.samples import GradedSample

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_SHOWN = 80  # characters of an answer in an error


class BadAnswerError(ValueError):
    """A judge's answer has no score."""


def number(sample: GradedSample) -> float:
    """Return the last number of the answer.

    Raises:
        BadAnswerError: the answer does not contain a number, or reached `max_tokens`.
    """
    return _last_number(_whole(sample), "its answer")


def boxed_number(sample: GradedSample) -> float:
    r"""Return the last number in the last \boxed{...} of the answer.

    Raises:
        BadAnswerError: there is no box, it has no number, or the answer reached `max_tokens`.
    """
    inside = last_boxed(_whole(sample))
    if inside is None:
        raise BadAnswerError(f"no box in its answer {_shown(sample.judge_answer)}")
    return _last_number(inside, "the box of its answer")


def _whole(sample: GradedSample) -> str:
    if sample.judge_truncated:
        raise BadAnswerError(f"its answer reached max_tokens: {_shown(sample.judge_answer)}")
    return sample.judge_answer


def _last_number(text: str, where: str) -> float:
    found = _NUMBER.findall(text)
    value = float(found[-1].replace(",", "")) if found else math.nan
    if not math.isfinite(value):
        raise BadAnswerError(f"no number in {where} {_shown(text)}")
    return value


def _shown(text: str) -> str:
    """The end of an answer, where the score is expected."""
    return repr(text if len(text) <= _SHOWN else f"...{text[-_SHOWN:]}")


BUILT_IN_PARSERS: Mapping[str, Grader] = MappingProxyType({"number": number, "boxed": boxed_number})


def find_parser(name: str) -> Grader:
    """Find a built-in parser.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in BUILT_IN_PARSERS:
        raise ValueError(f"no parser {name!r}; allowed: {', '.join(BUILT_IN_PARSERS)}, module:function")
    return BUILT_IN_PARSERS[name]
