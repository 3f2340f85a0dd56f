"""Templates, answers and errors of judges, by hand."""

import json
from typing import Any

import pytest

from actors.reward.judging.requests import JudgeError, answer_in, error_of, render, request_of
from actors.reward.samples import GradedSample
from tests.support.judging import completion

SAMPLE = GradedSample(prompt="2+2?", response="It is {label}.", label=4, metadata={"rubric": "be short", "tags": ["a"]})


def test_a_template_takes_the_values_of_the_sample_and_never_fills_a_filled_text() -> None:
    template = 'Q {prompt} A {response} T {label} R {metadata.rubric} {metadata.tags} {"json": 1} {other}'
    assert render(template, SAMPLE) == 'Q 2+2? A It is {label}. T 4 R be short ["a"] {"json": 1} {other}'


@pytest.mark.parametrize(("template", "name"), [("{metadata.none}", "metadata.none"), ("{label}", "label")])
def test_a_missing_value_is_named(template: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"the sample has no {name}, which the template"):
        render(template, GradedSample())


def test_a_request_has_one_message_and_further_fields() -> None:
    body = request_of("hi", 0.5, 7, {"top_p": 0.9})
    messages = [{"role": "user", "content": "hi"}]
    assert body == {"messages": messages, "temperature": 0.5, "max_tokens": 7, "top_p": 0.9}
    assert "max_tokens" not in request_of("hi", 0.5, 7, {"max_completion_tokens": 9})


def test_an_answer_is_its_text_and_whether_it_was_cut() -> None:
    assert answer_in(json.dumps(completion("7")).encode())[:2] == ("7", False)
    assert answer_in(json.dumps(completion("7", "length")).encode())[:2] == ("7", True)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (completion(None), "the answer has no text; it ended with 'stop'"),
        ({"choices": []}, "no chat completion"),
        ({"error": "x"}, "no chat completion"),
        ([], "no chat completion"),
    ],
)
def test_a_response_without_an_answer_is_named(body: Any, reason: str) -> None:
    with pytest.raises(JudgeError, match=f"^bad_answer: {reason}"):
        answer_in(json.dumps(body).encode())
    with pytest.raises(JudgeError, match="no chat completion"):
        answer_in(b"\xff\xfe")


@pytest.mark.parametrize(
    ("status", "cause"), [(429, "rate_limited"), (503, "failed"), (500, "failed"), (400, "refused"), (302, "refused")]
)
def test_a_status_has_a_cause(status: int, cause: str) -> None:
    error = error_of(status, b"why  so", "3")
    assert (error.cause, error.status, str(error)) == (cause, status, f"{cause}: status {status}: why so")
    assert error.wait_s == (3.0 if cause != "refused" else 0.0)
    assert error_of(status, b"", "Wed, 21 Oct").wait_s == 0.0


@pytest.mark.parametrize("tokens", [-5, 1 << 60, 1.5, "many"])
def test_a_count_of_tokens_that_cannot_be_is_a_bad_answer(tokens: object) -> None:
    """A negative count would refill the budget, and a huge one could not be stored."""
    body = {"choices": [{"message": {"content": "7"}}], "usage": {"total_tokens": tokens}}
    with pytest.raises(JudgeError, match="no chat completion"):
        answer_in(json.dumps(body).encode())
