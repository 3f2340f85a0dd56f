"""docs/run/troubleshooting.md: each line that it explains is one that the code writes."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "run" / "troubleshooting.md"
# What stands in the page for a value: capital letters, numbers, names of processes and metrics, and what is left out.
VALUE: Final = re.compile(
    r"\(?\bv?[A-Z]+\b\)?(?: s\b)?|\b\d+\b(?: s\b)?|trainer\.1|\btrainer\b|train/loss nan|NaN|\.\.\."
)


def texts(tree: ast.AST) -> Iterator[str]:
    """All texts of a module; what an f-string fills in is left out, in the place of a value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)


@cache
def said() -> str:
    files = (path for folder in ("actors", "runtime", "bin") for path in (ROOT / folder).rglob("*.py"))
    return "\n".join(text for file in files for text in texts(ast.parse(file.read_text(encoding="utf-8"))))


def pieces(line: str) -> list[str]:
    """The parts of a line between values, of two words or more."""
    return [piece.strip(" :;,()") for piece in VALUE.split(line) if len(piece.split()) > 1]


def is_written(piece: str, written: str) -> bool:
    """Whether three words in a row, or the two that there are, stand in a text of the code."""
    words = piece.split()
    return any(" ".join(words[start : start + 3]) in written for start in range(max(len(words) - 2, 1)))


def test_each_line_of_the_page_is_one_that_the_code_writes() -> None:
    rows = [row.split("|")[1] for row in PAGE.read_text(encoding="utf-8").splitlines() if row.startswith("| `")]
    lines = [line for row in rows for line in re.findall(r"`([^`]+)`", row)]
    assert len(lines) > 30
    written = said()
    assert [piece for line in lines for piece in pieces(line) if not is_written(piece, written)] == []


def test_a_line_that_no_code_writes_is_found() -> None:
    (piece,) = pieces("N prompt groups have vanished: REASON")
    assert piece == "prompt groups have vanished"
    assert not is_written(piece, said())
