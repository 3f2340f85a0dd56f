"""A grader that cannot grade any sample is refused before the start; one that fails on some answers adds a note."""

from pathlib import Path
from typing import Any, cast

import pytest

from actors.buffer.preflight import SourceSummary
from actors.buffer.prompts.prompts import Reader
from actors.reward.causes import is_of_machine
from actors.reward.grader_check import SampleRow, check_graders
from actors.reward.grades import Graded
from actors.reward.trial_answers import answers_to, failure_of
from messages import Int32Array, Prompt
from runtime.node.checks.context import SourceRows
from tests.build.topology import topology_with
from tests.support.checks import context_of

GRADERS = r"""
import os, re

def returns_none(sample): sample.response == sample.label
def without_key(sample): return {"acc": 1.0}
def wrong_key(sample): return sample.metadata["answer"]
async def awaited(sample): return sample.metadata["answer"]
def all_of(samples): return [sample.metadata["answer"] for sample in samples]
class Object:
    def __call__(self, sample): return "1.0"
an_object = Object()
def boxed(sample): return float(re.search(r"\\boxed\{(.*?)\}", sample.response).group(1) == sample.label)
def one_row(sample): return {"p0": {}}.get(sample.prompt, {"score": 1.0})["score"]
def variable(sample): return os.environ["NO_SUCH_VARIABLE"]
def program(sample):
    import subprocess
    try: subprocess.run(["no-such-program"])
    except OSError as error: raise RuntimeError("the program failed") from error
"""


@pytest.fixture
def graders(tmp_path: Path) -> Path:
    (tmp_path / "graders.py").write_text(GRADERS)
    return tmp_path / "graders.py"


def checked(function: str, *, group: bool = False, **tables: Any) -> tuple[list[str], list[str]]:
    """Problems and notes of a check on three rows."""
    reward = {"timeout_s": 20.0, "reward_key": "score", "group_rm": group, **tables.pop("reward", {})}
    topology = topology_with(data=[{"name": "d", "path": "p", "rm_type": function}], reward=reward, **tables)
    ids = Int32Array([1])
    first, *others = (
        Prompt(data="d", row=row, text=f"p{row}", prompt_ids=ids, rm_type=function, label=str(row)) for row in range(3)
    )
    context = context_of(topology)
    found = check_graders(context, {"data.0": SampleRow(first, group, tuple(others))})
    return [str(problem) for problem in found], context.notes


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("returns_none", 4, "returned None, not a number"),
        ("without_key", 5, "the dict it returned has no 'score', only 'acc'"),
        ("wrong_key", 6, "raised KeyError('answer')"),
        ("awaited", 7, "raised KeyError('answer')"),
        ("all_of", 8, "raised KeyError('answer')"),
        ("an_object", 10, "returned '1.0' (str), not a number"),
    ],
)
def test_a_grader_that_fails_on_every_row_and_answer_is_refused(
    name: str, line: int, words: str, graders: Path
) -> None:
    (problem,), notes = checked(f"{graders}:{name}", group=name == "all_of")
    refusal = f'data.0.rm_type = "{graders}:{name}": it cannot grade any sample: {words} ({graders}:{line}, in '
    assert problem.startswith(refusal)
    assert "It failed in this way on rows 0, 1, 2 with every answer tried" in problem
    assert notes == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("boxed", "has no attribute 'group'"),
        ("one_row", "raised KeyError('score')"),
        ("variable", "raised KeyError('NO_SUCH_VARIABLE')"),
        ("program", "raised RuntimeError('the program failed')"),
    ],
)
def test_a_grader_that_fails_on_some_answers_or_for_the_machine_is_a_note(name: str, words: str, graders: Path) -> None:
    problems, (note,) = checked(f"{graders}:{name}")
    assert problems == []
    assert f"{graders}:" in note
    assert words in note


@pytest.mark.parametrize(
    "tables",
    [
        {"reward": {"on_failure": "zero"}},
        {"reward": {"failures": {"raised": -1.0}}},
        {"reward": {"sample_fields": ("tokens",)}},
        {"rollout": {"custom_generate": "mine.py:generate"}},
    ],
)
def test_an_exception_that_the_run_may_not_have_or_that_has_a_reward_is_a_note(
    tables: dict[str, Any], graders: Path
) -> None:
    problems, (note,) = checked(f"{graders}:wrong_key", **tables)
    assert problems == []
    assert "raised KeyError('answer')" in note


def test_an_exception_whose_text_depends_on_the_answer_is_about_the_answer() -> None:
    topology = topology_with(data=[])
    trace = 'Traceback\n  File "m.py", line 3, in grade\n    x\nKeyError'
    same = Graded(error="raised KeyError('a')", trace=trace, cause="raised")
    other, none = (
        Graded(error="raised KeyError('b')", trace=trace, cause="raised"),
        Graded(cause="bad_answer", error="x"),
    )
    assert failure_of([same, same], topology) == ("raised KeyError", 'File "m.py", line 3, in grade')
    assert failure_of([none, none], topology) == ("bad_answer",)
    for grades in ([same, other], [same, none], [same, Graded(reward=1.0)], []):
        assert failure_of(grades, topology) is None


def test_the_answers_have_the_usual_forms_of_the_label() -> None:
    prompt = Prompt(data="d", row=0, text="Write <sum>3</sum>.", prompt_ids=Int32Array([1]), label=7)
    written = answers_to(prompt)
    assert len(set(written)) == len(written)
    for form in ("<answer>7</answer>", "\\boxed{7}", "#### 7", "Answer: 7", '"answer": "7"', "<sum>3</sum>"):
        assert any(form in answer for answer in written)
    assert {"7", ""} <= set(written)


def test_an_exception_that_follows_from_one_of_the_machine_is_the_machines() -> None:
    lost, own = ConnectionResetError("x"), KeyError("x")
    own.__cause__ = own  # a chain may be a circle
    assert not is_of_machine(own)
    own.__cause__ = lost
    assert is_of_machine(own)
    for error in (ImportError("x"), TimeoutError(), MemoryError(), FileNotFoundError("x")):
        assert is_of_machine(error)
    for error in (KeyError("x"), ValueError("x"), NameError("x"), ZeroDivisionError()):
        assert not is_of_machine(error)


class AnyLength:
    """A reader for which no prompt is too long."""

    def too_long(self, prompt: Prompt) -> None:
        pass


def test_the_rows_of_a_large_source_are_from_all_over_it() -> None:
    ids, found = Int32Array([1]), SourceSummary(SourceRows("data.0", "data.0.path", "p"), cast("Reader", AnyLength()))
    for first in range(0, 3000, 1000):
        rows = range(first, first + 1000)
        found.add([Prompt(data="d", row=row, text="p", prompt_ids=ids, rm_type=f"m{row % 3 > 0}") for row in rows])
    numbers = [prompt.row for prompt in found.rows.others]
    assert numbers[-1] > 1500
    assert {number % 2 for number in numbers[-7:]} == {0, 1}  # two kinds of rows may take turns
    assert all(number % 3 == 0 for number in numbers)
