"""The graders `dapo` and `gpqa`: the integer or the letter that a response states as its answer."""

import re
import string
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Final, cast

from actors.reward.graders.boxed import last_boxed
from actors.reward.graders.labels import Label, text_of
from actors.reward.graders.math.arithmetic import TooLargeError, exact_value
from actors.reward.graders.math.latex import is_text, normal, without_text_commands
from actors.reward.graders.math.units import quantity

READ_CHARS: Final = 300  # of the end of the response
NO_ANSWER: Final = "[INVALID]"
_ANSWER: Final = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_MARKUP: Final = re.compile(r"^[*_`]+\s*")
DEFAULT_LETTERS: Final = string.ascii_uppercase[:10]
MAX_TAIL_CHARS: Final = 2_000  # of a response that says nowhere which answer is the final one

_LETTER: Final = (
    r"\(?\s*(?:[*_`\"“$]|\\text\{|\\textbf\{|\\mathrm\{|\\boxed\{)*\s*\(?(?P<letter>[A-Z])\)?(?![A-Za-z0-9'’]|-[A-Za-z])"
    # A or B chooses neither; "A, and I am sure" and "A. Is not B too long?" choose A
    r"(?!\W{0,6}(?:\b(?:or|and)\b|[/&])\W{0,6}(?!I(?:['’]|\s+[a-z]))[A-Z](?![A-Za-z]))"
    r"(?![^\w.]{0,6}\s(?i:isn't|is not|is incorrect|is wrong|is false|cannot|can't)\b)"
)
_CHOSEN: Final = (
    re.compile(
        r"(?i:\b(?:answer|option|choice))(?i:\s+(?:is|was|would be|should be|must be))?\s*(?i:option|choice)?\s*"
        r"[:=–-]?\s*(?:\*\*)?\s*" + _LETTER
    ),
    re.compile(r"(?i:\b(?:choose|chose|pick|select|go with))(?i:\s+(?:option|choice|answer))?\s*[:=]?\s*" + _LETTER),
    re.compile(
        r"(?<![A-Za-z0-9'’])(?i:option|choice|answer)?\s*\(?(?P<letter>[A-Z])\)?(?:\*\*)?\s+(?i:is\s+(?:the\s+)?(?:correct|right|best)\b)"
    ),
)
_ALONE: Final = re.compile(r"^\W*(?P<letter>[A-Z])\W*$")
_FIRST: Final = re.compile(r"^\W*\(?(?P<letter>[A-Z])[).:]")
_NEGATED: Final = re.compile(r"(?i)\b(?:not|isn't|never|neither|nor|cannot be|rather than)\s*(?:the\s+)?$")
_SAID: Final = re.compile(r"^.*\banswer(?:\s+is)?\s*[:=]?", re.IGNORECASE)
_WORDS: Final = re.compile(r"[^a-z0-9]+")


def dapo(response: str, label: Label) -> dict[str, float | bool | str]:
    """Compare the integer after the last `Answer:` in the last 300 characters with the label.

    Args:
        response: The whole response.
        label: The right integer; a number is taken as its text.

    Returns:
        score: 1.0 if it equals the label, else -1.0. acc: whether it does. pred: the answer that was read, or
        "[INVALID]" without one.

    Edges:
        Integers are exact, of any length. "42.", "**42**", "42.0" and "1,234" are read; a box after `Answer:` counts. A
        label that is not an integer scores -1 for every response; a run refuses it before it starts. Never raises.

    Source:
        slime's `dapo` grader, which cuts labels to integers through a float.
    """
    truth = _value(text_of(label))
    found = _ANSWER.findall(response[-READ_CHARS:])
    pred = _MARKUP.sub("", found[-1]) if found else NO_ANSWER
    pred = normal(last_boxed(pred) or pred).removesuffix("`")
    right = bool(found) and truth is not None and truth.denominator == 1 and _value(pred) == truth
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def slime_dapo(
    solution_str: str, ground_truth: Label, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, float | bool | str]:
    """Grade like `dapo` under the name and arguments of slime's `compute_score`, for reward functions of slime.

    With `strict_box_verify` the last box of the last 100 characters is compared as text, and `pred` is "" without one.
    """
    del pause_tokens_index
    if not strict_box_verify:
        return dapo(solution_str, ground_truth)
    pred = last_boxed(solution_str[-100:])
    right = pred is not None and pred.strip() == text_of(ground_truth).strip()
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred or ""}


def is_integer(label: str) -> bool:
    """Whether a label is one that `dapo` can compare with."""
    truth = _value(label)
    return truth is not None and truth.denominator == 1


def _value(text: str) -> Fraction | None:
    """Value of a number, with or without a unit, after the last equals sign."""
    text = without_text_commands(text) if is_text(text.strip()) else text
    _, sign, after = normal(text).rpartition("=")
    try:
        return exact_value(quantity(after.strip() if sign else normal(text)).number)
    except TooLargeError:
        return None


def gpqa(response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    r"""Compare the letter that the response chooses with the right one.

    Read, in this order: the last \boxed{...}; the last "answer is (B)", "Answer: B", "I choose B" or "B is correct"; a
    last line that is a letter alone, or begins with "B)" and has no other. A lone capital letter elsewhere, such as the
    pronoun I, chooses nothing. Only what follows the last `</think>` counts. Without a letter, a box or an answer line
    that repeats the text of a choice chooses it.

    Args:
        response: The whole response.
        label: A letter, the number of a choice from 0, or the text of a choice.
        metadata: `choices` (texts, or a dict of them), `valid_letters` and `correct_letter`, as in slime.

    Returns:
        1.0 if the response chooses the right letter; 0.0 if it chooses another, several at once (A or B), or none.

    Edges:
        Letters are A to J without `choices` and `valid_letters`. A label that names no choice scores 0 for every
        response; a run refuses it before it starts. Never raises.

    Source:
        slime's `gpqa`; docs/reference/from-slime.md says where it errs.
    """
    right = right_letter(label, metadata)
    letters, choices = _choices_in(metadata)
    return float(right is not None and chosen_letter(response.rpartition("</think>")[2], letters, choices) == right)


def right_letter(label: Any, metadata: Mapping[str, Any] | None = None) -> str | None:
    """Return the letter of the right choice; None if neither label nor metadata says which it is."""
    letters, choices = _choices_in(metadata)
    correct = (metadata or {}).get("correct_letter")
    if isinstance(correct, str) and correct.strip().upper() in list(letters):
        return correct.strip().upper()
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(letters):
        return letters[label]
    text = str(label).strip()
    if (plain := text.strip("().").upper()) in list(letters):
        return plain
    same = [index for index, choice in enumerate(choices) if _plain(choice) == _plain(text)]
    return letters[same[0]] if len(same) == 1 and same[0] < len(letters) else None


def _choices_in(metadata: Mapping[str, Any] | None) -> tuple[str, list[str]]:
    """The letters of the choices, and their texts."""
    given = metadata or {}
    choices = _choices(given.get("choices"))
    return _letters(given.get("valid_letters"), choices), choices


def chosen_letter(text: str, letters: str = DEFAULT_LETTERS, choices: Sequence[str] = ()) -> str | None:
    """Return the letter that a text chooses; None if it chooses none, or says two in one box or line."""
    box = last_boxed(text)
    if box is not None:
        return _letter_of(box, letters, choices)
    said = [
        (match.start(), match["letter"])
        for pattern in _CHOSEN
        for match in pattern.finditer(text)
        if match["letter"] in letters and not _NEGATED.search(text[: match.start()])
    ]
    if said:
        return max(said)[1]
    lines = [line for line in text[-MAX_TAIL_CHARS:].splitlines() if line.strip()]
    return _letter_of(lines[-1], letters, choices) if lines else None


def _letter_of(text: str, letters: str, choices: Sequence[str]) -> str | None:
    """Letter of a box or a line: B, (B), **B**, B) 12, or the text of a choice."""
    plain = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", text).strip()
    alone = _ALONE.match(plain) or _FIRST.match(plain)
    if alone and alone["letter"] in letters:
        return alone["letter"]
    said = re.search(r"(?i:answer|option|choice)\s*(?i:is)?\s*:?\s*" + _LETTER, plain)
    if said and said["letter"] in letters:
        return said["letter"]
    texts = {_plain(plain), _plain(_SAID.sub("", plain))} - {""}
    same = [index for index, choice in enumerate(choices) if _plain(choice) in texts]
    return letters[same[0]] if len(same) == 1 and same[0] < len(letters) else None


def _choices(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [str(each) for each in cast("Mapping[Any, Any]", value).values()]
    return [str(each) for each in cast("Sequence[Any]", value)] if isinstance(value, list | tuple) else []


def _letters(value: Any, choices: Sequence[str]) -> str:
    if isinstance(value, list | tuple | str) and value:
        return "".join(str(letter).upper() for letter in cast("Sequence[Any]", value))
    return string.ascii_uppercase[: len(choices)] if choices else DEFAULT_LETTERS


def _plain(text: str) -> str:
    return _WORDS.sub(" ", text.lower()).strip()
