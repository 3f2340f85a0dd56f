"""Names on the bus that foreign clients see: score requests, their answers, stored prompts."""

import pytest

from messages import subjects
from messages.subjects import GRADER_NAME, grader_token, scores_subject, scores_token


@pytest.mark.parametrize("name", ["math", "deepscaler", "a", "A9_-", "x" * 64])
def test_a_plain_grader_name_is_its_own_token(name: str) -> None:
    assert grader_token(name) == name


@pytest.mark.parametrize(
    "name", ["my/file.py:function", "pkg.module:f", "_own", "__x", "-a", "*", ">", "a b", "", "x" * 65, "é", "a.b\r\n"]
)
def test_any_other_name_gets_a_token_with_a_hash(name: str) -> None:
    token = grader_token(name)
    assert GRADER_NAME.fullmatch(token)
    assert token != name


def test_names_that_look_alike_get_different_tokens() -> None:
    names = ["a/b.py:f", "a.b/py:f", "a-b-py-f", "_own", "own", subjects.OWN_GRADERS + " "]
    assert len({grader_token(name) for name in names}) == len(names)


def test_the_token_of_a_path_is_readable() -> None:
    assert grader_token("my/file.py:function") == "my-file-py-function-6f5b9587"


@pytest.mark.parametrize(
    "subject",
    [
        "phy.r.scores.code.x",
        "phy.x.scores.math.x",
        "phy.r.scores.math",
        "phy.r.scores.math.",
        "phy.r.scores.math.*",
        "phy.r.scores.math.>",
        "phy.r.scores.math.x.y",
        "phy.r.scores.math.a\r\nPUB x 0",
        "phy.r.scores.math." + "a" * 600,
        "_INBOX.r.rollout.x",
        "phy.r.event.ledger.x",
        "",
    ],
)
def test_only_subjects_of_a_grader_take_its_answers(subject: str) -> None:
    assert scores_token("r", subject) != "math"


def test_an_answer_goes_to_a_subject_of_its_grader() -> None:
    assert scores_token("r", scores_subject("r", "math", "Xy7")) == "math"
