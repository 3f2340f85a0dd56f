"""The table of a day's grid holds the newest result of each row."""

from datetime import date
from pathlib import Path

from tests.grid.rows import Row
from tests.grid.table import COLUMNS, add


def test_a_row_that_runs_again_takes_the_place_of_its_last_result(tmp_path: Path) -> None:
    one, other, today = Row("TP2"), Row("PP2"), date(2026, 1, 2)
    for row, value in ((one, 1e-3), (other, 2e-3), (one, 3e-3)):
        add(row, dict.fromkeys(COLUMNS, value), today=today, folder=tmp_path)
    text = (tmp_path / "2026-01-02-grid.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "2026-01-02" in line]
    assert [line.split(" | ")[:3] for line in rows] == [
        [f"| {one.name}", "2026-01-02", "3e-03"],
        [f"| {other.name}", "2026-01-02", "2e-03"],
    ]
