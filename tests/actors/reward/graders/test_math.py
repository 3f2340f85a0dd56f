"""The graders of mathematics, dapo and gpqa: labelled answers, one by one, with the reason."""

import re
import tomllib
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.reward.graders.builtin import find_grader
from actors.reward.graders.math.algebra import TimeIsUp, cpu_limit
from actors.reward.graders.math.arithmetic import TooLargeError, exact_value
from actors.reward.graders.math.grader import deepscaler, math
from actors.reward.samples import GradedSample

HERE = Path(__file__).parent
GROUPS: list[dict[str, Any]] = tomllib.loads((HERE / "labelled_math.toml").read_text())["group"]


def pairs(verdict: str) -> list[tuple[str, str, str]]:
    return [(group["reason"], answer, label) for group in GROUPS for answer, label in group[verdict]]


@pytest.mark.parametrize(("reason", "answer", "label"), pairs("right"))
def test_equal_answers_score_one(reason: str, answer: str, label: str) -> None:
    assert math(rf"So it is \boxed{{{answer}}}", label) == 1.0, reason


@pytest.mark.parametrize(("reason", "answer", "label"), pairs("wrong"))
def test_unequal_answers_score_zero(reason: str, answer: str, label: str) -> None:
    assert math(rf"So it is \boxed{{{answer}}}", label) == 0.0, reason


ANSWERS: list[dict[str, Any]] = tomllib.loads((HERE / "labelled_answers.toml").read_text())["group"]


@pytest.mark.parametrize(
    ("group", "verdict", "text", "label"),
    [(group, verdict, *pair) for group in ANSWERS for verdict in ("right", "wrong") for pair in group[verdict]],
)
def test_a_response_is_graded_as_it_is_labelled(group: dict[str, Any], verdict: str, text: str, label: Any) -> None:
    metadata = {"choices": group["choices"]} if "choices" in group else {}
    response = group.get("response", "@").replace("@", text)
    found: Any = find_grader(group["grader"])(GradedSample(response=response, label=label, metadata=metadata))
    assert ((found["score"] if group["grader"] == "dapo" else found) == 1.0) == (verdict == "right"), group["reason"]


def test_there_are_two_hundred_pairs_and_forty_of_slimes_faults() -> None:
    numbers = [len(group["right"]) + len(group["wrong"]) for group in GROUPS]
    assert sum(numbers) >= 200
    assert sum(number for number, group in zip(numbers, GROUPS, strict=True) if group.get("slime")) >= 40


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("42", 0.0),  # no box
        (r"\boxed{42", 0.0),  # not closed
        (r"\boxed{41} or \boxed{42}", 1.0),  # the last one counts
        (r"\boxed{42} or \boxed{41}", 0.0),
        (r"\fbox{42}", 1.0),
        (r"\boxed {42}", 1.0),
        (r"\boxed{42\}", 0.0),  # a brace that is written, not one that closes
        (r"\boxed{42} or \boxed{\left\{41\right.}", 0.0),
        (r"\boxed{}", 0.0),
    ],
)
def test_the_last_closed_box_counts(response: str, expected: float) -> None:
    assert math(response, "42") == expected
    assert math(response, r"so \boxed{42}") == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"<think>\boxed{1}</think> \boxed{42}", 1.0),
        (r"<think>\boxed{42}</think> it is 42", 0.0),
        (r"a</think>\boxed{42}</think>\boxed{1}", 0.0),
        (r"###Response \boxed{42}", 1.0),
        (r"\boxed{42}", 0.0),
    ],
)
def test_deepscaler_reads_what_follows_the_thought(response: str, expected: float) -> None:
    assert deepscaler(response, "42") == expected
    assert deepscaler(response, ["7", "42"]) == expected


@pytest.mark.parametrize("name", ["math", "deepscaler"])
def test_a_label_without_content_is_refused(name: str) -> None:
    for label in ("", "$$", r"\boxed{}"):
        with pytest.raises(ValueError, match="the label is empty"):
            find_grader(name)(GradedSample(response=r"</think>\boxed{1}", label=label))


def test_a_label_may_be_zero() -> None:
    assert find_grader("math")(GradedSample(response=r"\boxed{0}", label=0)) == 1.0


def test_the_box_of_the_prefix_is_the_box_that_math_reads() -> None:
    sample = GradedSample(response=r"</think>\boxed{42}", label="42")
    for name in ("boxed_math", "boxed_deepscaler", "boxed_gpqa", "boxed_dapo"):
        given_sample = GradedSample(response=r"</think>\boxed{B}", label="B") if name == "boxed_gpqa" else sample
        score = find_grader(name)(given_sample)
        assert (score["score"] if isinstance(score, dict) else score) == 1.0


@given(st.integers(-(10**9), 10**9))
def test_a_whole_number_is_right_in_every_form_and_wrong_one_off(number: int) -> None:
    plain, label = str(number), f"{number:,}"
    for form in (label, plain, f"{plain}.0", f"{label}.", rf"\text{{{label}}}", f"x={plain}", f"{label} apples"):
        assert math(rf"\boxed{{{form}}}", label) == 1.0, form
    assert math(rf"\boxed{{{number + 1}}}", label) == 0.0


@given(st.fractions(max_denominator=10**6))
def test_every_fraction_is_read_exactly(value: Fraction) -> None:
    for text in (f"{value.numerator}/{value.denominator}", rf"\frac{{{value.numerator}}}{{{value.denominator}}}"):
        assert exact_value(text) == value
    assert (
        math(rf"\boxed{{{value.numerator}/{value.denominator}}}", f"{value.numerator + 1}/{value.denominator}") == 0.0
    )


@given(st.text(alphabet=r"0123456789+-*/^!(){}[]\,.xfracsqt ", max_size=40))
def test_any_text_has_a_verdict(text: str) -> None:
    assert math(rf"\boxed{{{text}}}", "7") in (0.0, 1.0)
    try:
        assert exact_value(text) is None or isinstance(exact_value(text), Fraction)
    except TooLargeError:
        assert re.search(r"[\^!eE]|\d{9}|\*\*", text)


@pytest.mark.parametrize("answer", ["0." + "1" * 4_900, "9" * 4_900, "9" * 100_000, "{" * 2_400 + "1" + "}" * 2_400])
def test_a_long_answer_has_a_verdict(answer: str) -> None:
    assert math(rf"\boxed{{{answer}}}", "7") == 0.0
    assert math(rf"\boxed{{{answer}}}", answer) == 1.0


def test_a_comparison_ends_with_its_cpu_time() -> None:
    def works_on_after_an_exception() -> None:
        while True:
            with suppress(Exception):  # as sympy does
                sum(range(10**6))

    with pytest.raises(TimeIsUp), cpu_limit(0.05):
        works_on_after_an_exception()


@pytest.mark.parametrize(
    ("response", "label", "score", "pred"),
    [
        ("Answer: 42", "42", 1.0, "42"),
        ("Answer: 42.", "42", 1.0, "42"),
        ("**Answer:** 42", "42", 1.0, "42"),
        ("**Answer**: 42", "42", 1.0, "42"),
        ("Answer: 6*7 = 42", "42", 1.0, "6*7 = 42"),
        ("Answer: N = 42 (mod 1000)", "42", 1.0, r"N = 42  \pmod{1000}"),
        ("Answer: 8 = 42", "42", -1.0, "8 = 42"),
        (r"Answer: \fbox{42}", "42", 1.0, "42"),
        (r"Answer: \(42\)", "42", 1.0, "42"),
        ("Answer: 42.0", "42", 1.0, "42.0"),
        ("Answer: 1,234", "1234", 1.0, "1234"),
        (r"Answer: \boxed{5}", "5", 1.0, "5"),
        ("answer: -7", "-7", 1.0, "-7"),
        ("Answer: 1\nAnswer: 2", "2", 1.0, "2"),
        ("Answer: 1\nAnswer: 2", "1", -1.0, "2"),
        ("Answer: 123456789012345678", "123456789012345678", 1.0, "123456789012345678"),  # slime says -1
        ("Answer: 9007199254740993", "9007199254740992", -1.0, "9007199254740993"),  # slime says 1
        ("Answer: 9**9**9**9", "42", -1.0, "9^9^9^9"),
        ("42", "42", -1.0, "[INVALID]"),
        (r"Answer: \text{42}", "42", 1.0, r"\text{42}"),
        ("Answer: 42" + " " * 300, "42", -1.0, "[INVALID]"),  # too far from the end
    ],
)
def test_dapo_reads_an_exact_integer(response: str, label: str, score: float, pred: str) -> None:
    assert find_grader("dapo")(GradedSample(response=response, label=label)) == {
        "score": score,
        "acc": score > 0,
        "pred": pred,
    }


@pytest.mark.parametrize("label", ["3.7", "1/2", "x", "", "10-15", "3:1", "9:00", "2020-01-02"])
def test_dapo_refuses_a_label_that_is_no_integer(label: str) -> None:
    with pytest.raises(ValueError, match="must be an integer"):
        find_grader("dapo")(GradedSample(response="Answer: 3", label=label))


CHOICES = {"choices": ["red", "green", "blue", "sky"]}


@pytest.mark.parametrize(
    ("response", "label", "metadata", "expected"),
    [
        ("i do not know", "D", {}, 0.0),  # slime says 1 for the first five
        ("no idea", "A", {}, 0.0),
        ("sorry, unclear", "C", {}, 0.0),
        ("The answer is I", "D", {}, 0.0),
        ("I think it is tricky", "A", {}, 0.0),
        ("The answer is (B)", "B", {}, 1.0),  # slime says 0
        ("The answer is (B)", "A", {}, 0.0),
        ("Answer: C", "C", {}, 1.0),
        (r"\boxed{\text{(D)}}", "D", {}, 1.0),
        (r"\boxed{A, B}", "A", {}, 0.0),
        ("blah\n**B**", "B", {}, 1.0),
        ("blah\nB) 12", "B", {}, 1.0),
        ("The answer is A. No wait, the answer is B.", "B", {}, 1.0),
        ("The answer is not A, the answer is B", "B", {}, 1.0),
        ("The answer is B. Actually, no: it's D.", "D", {}, 1.0),
        ("The answer is B. Actually, no: it's D.", "B", {}, 0.0),
        ("not B. The answer is D, no: C", "C", {}, 1.0),
        ("The answer is D. No, C is too small.", "D", {}, 1.0),
        ("C seems the most plausible.", "C", {}, 1.0),
        ("C is the most likely to react with A.", "C", {}, 0.0),
        ("The answer is B. No other option fits.", "B", {}, 1.0),
        ("C is wrong. The remaining option, A, is correct.", "A", {}, 1.0),
        ("The answer is B. Actually, A gives 5, so it is close.", "B", {}, 1.0),
        ("The answer is the ribosome.", "C", {"choices": ["Nucleus", "Golgi apparatus", "Ribosome"]}, 1.0),
        ("The nucleus is not the answer; the answer is a ribosome.", "B", {"choices": ["Nucleus", "Ribosome"]}, 1.0),
        ("A is correct", "A", {}, 1.0),
        ("I choose option C", "C", {}, 1.0),
        ("<think>Answer: A</think>Answer: B", "B", {}, 1.0),
        ("<think>Answer: A</think>hm", "A", {}, 0.0),
        ("The answer is a mystery", "A", {}, 0.0),
        (r"\boxed{blue}", 2, CHOICES, 1.0),
        (r"\boxed{blue}", "blue", CHOICES, 1.0),
        (r"\boxed{red}", "blue", CHOICES, 0.0),
        ("Answer: B", "green", CHOICES, 1.0),
        ("Answer: B", None, {"correct_letter": "B"}, 1.0),
        ("Answer: blue", "C", CHOICES, 1.0),
        ("The answer is blue.", "C", CHOICES, 1.0),
        ("The answer is blue.", "A", CHOICES, 0.0),
        ("the answer is *C*", "C", {}, 1.0),
        ("The answer is `C`", "C", {}, 1.0),
        ('The answer is "C"', "C", {}, 1.0),
        ("Answer - C", "C", {}, 1.0),
        ("Thus, the answer is A or B", "A", {}, 0.0),
        ("The answer is (A) and (B)", "A", {}, 0.0),
        ("The answer is (C) and not (D)", "C", {}, 1.0),
        ("The answer is A-type", "A", {}, 0.0),
        ("Option B is incorrect", "B", {}, 0.0),
        ("Option B is incorrect. Option C is correct.", "C", {}, 1.0),
        ("The answer is C, and I am sure.", "C", {}, 1.0),
        ("The answer is (C) and I'm sure.", "C", {}, 1.0),
        ("The answer is I or J", "I", {}, 0.0),
        ("The answer is B. Is not A too long?", "B", {}, 1.0),
        (r"\boxed{no answer}", "A", {"choices": ["no answer", "one"]}, 1.0),
        ("", "A", {}, 0.0),
        ("answer: b", "B", {}, 1.0),
        ("The answer is a.", "A", {}, 1.0),
        ("**Answer**: B", "B", {}, 1.0),
        ("<answer>\nB\n</answer>", "B", {}, 1.0),
        ('{"answer": "B"}', "B", {}, 1.0),
        (r"x=\boxed{3}. The answer is (B)", "B", {}, 1.0),  # the box holds no choice
        (r"\boxed{\mathsf{b}}", "B", {}, 1.0),
        ("Thus, B is our answer", "B", {}, 1.0),
        ("It must be B.", "B", {}, 1.0),
        ("The answer to this question is B", "B", {}, 1.0),
        ("The answer is B. Option A would need 3 K.", "B", {}, 1.0),  # naming an option is not choosing it
        ("I considered option A and option B but cannot decide.", "B", {}, 0.0),
        ("I don't choose B.", "B", {}, 0.0),
        ("Is the answer B?", "B", {}, 0.0),
        ("The wrong answer is B", "B", {}, 0.0),
        ("The least likely answer is B", "B", {}, 0.0),
        ("b) wrong\nanswer c", "C", {}, 1.0),
        ("B would be the answer if x were 3. But x is 2, so A.", "A", {}, 1.0),
        ("Answer: B, C", "B", {}, 0.0),
        ("Answer: A person walks.", "A", {}, 0.0),
        ("Answer: E = 5 J", "E", {}, 0.0),
        ("A) red\nB) green\nC) blue\nD) sky", "D", CHOICES, 0.0),  # a list of the choices
        ("B) green\n\nHope this helps!", "B", CHOICES, 1.0),
        ("答案是B", "B", {}, 1.0),
        ("<think>the answer is B", "B", {}, 0.0),  # the thought does not end
        ("-5", 1, {"choices": ["5", "-5"]}, 1.0),
        ("Answer: y", "A", {"choices": {"text": ["y", "x"], "label": ["A", "B"]}}, 1.0),  # as in ARC
    ],
)
def test_gpqa_abstains_where_nothing_is_chosen(
    response: str, label: Any, metadata: dict[str, Any], expected: float
) -> None:
    sample = GradedSample(response=response, label=label, metadata=metadata)
    assert find_grader("gpqa")(sample) == expected


def test_gpqa_refuses_a_row_without_a_right_choice() -> None:
    with pytest.raises(ValueError, match="is neither a letter nor the text of a choice in the row"):
        find_grader("gpqa")(GradedSample(response="A", label="violet", metadata=CHOICES))


@given(st.text(), st.integers(0, 7))
def test_a_drawn_reward_is_the_same_again(response: str, index: int) -> None:
    grade = find_grader("random")
    sample = GradedSample(response=response, index=index)
    assert grade(sample) == grade(sample)


def test_drawn_rewards_are_even() -> None:
    grade = find_grader("random")
    drawn = [grade(GradedSample(response=str(number), index=number % 8)) for number in range(2000)]
    assert 900 < sum(drawn) < 1100
