"""The built-in graders by name; those that compare a response with its label as text stand here."""

import re
import string
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from actors.reward.graders.boxed import BOXED_PREFIX, Grader, boxed
from actors.reward.graders.numeric import numeric
from runtime.settings.plugins import OWN
from runtime.settings.slime.hints import slime_grader_hint

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})


def exact_match(response: str, label: str) -> float:
    """1 if response and label are equal after stripping whitespace, else 0."""
    return float(response.strip() == label.strip())


def positional_match(response: str, label: str, *, truncated: bool = False) -> float:
    """Share of positions with the right character: matching positions / length of the longer text.

    A truncated response scores 0; otherwise a response without an end would score as high as one with an end. Two
    empty texts score 1.
    """
    if truncated:
        return 0.0
    response, label = response.strip(), label.strip()
    longer = max(len(response), len(label))
    if longer == 0:
        return 1.0
    return sum(ours == theirs for ours, theirs in zip(response, label, strict=False)) / longer


def f1(response: str, label: str) -> float:
    """F1 score of the words that response and label share.

    Words are compared in lower case, without punctuation and articles. If either text is yes, no or noanswer, the
    two must be equal.

    Source:
        SQuAD's evaluation (arXiv 1606.05250), with HotpotQA's rule for closed answers (arXiv 1809.09600).
    """
    ours, theirs = _words(response), _words(label)
    closed = _CLOSED_ANSWERS.intersection((" ".join(ours), " ".join(theirs)))
    if closed and ours != theirs:
        return 0.0
    num_shared = sum((Counter(ours) & Counter(theirs)).values())
    if num_shared == 0:
        return 0.0
    precision, recall = num_shared / len(ours), num_shared / len(theirs)
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


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
        raise ValueError(f"no grader {name!r}: {hint}{' ' if hint else ''}allowed: {names}, or {OWN}")
    return boxed(grader) if name.startswith(BOXED_PREFIX) else grader
