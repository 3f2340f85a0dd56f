"""The graders `dapo` and `gpqa`: the integer or the letter that a response states as its answer."""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final

from actors.reward.graders.boxed import FBOX, last_boxed, stated
from actors.reward.graders.choices import choices_in, chosen_letter, right_letter
from actors.reward.graders.labels import Label, text_of
from actors.reward.graders.math.arithmetic import TooLargeError, exact_value
from actors.reward.graders.math.latex import called, is_text, normal, without_text_commands
from actors.reward.graders.math.notations import is_series
from actors.reward.graders.math.units import quantity
from actors.reward.graders.responses import after_thought, visible, without_turn_end

READ_CHARS: Final = 300  # of the end of the response
NO_ANSWER: Final = "[INVALID]"
_ANSWER: Final = re.compile(r"answer[*_]*\s*[:：]\s*([^\n]+)", re.IGNORECASE)
_MODULUS: Final = re.compile(r" ?\\pmod\{\w+\}$")
_MARKUP: Final = re.compile(r"^[*_`]+\s*")


def dapo(response: str, label: Label) -> dict[str, float | bool | str]:
    """Compare the integer after the last `Answer:` in the last 300 characters with the label.

    Args:
        response: The whole response.
        label: The right integer, also after "####"; a number is taken as its text.

    Returns:
        score: 1.0 if it equals the label, else -1.0. acc: whether it does. pred: the answer that was read, or
        "[INVALID]" without one.

    Edges:
        Integers are exact, of any length. "42.", "**42**", "42.0", "1,234" and 6*7 = 42 are read, after "**Answer**:"
        too; a box after `Answer:` counts. Tokens that end a turn, such as <|im_end|>, do not. A label that is not an
        integer scores -1 for every response; a run refuses it before it starts. Never raises.

    Source:
        slime's `dapo` grader, which cuts labels to integers through a float.
    """
    truth = _integer(text_of(label))
    found = _ANSWER.findall(visible(without_turn_end(response))[-READ_CHARS:])
    pred = _MARKUP.sub("", found[-1]) if found else NO_ANSWER
    pred = normal(last_boxed(FBOX.sub(r"\\boxed", pred)) or pred).removesuffix("`")
    right = bool(found) and truth is not None and _value(pred) == truth
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
    return _integer(label) is not None


def _integer(label: str) -> Fraction | None:
    """Value of a label; None for one that is no integer, such as the score 5-3."""
    answer = stated(visible(label))
    try:
        value = None if is_series(normal(answer)) else _value(answer)
    except TooLargeError:
        return None
    return value if value is not None and value.denominator == 1 else None


def _value(text: str) -> Fraction | None:
    """Value of a number, with or without a unit, after the last equals sign; None if another side differs from it."""
    text = without_text_commands(text) if is_text(text.strip()) else text
    try:
        *sides, value = (
            exact_value(called(quantity(side.strip()).number)) for side in _MODULUS.sub("", normal(text)).split("=")
        )
    except TooLargeError:
        return None
    return value if all(side is None or side == value for side in sides) else None


def gpqa(response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    r"""Compare the letter that the response chooses with the right one.

    Read, in this order: the last \boxed{...}; the last statement such as "answer is (B)", "Answer: b", "I choose B" or
    "B is correct"; a last line that is a letter alone; "so B." and the like; an answer or a last line that repeats the
    text of a choice, or says "it is" before it; the only option that is named ("option B"); a first or last line such
    as "B) 12", unless other lines begin so too. A statement that is denied ("not B") or taken back ("B. No, it's D.")
    does not count, and a lone capital letter elsewhere, such as the pronoun I, chooses nothing. Only what follows the
    last `</think>` counts.

    Args:
        response: The whole response.
        label: A letter, the number of a choice from 0, or the text of a choice.
        metadata: `choices` (texts, or a dict of them, by letter or as in ARC), `valid_letters` and `correct_letter`, as
            in slime.

    Returns:
        1.0 if the response chooses the right letter; 0.0 if it chooses another, several at once (A or B), or none.

    Edges:
        Letters are A to J without `choices` and `valid_letters`. A label that names no choice scores 0 for every
        response; a run refuses it before it starts. Never raises.

    Source:
        slime's `gpqa`; docs/reference/from-slime.md says where it errs.
    """
    right = right_letter(label, metadata)
    return float(right is not None and chosen_letter(visible(after_thought(response)), choices_in(metadata)) == right)
