"""The graders `dapo` and `gpqa`: the integer or the letter that a response states as its answer."""

import re
import string
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Final, cast

from actors.reward.graders.boxed import last_boxed
from actors.reward.graders.math.arithmetic import TooLargeError, exact_value
from actors.reward.graders.math.latex import normal
from actors.reward.graders.math.units import quantity

READ_CHARS: Final = 300  # of the end of the response
NO_ANSWER: Final = "[INVALID]"
_ANSWER: Final = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_MARKUP: Final = re.compile(r"^[*_`]+\s*")
DEFAULT_LETTERS: Final = string.ascii_uppercase[:10]
MAX_TAIL_CHARS: Final = 2_000  # of a response that says nowhere which answer is the final one

_LETTER: Final = (
    r"\(?\s*(?:\*\*|\$|\\text\{|\\textbf\{|\\mathrm\{|\\boxed\{)*\s*\(?(?P<letter>[A-Z])\)?(?![A-Za-z0-9'’])"
)
_CHOSEN: Final = (
    re.compile(
        r"(?i:\b(?:answer|option|choice))(?i:\s+(?:is|was|would be|should be|must be))?\s*(?i:option|choice)?\s*"
        r"[:=]?\s*(?:\*\*)?\s*" + _LETTER
    ),
    re.compile(r"(?i:\b(?:choose|chose|pick|select|go with))(?i:\s+(?:option|choice|answer))?\s*[:=]?\s*" + _LETTER),
    re.compile(
        r"(?<![A-Za-z0-9'’])(?i:option|choice|answer)?\s*\(?(?P<letter>[A-Z])\)?(?:\*\*)?\s+(?i:is\s+(?:the\s+)?(?:correct|right|best)\b)"
    ),
)
_ALONE: Final = re.compile(r"^\W*(?P<letter>[A-Z])\W*$")
_FIRST: Final = re.compile(r"^\W*\(?(?P<letter>[A-Z])[).:]")
_NEGATED: Final = re.compile(r"(?i)\b(?:not|isn't|never|neither|nor|cannot be|rather than)\s*(?:the\s+)?$")
_WORDS: Final = re.compile(r"[^a-z0-9]+")


def dapo(response: str, label: str) -> dict[str, float | bool | str]:
    """Score the integer after the last `Answer:` in the last 300 characters.

    Returns:
        score: 1.0 if it equals the label, else -1.0. acc: whether it does. pred: the answer that was read, or
        "[INVALID]" without one.

    Raises:
        ValueError: the label is no integer. (slime cuts it to one, through a float.)

    Source:
        slime's `dapo` grader. Integers are exact here; "42.", "**42**" and "42.0" are 42.
    """
    truth = _value(label)
    if truth is None or truth.denominator != 1:
        raise ValueError(f"the label of the dapo grader must be an integer, not {label[:100]!r}")
    found = _ANSWER.findall(response[-READ_CHARS:])
    pred = _MARKUP.sub("", found[-1]) if found else NO_ANSWER
    pred = normal(last_boxed(pred) or pred).removesuffix("`")
    right = bool(found) and _value(pred) == truth
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def _value(text: str) -> Fraction | None:
    """Value of a number, with or without a unit, after the last equals sign."""
    _, sign, after = normal(text).rpartition("=")
    try:
        return exact_value(quantity(after.strip() if sign else normal(text)).number)
    except TooLargeError:
        return None


def gpqa(response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    r"""1 if the response chooses the right letter, 0 if it chooses another, several at once, or none.

    Read, in this order: the last \boxed{...}; the last "answer is (B)", "Answer: B", "I choose B" or "B is correct"; a
    last line that is a letter alone, or begins with "B)" and has no other. A lone capital letter elsewhere, such as the
    pronoun I, chooses nothing. Only what follows the last `</think>` counts. Without a letter, a box or an answer line
    that repeats the text of a choice chooses it.

    Args:
        response: the text to grade.
        label: a letter, the number of a choice from 0, or the text of a choice.
        metadata: `choices` (texts, or a dict of them), `valid_letters` and `correct_letter`, as in slime.

    Raises:
        ValueError: neither label nor metadata says which choice is right.
    """
    given = metadata or {}
    choices = _choices(given.get("choices"))
    letters = _letters(given.get("valid_letters"), choices)
    right = _right_letter(label, given.get("correct_letter"), letters, choices)
    return float(chosen_letter(response.rpartition("</think>")[2], letters, choices) == right)


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
    same = [index for index, choice in enumerate(choices) if _plain(choice) and _plain(choice) == _plain(plain)]
    return letters[same[0]] if len(same) == 1 and same[0] < len(letters) else None


def _choices(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [str(each) for each in cast("Mapping[Any, Any]", value).values()]
    return [str(each) for each in cast("Sequence[Any]", value)] if isinstance(value, list | tuple) else []


def _letters(value: Any, choices: Sequence[str]) -> str:
    if isinstance(value, list | tuple | str) and value:
        return "".join(str(letter).upper() for letter in cast("Sequence[Any]", value))
    return string.ascii_uppercase[: len(choices)] if choices else DEFAULT_LETTERS


def _right_letter(label: Any, correct: Any, letters: str, choices: Sequence[str]) -> str:
    if isinstance(correct, str) and correct.strip().upper() in list(letters):
        return correct.strip().upper()
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(letters):
        return letters[label]
    text = str(label).strip()
    if (plain := text.strip("().").upper()) in list(letters):
        return plain
    same = [index for index, choice in enumerate(choices) if _plain(choice) == _plain(text)]
    if len(same) == 1 and same[0] < len(letters):
        return letters[same[0]]
    raise ValueError(f"label {text[:100]!r} is no letter of {letters} and no choice in the row's metadata")


def _plain(text: str) -> str:
    return _WORDS.sub(" ", text.lower()).strip()
