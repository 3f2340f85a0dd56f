"""The table of docs/trainer.md, which the whole grid writes."""

import re
from datetime import date
from pathlib import Path
from typing import Final

from tests.grid.rows import Row

PAGE: Final = Path(__file__).parents[2] / "docs" / "trainer.md"
COLUMNS: Final = ("loss", "entropy", "KL", "gradient norm", "log-probs", "weights", "moments")
HEAD: Final = f"| row | run on | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 2)}\n"
PLACE: Final = re.compile(r"(<!-- grid -->\n)(.*?)(<!-- end of grid -->)", re.DOTALL)


def add(row: Row, found: dict[str, float], *, today: date) -> None:
    """Put a row into the table, or in the place of its last one."""
    text = PAGE.read_text()
    match = PLACE.search(text)
    assert match is not None, f"{PAGE} has no place for the grid"
    lines = {
        line.split(" | ")[0]: line for line in match[2].splitlines() if line.startswith("| ") and "run on" not in line
    }
    values = " | ".join(f"{found[name]:.0e}" for name in COLUMNS)
    lines[f"| {row.name}"] = f"| {row.name} | {today} | {values} |"
    body = HEAD + "".join(f"{line}\n" for line in lines.values())
    PAGE.write_text(PLACE.sub(lambda place: place[1] + body + place[3], text))
