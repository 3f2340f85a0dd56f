"""The built-in graders by name."""

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from actors.reward.graders.boxed import BOXED_PREFIX, Grader, boxed
from actors.reward.graders.matching import exact_match, f1, positional_match
from actors.reward.graders.numeric import numeric
from runtime.settings.plugins import OWN
from runtime.settings.slime.hints import slime_grader_hint


def _text(label: Any) -> str:
    if label is None:
        raise ValueError("the sample has no label; set label_key of its data source")
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise ValueError(f"the label must be text or a number, not {type(label).__name__}")
    return str(label)


BUILT_IN_GRADERS: Mapping[str, Grader] = MappingProxyType(
    {
        "exact_match": lambda sample: exact_match(sample.response, _text(sample.label)),
        "positional_match": lambda sample: positional_match(
            sample.response, _text(sample.label), truncated=sample.truncated
        ),
        "f1": lambda sample: f1(sample.response, _text(sample.label)),
        "numeric": lambda sample: numeric(sample.response, _text(sample.label)),
    }
)


def find_grader(name: str) -> Grader:
    r"""Find a built-in grader. The prefix "boxed_" restricts it to the content of the last \boxed{...}, or "".

    Raises:
        ValueError: no grader has this name; suggests the replacement of a slime grader, or the closest name.
    """
    plain = name.removeprefix(BOXED_PREFIX)
    grader = BUILT_IN_GRADERS.get(plain)
    if grader is None:
        names = ", ".join(BUILT_IN_GRADERS)
        close = get_close_matches(plain, BUILT_IN_GRADERS, n=1)
        hint = slime_grader_hint(plain) or (f"did you mean {close[0]!r}?" if close else "")
        raise ValueError(f"no grader {name!r}: {hint}{' ' if hint else ''}built in are {names}; own ones are {OWN}")
    return boxed(grader) if name.startswith(BOXED_PREFIX) else grader
