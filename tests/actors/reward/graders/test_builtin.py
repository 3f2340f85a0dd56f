"""Built-in graders: values by hand, and what must hold for any text."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.reward.graders.boxed import last_boxed
from actors.reward.graders.builtin import exact_match, f1, find_grader, positional_match
from actors.reward.graders.code.grader import program_in
from actors.reward.graders.math.grader import deepscaler, math
from actors.reward.graders.numeric import numeric
from actors.reward.graders.stated import dapo, gpqa
from actors.reward.samples import GradedSample

GSM8K_LABEL = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 clips.\n#### 72"


@pytest.mark.parametrize(("response", "expected"), [("74", 1), (" 74\n", 1), ("74.", 0), ("", 0)])
def test_exact_match(response: str, expected: float) -> None:
    assert exact_match(response, "74") == expected


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("74", "74", 1.0),
        ("71", "74", 1 / 2),  # first of two positions
        ("7", "74", 1 / 2),  # one position of the longer text
        ("741", "74", 2 / 3),
        ("47", "74", 0.0),
        ("", "74", 0.0),
        ("", "", 1.0),
    ],
)
def test_positional_match_by_hand(response: str, label: str, expected: float) -> None:
    assert positional_match(response, label) == pytest.approx(expected)


def test_positional_match_pays_nothing_without_an_end_of_turn() -> None:
    assert positional_match("74", "74", truncated=True) == 0.0
    grade = find_grader("positional_match")
    assert grade(GradedSample(response="74", label="74", status="completed")) == 1.0
    assert grade(GradedSample(response="74", label="74", status="truncated")) == 0.0


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("The cat sat.", "a cat sat", 1.0),  # case, punctuation and articles do not count
        ("cat", "black cat", 2 / 3),  # precision 1, recall 1/2: 2 * 1/2 / (3/2)
        ("cat cat", "cat", 2 / 3),  # a word counts as often as both have it: precision 1/2, recall 1
        ("the big red dog", "red dog barks", 2 / 3),  # 2 of 3 and 2 of 3
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("yes", "Yes.", 1.0),
        ("yes it is", "yes", 0.0),  # closed answers must be equal
        ("no", "noanswer", 0.0),
    ],
)
def test_f1_by_hand(response: str, label: str, expected: float) -> None:
    assert f1(response, label) == pytest.approx(expected)


@pytest.mark.parametrize("label", [["Paris, Texas", "Paris"], {"text": ["Paris"], "answer_start": [7]}, ("x", "paris")])
def test_f1_of_several_labels_is_that_of_the_best(label: Any) -> None:
    assert f1("Paris", label) == find_grader("f1")(GradedSample(response="Paris", label=label)) == 1.0


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        (r"so \boxed{72}", GSM8K_LABEL, 1),
        (r"\boxed{71} and no, \boxed{72}", GSM8K_LABEL, 1),
        (r"\boxed{72} and no, \boxed{71}", GSM8K_LABEL, 0),
        (r"72, so \boxed{71}", GSM8K_LABEL, 0),  # the box counts, not the text
        ("#### 72", GSM8K_LABEL, 1),
        ("48 + 24 = 72.", GSM8K_LABEL, 1),
        ("72 clips in 2 months", GSM8K_LABEL, 0),
        ("the answer is $1,234.50", "1234.5", 1),
        ("1, 2, 3", "3", 1),
        ("1,2,3", "3", 1),
        ("it is -3", "-3", 1),
        ("10-3", "3", 1),
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{1/2}", r"\boxed{\frac{1}{2}}", 1),
        (r"\boxed{72\text{ clips}}", GSM8K_LABEL, 1),  # words may stand after the number
        (r"\boxed{\$72 \text{ per month}}", GSM8K_LABEL, 1),
        (r"\boxed{x = 72}", GSM8K_LABEL, 1),
        ("#### Answer: **72** clips", GSM8K_LABEL, 1),
        ("#### Step 2\nWe get 72", GSM8K_LABEL, 1),  # a heading
        (r"<think>\boxed{71}</think>The answer is 72", GSM8K_LABEL, 1),
        (r"<think>\boxed{72}</think>The answer is 71", GSM8K_LABEL, 0),
        ("It is −3, or $-3", "-3", 1),
        (r"half: \frac12", ".5", 1),
        (r"\boxed{1{,}234}", "1,234", 1),
        (r"\boxed{10\frac{1}{2}}", "50.5", 0),  # not 101/2
        (r"\boxed{11/2}", "1 1/2", 0),
        (r"\boxed{1\frac{1}{2}}", "1 1/2", 1),
        (r"\boxed{2x}", "2", 0),
        (r"\boxed{5!}", "5", 0),
        (r"\boxed{3:4}", "4", 0),
        (r"\boxed{72\text{ clips}}", "72 clips", 1),
        (r"\boxed{2 million}", "2", 0),
        ("#### 3 1/2", "3.5", 1),
        ("It takes 3 1/2 cups.", "1/2", 0),
        (r"\boxed{-10\frac{1}{2}}", "-21/2", 1),
        ("#### 1 1/0", "1", 0),
        (r"\boxed{2.5\text{ Million}}", "2,500,000", 1),
        ("It costs 3 dozen eggs.", "36", 1),
        ("#### 5 hundred", "5", 0),
        (r"\boxed{x + 1}", "x+1", 1),
        (r"\boxed{1+x}", "x+1", 0),  # no algebra
        (r"\boxed{50\%}", "50", 1),
        (r"\boxed{}", "50", 0),
        (r"\boxed{72", "72", 1),  # never closed: the last number
        ("no number", "72", 0),
        ("anything", "", 0),  # an empty truth is worth nothing
        ("1/0", "72", 0),
        ("9" * 1000, "72", 0),
    ],
)
def test_numeric_by_hand(response: str, label: str, expected: float) -> None:
    assert numeric(response, label) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed{\frac{a}{b}} x", r"\frac{a}{b}"),
        (r"\boxed{1} \boxed{2", None),  # the last one is not closed
        (r"\boxed{1 \boxed{2}", "2"),
        (r"\boxed{1} \boxed 2", "2"),
        (r"\boxed{1} is what I \boxed here", "1"),  # no box
        (r"\boxed{\boxed{3}}", "3"),
        (r"} \boxed{4}", "4"),
        ("none", None),
    ],
)
def test_last_boxed(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


def test_a_response_that_repeats_a_sign_costs_no_more_than_another() -> None:
    start = time.process_time()
    assert numeric(r"\boxed{" * 20_000, "72") == 0
    assert gpqa("→" * 30_000, "B") == 0
    assert gpqa("the answer is " * 5_000 + "B", "B", {"choices": ["12", "7"]}) == 0
    assert program_in("~" * 30_000) == "~" * 30_000
    assert not dapo("Answer: 1" + r"^\circ" * 40 + "!", "42")["acc"]
    assert not dapo("Answer: 1" + "米" * 200 + "!", "42")["acc"]
    assert time.process_time() - start < 4  # 0.3 s; quadratic search took up to minutes


LABELS = st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.booleans(), st.lists(st.text(), max_size=2))
TEXTS = st.one_of(
    st.text(),
    st.lists(st.sampled_from([r"\boxed{", "}", "{", "</think>", "Answer: ", "is (B)", "7", "#### ", "x"])).map("".join),
)


@given(TEXTS, LABELS)
def test_graders_return_for_any_text_and_label(response: str, label: Any) -> None:
    for grade in (exact_match, positional_match, f1, numeric, gpqa, math):
        assert 0.0 <= grade(response, label) <= 1.0
    assert deepscaler(f"</think>{response}", label) in (0.0, 1.0)
    assert dapo(response, label)["score"] in (-1.0, 1.0)


@pytest.mark.parametrize("label", [None, True, [], {}, object(), ""])
def test_a_label_that_is_no_answer_makes_no_response_right(label: Any) -> None:
    assert f1("7", label) == numeric("7", label) == math(r"\boxed{7}", label) == gpqa("7", label) == 0.0
    assert deepscaler(r"</think>\boxed{7}", label) == 0.0
    assert dapo("Answer: 7", label) == {"score": -1.0, "acc": False, "pred": "7"}


@pytest.mark.parametrize("label", [7, 7.0, "7"])
def test_a_label_may_be_a_number(label: Any) -> None:
    assert math(r"\boxed{7}", label) == numeric("7", label) == dapo("Answer: 7", label)["score"] == 1.0


def test_a_comparison_outside_of_a_main_thread_has_no_signal_and_still_returns() -> None:
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(math, r"\boxed{x+1}", "1+x").result() == 1.0


@given(st.text())
def test_a_perfect_answer_scores_one(text: str) -> None:
    assert exact_match(text, text) == positional_match(text, text) == 1.0


@given(st.integers(-(10**12), 10**12))
def test_numeric_reads_any_integer_however_it_is_written(number: int) -> None:
    for answer in (str(number), f"{number:,}", f"{number}.0", rf"\boxed{{{number}}}", f"#### {number}"):
        assert numeric(answer, f"#### {number}") == 1.0


def test_boxed_before_a_name_grades_the_content_of_the_box() -> None:
    grade = find_grader("boxed_exact_match")
    assert grade(GradedSample(response=r"I say \boxed{74}", label="74")) == 1.0
    assert grade(GradedSample(response="74", label="74")) == 0.0


def test_labels_may_be_numbers_but_not_missing_or_lists() -> None:
    grade = find_grader("exact_match")
    assert grade(GradedSample(response="74", label=74)) == 1.0
    with pytest.raises(ValueError, match="has no label; set label_key"):
        grade(GradedSample(response="74"))
    with pytest.raises(ValueError, match="must be text or a number, not list"):
        grade(GradedSample(response="74", label=["74"]))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("exact_mach", "did you mean 'exact_match'?"),
        ("boxed_numerics", "did you mean 'numeric'?"),
        ("my.rewards.f", 'did you mean "my.rewards:f"?'),
    ],
)
def test_an_unknown_grader_is_refused_with_the_nearest_name(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match="allowed: exact_match, positional_match, f1, numeric, math") as caught:
        find_grader(name)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("response", "label", "slimes"),
    [
        (r"\boxed{x+1}", "1+x", 1),  # equal by algebra
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 0),  # not reduced
        ("just 42", "42", 0),  # no box
    ],
)
def test_numeric_is_not_slimes_math(response: str, label: str, slimes: float) -> None:
    """What slime's tests (tests/test_rm_math.py at commit c7535ac7) say of its math, and this one answers otherwise."""
    assert numeric(response, label) == 1 - slimes
