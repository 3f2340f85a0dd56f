"""Descriptions of a class's fields or an enum's members: the comments of its source. Reference pages have them.

A description is the block of comment lines directly above a field, joined by spaces, or else the comment at the end of
the field's last line.
"""

import ast
import io
import tokenize
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Field(NamedTuple):
    """One annotated field of a class."""

    name: str
    type: ast.expr
    default: ast.expr | None
    text: str  # its description; "" if there is none
    beside: str  # the comment at the end of its last line


def fields_in(source: str) -> Iterator[Field]:
    """Yield the annotated fields of a class, without class variables.

    Raises:
        TypeError: `source` is not that of a class.
    """
    above, beside = _comments(source)
    for field in _body(source):
        if not isinstance(field, ast.AnnAssign) or ast.unparse(field.annotation).startswith("ClassVar"):
            continue
        if isinstance(field.target, ast.Name):
            at_its_end = beside.get(field.end_lineno or field.lineno, "")
            text = _block(above, field.lineno) or at_its_end
            yield Field(field.target.id, field.annotation, field.value, text, at_its_end)


def members_in(source: str) -> dict[str, str]:
    """Return the description of each member of an enum by name.

    Raises:
        TypeError: `source` is not that of a class.
    """
    above, beside = _comments(source)
    return {
        target.id: _block(above, line.lineno) or beside.get(line.end_lineno or line.lineno, "")
        for line in _body(source)
        if isinstance(line, ast.Assign)
        for target in line.targets
        if isinstance(target, ast.Name)
    }


def _body(source: str) -> list[ast.stmt]:
    (table,) = ast.parse(source).body
    if not isinstance(table, ast.ClassDef):
        raise TypeError(f"not the source of a class: {source.partition(':')[0]}")
    return table.body


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
