"""The built-in graders by name; those that compare a response with its label as text stand here."""

import hashlib
import importlib.util
import os
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final, cast

from actors.reward.graders.boxed import BOXED_PREFIX, Grader, boxed
from actors.reward.graders.choices import right_letter
from actors.reward.graders.code.grader import SECONDS, TOTAL_S, cases_in, code
from actors.reward.graders.instructions.grader import ifbench, ifeval
from actors.reward.graders.labels import Label, required_text, required_texts, text_of
from actors.reward.graders.math.grader import deepscaler, has_answer, math
from actors.reward.graders.numeric import numeric
from actors.reward.graders.remote import remote_rm
from actors.reward.graders.stated import dapo, gpqa, is_integer
from actors.reward.samples import GradedSample
from runtime.functions.load import OWN, dotted_hint
from runtime.settings.reading.hints import grader_hint

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})


REMOTE: Final = "remote_rm"


def exact_match(response: str, label: Label) -> float:
    """Compare response and label as text, without the space around them.

    Args:
        response: The whole response.
        label: The right answer; a number is taken as its text.

    Returns:
        1.0 if they are equal, else 0.0.

    Edges:
        Two empty texts are equal. A label that is neither text nor a number is empty. Never raises.
    """
    return float(response.strip() == text_of(label).strip())


def positional_match(response: str, label: Label, *, truncated: bool = False) -> float:
    """Count the positions at which response and label have the same character.

    Args:
        response: The whole response, taken without the space around it.
        label: The right answer; a number is taken as its text.
        truncated: Whether the response reached its token limit without an end of turn.

    Returns:
        Matching positions / length of the longer text, from 0.0 to 1.0.

    Edges:
        A truncated response scores 0; otherwise a response without an end would score as high as one with an end. Two
        empty texts score 1. Never raises.
    """
    if truncated:
        return 0.0
    response, truth = response.strip(), text_of(label).strip()
    longer = max(len(response), len(truth))
    if longer == 0:
        return 1.0
    return sum(ours == theirs for ours, theirs in zip(response, truth, strict=False)) / longer


def f1(response: str, label: Label | Sequence[Label]) -> float:
    """Compute the F1 score of the words that response and label share.

    Words are compared in lower case, without ASCII punctuation and the articles a, an, the. A word counts as often as
    both have it. If either text is yes, no or noanswer, the two must be equal.

    Args:
        response: The whole response.
        label: The right answer; a number is taken as its text. Or several, of which the best counts, also as SQuAD has
            them: `{"text": [...]}`.

    Returns:
        2 * precision * recall / (precision + recall), from 0.0 to 1.0: precision = shared / words of the response,
        recall = shared / words of the label.

    Edges:
        Texts without a shared word score 0, and so do two texts without words. Never raises.

    Source:
        slime's `f1`, of which it is the first element and which takes one label; SQuAD's evaluation (arXiv 1606.05250),
        with HotpotQA's rule for closed answers (arXiv 1809.09600).
    """
    return max((_f1(_words(response), _words(text_of(each))) for each in _several(label)), default=0.0)


def _f1(ours: list[str], theirs: list[str]) -> float:
    closed = _CLOSED_ANSWERS.intersection((" ".join(ours), " ".join(theirs)))
    if closed and ours != theirs:
        return 0.0
    num_shared = sum((Counter(ours) & Counter(theirs)).values())
    if num_shared == 0:
        return 0.0
    precision, recall = num_shared / len(ours), num_shared / len(theirs)
    return 2 * precision * recall / (precision + recall)


def _several(label: Any) -> Sequence[Any]:
    """The labels in a label: one, a list, or a list under "text"."""
    if isinstance(label, Mapping):
        label = cast("Mapping[Any, Any]", label).get("text")
    return cast("Sequence[Any]", label) if isinstance(label, list | tuple) else (label,)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def drawn(sample: GradedSample) -> float:
    """Draw 0 or 1 by a hash of the sample: a baseline that no policy can learn.

    Args:
        sample: Its prompt, response, index and part are hashed.

    Returns:
        0.0 or 1.0, each for half of all samples.

    Edges:
        The same sample gets the same reward when it is graded again. Never raises.

    Source:
        slime's `random`, which draws anew.
    """
    text = f"{sample.index}\0{sample.part}\0{sample.prompt}\0{sample.response}"
    return float(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[0] & 1)


def _math(sample: GradedSample) -> float:
    return math(sample.response, _with_answer(required_text(sample.label)))


def _deepscaler(sample: GradedSample) -> float:
    return deepscaler(sample.response, [_with_answer(label) for label in required_texts(sample.label)])


def _with_answer(label: str) -> str:
    if not has_answer(label):
        raise ValueError("the label is empty")
    return label


def _dapo(sample: GradedSample) -> dict[str, float | bool | str]:
    label = required_text(sample.label)
    if not is_integer(label):
        raise ValueError(f"the label of the dapo grader must be an integer, not {label[:100]!r}")
    return dapo(sample.response, label)


def _gpqa(sample: GradedSample) -> float:
    if right_letter(sample.label, sample.metadata) is None:
        raise ValueError(f"label {str(sample.label)[:100]!r} is neither a letter nor the text of a choice in the row")
    return gpqa(sample.response, sample.label, sample.metadata)


def _code(sample: GradedSample) -> float:
    if cases_in(sample.label, sample.metadata) is None:
        raise ValueError(
            "the label has no tests: expected inputs and as many outputs, for a function also fn_name; "
            "or code with assert"
        )
    timeout_s = float(os.environ.get(SECONDS, TOTAL_S))
    return code(sample.response, sample.label, sample.metadata, timeout_s=timeout_s)


# Graders of a run: they refuse labels with which no response can be compared
BUILT_IN_GRADERS: Mapping[str, Grader] = MappingProxyType(
    {
        "exact_match": lambda sample: exact_match(sample.response, required_text(sample.label)),
        "positional_match": lambda sample: positional_match(
            sample.response, required_text(sample.label), truncated=sample.truncated
        ),
        "f1": lambda sample: f1(sample.response, required_texts(_several(sample.label))),
        "numeric": lambda sample: numeric(sample.response, required_text(sample.label)),
        "math": _math,
        "deepscaler": _deepscaler,
        "dapo": _dapo,
        "gpqa": _gpqa,
        "random": drawn,
        "code": _code,
        "ifeval": lambda sample: ifeval(sample.response, sample.label, sample.metadata),
        "ifbench": lambda sample: ifbench(sample.response, sample.label, sample.metadata),
        REMOTE: remote_rm,
    }
)
# The functions that compare a response with a label, as docs/reference/graders.md describes them
FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "exact_match": exact_match, "positional_match": positional_match, "f1": f1, "numeric": numeric, "math": math,
        "deepscaler": deepscaler, "dapo": dapo, "gpqa": gpqa, "random": drawn, "code": code, "ifeval": ifeval,
        "ifbench": ifbench, REMOTE: remote_rm,
    }
)  # fmt: skip
BOX_READERS: frozenset[str] = frozenset({"math", "deepscaler"})  # they grade the last box by themselves
INSTRUCTIONS: frozenset[str] = frozenset({"ifeval", "ifbench"})
NEEDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {name: ("math_verify", "math") for name in BOX_READERS}
    | {name: ("if_verifiable", "instructions") for name in INSTRUCTIONS}
)  # module and extra of a grader


def find_grader(name: str) -> Grader:
    r"""Find a built-in grader. The prefix "boxed_" restricts it to the content of the last \boxed{...}, or "".

    Raises:
        ValueError: no grader has this name; suggests the closest one, or the replacement of another project's. Or a
            package that the grader needs is not installed.
    """
    plain = name.removeprefix(BOXED_PREFIX)
    grader = BUILT_IN_GRADERS.get(plain)
    if grader is None:
        names = ", ".join(BUILT_IN_GRADERS)
        close = get_close_matches(plain, BUILT_IN_GRADERS, n=1)
        hint = grader_hint(plain) or dotted_hint(name) or (f"did you mean {close[0]!r}?" if close else "")
        raise ValueError(f"no grader {name!r}: {hint}{' ' if hint else ''}allowed: {names}, or {OWN}")
    module, extra = NEEDS.get(plain, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        raise ValueError(f'the grader {name!r} needs a package that is not installed: pip install "physarum[{extra}]"')
    if name != plain and plain == REMOTE:
        raise ValueError(f"no grader {name!r}: the server of {REMOTE} gets the whole response; name it without boxed_")
    if name == plain or plain in BOX_READERS:
        return grader
    return boxed(grader, before="Answer: " if plain == "dapo" else "")
