"""The built-in graders by name; those that compare a response with its label as text stand here."""

import hashlib
import importlib.util
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, cast

from actors.reward.graders.boxed import BOXED_PREFIX, Grader, boxed
from actors.reward.graders.math.grader import deepscaler, math
from actors.reward.graders.numeric import numeric
from actors.reward.graders.stated import dapo, gpqa
from actors.reward.samples import GradedSample
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


def drawn(sample: GradedSample) -> float:
    """0 or 1, by a hash of the sample's prompt, response and index: a baseline that no policy can learn.

    The same sample gets the same reward when it is graded again.
    """
    text = f"{sample.index}\0{sample.part}\0{sample.prompt}\0{sample.response}"
    return float(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[0] & 1)


def _labels(label: Any) -> tuple[str, ...]:
    """One label, or several of which one right is enough."""
    if isinstance(label, list | tuple) and label:
        return tuple(map(_text, cast("Iterable[Any]", label)))
    return (_text(label),)


BUILT_IN_GRADERS: Mapping[str, Grader] = MappingProxyType(
    {
        "exact_match": lambda sample: exact_match(sample.response, _text(sample.label)),
        "positional_match": lambda sample: positional_match(
            sample.response, _text(sample.label), truncated=sample.truncated
        ),
        "f1": lambda sample: f1(sample.response, _text(sample.label)),
        "numeric": lambda sample: numeric(sample.response, _text(sample.label)),
        "math": lambda sample: math(sample.response, _text(sample.label)),
        "deepscaler": lambda sample: deepscaler(sample.response, _labels(sample.label)),
        "dapo": lambda sample: dapo(sample.response, _text(sample.label)),
        "gpqa": lambda sample: gpqa(sample.response, sample.label, sample.metadata),
        "random": drawn,
    }
)
BOX_READERS: frozenset[str] = frozenset({"math", "deepscaler"})  # they grade the last box by themselves
NEEDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {name: ("math_verify", "math") for name in BOX_READERS}
)  # module and extra of a grader


def find_grader(name: str) -> Grader:
    r"""Find a built-in grader. The prefix "boxed_" restricts it to the content of the last \boxed{...}, or "".

    Raises:
        ValueError: no grader has this name; suggests the replacement of a slime grader, or the closest name. Or a
            package that the grader needs is not installed.
    """
    plain = name.removeprefix(BOXED_PREFIX)
    grader = BUILT_IN_GRADERS.get(plain)
    if grader is None:
        names = ", ".join(BUILT_IN_GRADERS)
        close = get_close_matches(plain, BUILT_IN_GRADERS, n=1)
        hint = slime_grader_hint(plain) or (f"did you mean {close[0]!r}?" if close else "")
        raise ValueError(f"no grader {name!r}: {hint}{' ' if hint else ''}allowed: {names}, or {OWN}")
    module, extra = NEEDS.get(plain, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        raise ValueError(f'the grader {name!r} needs a package that is not installed: pip install "physarum[{extra}]"')
    if name == plain or plain in BOX_READERS:
        return grader
    return boxed(grader, before="Answer: " if plain == "dapo" else "")
