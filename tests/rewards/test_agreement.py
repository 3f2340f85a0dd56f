"""The comparisons of `just rewards`, on the labelled pairs and on a few rows."""

import json
from pathlib import Path

import pytest

from tests.rewards.__main__ import compare, labelled, main


@pytest.mark.slow
def test_math_agrees_with_math_verify_but_for_its_known_faults() -> None:
    """Where both answer. It takes 5 s of each comparison that math-verify gives up."""
    pairs, known = labelled()
    checked = compare(pairs, "labelled", known)
    assert checked.number >= 130
    assert checked.wrong == []


def test_a_wrong_verdict_is_an_exit_code_of_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checked = compare([("√4", "2")], "differs")
    assert checked.wrong == ["√4 for 2: here True, math-verify False"]
    rows = [{"question": "?", "answer": f"so <<{n}>>\n#### {n:,}"} for n in (18, 1234, 3.5)]
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    assert main([str(tmp_path), "--labelled", "no"]) == 0
    assert "| math: right answers | 16 | 0 |" in capsys.readouterr().out  # four spellings of four rows
