"""The table of docs/results/DATE-grid.md, which the grid writes."""

from datetime import date
from pathlib import Path
from typing import Final

from tests.grid.rows import Row

FOLDER: Final = Path(__file__).parents[2] / "docs" / "results"
TITLE: Final = "# Grid of parallel layouts, {today}\n\nLargest differences from one rank.\n\n"
COLUMNS: Final = ("loss", "entropy", "KL", "gradient norm", "log-probs", "weights", "moments")
HEAD: Final = f"| row | run on | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 2)}\n"


def add(row: Row, found: dict[str, float], *, today: date, folder: Path = FOLDER) -> None:
    """Add a row to the table of the day, in place of an earlier result of the same row."""
    page = folder / f"{today}-grid.md"
    before = page.read_text().splitlines() if page.exists() else []
    lines = {line.split(" | ")[0]: line for line in before if line.startswith("| ") and "run on" not in line}
    values = " | ".join(f"{found[name]:.0e}" for name in COLUMNS)
    lines[f"| {row.name}"] = f"| {row.name} | {today} | {values} |"
    folder.mkdir(parents=True, exist_ok=True)
    page.write_text(TITLE.format(today=today) + HEAD + "".join(f"{line}\n" for line in lines.values()))
