"""What grows says why: the numbers of docs/decisions are those of the code, and a higher one has its reason."""

import subprocess

import pytest

from tests.support.ratchet import MEASURES, PAGE, ROOT, lowered, numbers_of, places_in, rows_of, unreasoned

START = """
| files of samples | 5 | 2026-11-29 | The first count. |
| forms of samples | 3 | 2026-11-29 | The first count. |
"""


def shown(revision: str) -> str:
    """The page at a commit; empty if there is none, as in a copy without history."""
    name = f"{revision}:{PAGE.relative_to(ROOT).as_posix()}"
    done = subprocess.run(["git", "show", name], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    return done.stdout if done.returncode == 0 else ""


@pytest.mark.parametrize("measure", MEASURES)
def test_the_number_of_the_page_is_that_of_the_code(measure: str) -> None:
    counted, allowed = MEASURES[measure](), numbers_of(PAGE.read_text())[measure]
    assert counted <= allowed, f"{measure} rose: add a row with the new number and one sentence of reason to {PAGE}"
    assert counted == allowed, "it fell: run python -m tests.support.ratchet"


def test_each_number_has_a_reason_in_a_sentence() -> None:
    rows = rows_of(PAGE.read_text())
    assert {row.measure for row in rows} == MEASURES.keys()
    assert [row for row in rows if not (row.reason.endswith(".") and len(row.reason.split()) > 2)] == []


def test_no_number_rises_without_a_reason_of_its_own() -> None:
    before, committed, now = shown("HEAD^"), shown("HEAD"), PAGE.read_text()
    assert unreasoned(committed, now) == []
    assert unreasoned(before, committed) == []


def test_a_raised_number_is_seen_and_a_row_with_a_reason_allows_it() -> None:
    assert unreasoned(START, START.replace("| 5 |", "| 6 |")) == ["files of samples"]
    assert unreasoned(START, START.replace("| 5 |", "| 4 |")) == []
    assert (
        unreasoned(START, START + "| files of samples | 6 | 2026-12-01 | Teachers have a form of their own. |\n") == []
    )
    assert unreasoned(START, START + "| files of samples | 6 | 2026-12-01 | The first count. |\n") == [
        "files of samples"
    ]


def test_the_last_row_of_a_measure_is_lowered() -> None:
    page = START + "| files of samples | 9 | 2026-12-01 | Teachers. |\n"
    assert numbers_of(lowered(page, {"files of samples": 7, "forms of samples": 3})) == {
        "files of samples": 7,
        "forms of samples": 3,
    }
    assert lowered(page, {"files of samples": 9, "forms of samples": 4}) == page


def test_places_of_a_setting_are_found_in_each_form() -> None:
    text = "x.custom_loss\nf('algorithm.custom_tis')\ng(custom_generate=1)\ncustom_rollout = 'custom'\n"
    keys = {"custom_loss", "custom_tis", "custom_generate", "custom_rollout"}
    assert places_in(text, keys) == {"custom_loss", "custom_tis", "custom_generate"}
