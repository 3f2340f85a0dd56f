"""Built-in parsers of judges' answers, by hand."""

import pytest

from actors.reward.graders.parsers import BadAnswerError, boxed_number, find_parser, number
from actors.reward.samples import GradedSample
from runtime.settings.rules.graders import PARSERS


@pytest.mark.parametrize(
    ("answer", "score"),
    [("8", 8.0), ("I give 3 of 10. Score: -1.5", -1.5), ("<think>9</think> 1,250", 1250.0), ("7/10: 0.7", 0.7)],
)
def test_the_last_number_is_the_score(answer: str, score: float) -> None:
    assert number(GradedSample(judge_answer=answer)) == score


def test_the_last_box_has_the_score() -> None:
    assert boxed_number(GradedSample(judge_answer=r"\boxed{1} or \boxed{0.5} of 3")) == 0.5


@pytest.mark.parametrize("answer", ["", "good", "v2b", "inf", "1" * 400])
def test_an_answer_without_a_number_is_no_score(answer: str) -> None:
    with pytest.raises(BadAnswerError, match="no number in its answer"):
        number(GradedSample(judge_answer=answer))
    with pytest.raises(BadAnswerError, match="no box in its answer"):
        boxed_number(GradedSample(judge_answer=answer))


def test_a_cut_answer_is_no_score() -> None:
    """It may end within a number: "Score: 1" of "Score: 10"."""
    with pytest.raises(BadAnswerError, match=r"its answer reached max_tokens: '\.\.\.x+ Score: 1'"):
        number(GradedSample(judge_answer=f"{'x' * 100} Score: 1", judge_truncated=True))


def test_the_rules_name_the_parsers() -> None:
    assert {find_parser(name) for name in PARSERS} == {number, boxed_number}
    with pytest.raises(ValueError, match="no parser 'other'; allowed: number, boxed"):
        find_parser("other")
