"""Descriptions of settings, read from the comments in their source.

A description is the block of comment lines directly above the field, joined by spaces, or else the comment at the end
of the field's last line. A field with a block and the comment `# expert` at its end is an expert setting.
"""

import ast
import inspect
import io
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Final

from runtime.settings.reading.config import Config

EXPERT: Final = "expert"


@cache
def meanings(config: type[Config]) -> Mapping[str, str]:
    """Return the description of each field of a table by name, inherited fields included; "" where there is none."""
    found: dict[str, str] = {}
    for base in reversed(config.__mro__):
        if issubclass(base, Config):
            found |= _own_meanings(inspect.getsource(base))
    return found


@cache
def expert_settings(config: type[Config]) -> frozenset[str]:
    """Return the names of the fields of a table that are expert settings, inherited ones included."""
    sources = [inspect.getsource(base) for base in config.__mro__ if issubclass(base, Config)]
    return frozenset(
        name for source in sources for name, _, last in _fields(source) if _comments(source)[1].get(last) == EXPERT
    )


def _own_meanings(source: str) -> dict[str, str]:
    above, beside = _comments(source)
    return {name: _block(above, first) or beside.get(last, "") for name, first, last in _fields(source)}


def _fields(source: str) -> Iterator[tuple[str, int, int]]:
    """Yield the name, first line and last line of each field of a class."""
    (table,) = ast.parse(source).body
    if not isinstance(table, ast.ClassDef):
        raise TypeError(f"not the source of a class: {source.partition(':')[0]}")
    for field in table.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            yield field.target.id, field.lineno, field.end_lineno or field.lineno


def _block(above: Mapping[int, str], line: int) -> str:
    """Join the comment lines that end directly above a line; "" if there are none."""
    first = line
    while first - 1 in above:
        first -= 1
    return " ".join(above[number] for number in range(first, line))


def _comments(source: str) -> tuple[dict[int, str], dict[int, str]]:
    """Return comments by line number, without the hash: those that have a line of their own, and those behind code."""
    above: dict[int, str] = {}
    beside: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            own_line = not token.line[: token.start[1]].strip()
            (above if own_line else beside)[token.start[0]] = token.string.lstrip("# ")
    return above, beside
