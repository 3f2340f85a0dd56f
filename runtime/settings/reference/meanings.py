"""What the fields of a settings table mean: the comment at the end of each one's line in the source."""

import ast
import inspect
import io
import tokenize
from collections.abc import Mapping
from functools import cache

from runtime.settings.reading.config import Config


@cache
def meanings(config: type[Config]) -> Mapping[str, str]:
    """The meaning of each field of a table by its name, inherited ones included; "" where nothing stands beside it."""
    found: dict[str, str] = {}
    for base in reversed(config.__mro__):
        if issubclass(base, Config):
            found |= _own_meanings(inspect.getsource(base))
    return found


def _own_meanings(source: str) -> dict[str, str]:
    comments = _comments(source)
    (table,) = ast.parse(source).body
    if not isinstance(table, ast.ClassDef):
        raise TypeError(f"not the source of a class: {source.partition(':')[0]}")
    return {
        field.target.id: comments.get(field.end_lineno or field.lineno, "")
        for field in table.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def _comments(source: str) -> dict[int, str]:
    """The comments of a source by the number of their line, without the hash."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
