"""Overrides of single keys, `dotted.key=value`, applied to plain tables."""

import tomllib
from typing import Any, cast

import msgspec

from runtime.settings.reading.config import Config
from runtime.settings.reading.schema import type_at
from runtime.util.formatting import show


def apply_override(tables: dict[str, Any], override: str, schema: type[Config]) -> str:
    """Apply one `dotted.key=value` to merged tables. List items go by index; one past the end appends.

    The value is parsed as TOML if the result fits the schema there (1e-3, true, ["a"], {x = 1}), else it is plain text.
    `none` unsets a key that may be unset.

    Returns:
        The key.

    Raises:
        ValueError: no "=", no such key, or an index out of range.
    """
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ValueError("expected key=value")
    parts = key.split(".")
    value = _typed(text.strip(), type_at(schema, parts))
    holder: Any = tables
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        last = following is None
        if isinstance(holder, list):
            holder = _set_item(cast("list[Any]", holder), part, value, last=last)
        elif last:
            holder[part] = value
        else:
            holder = cast("dict[str, Any]", holder).setdefault(part, [] if following.isdigit() else {})
        if not last and not isinstance(holder, dict | list):
            raise ValueError(f"{part} is {show(cast('object', holder))}, not a table")
    return key


def _set_item(items: list[Any], part: str, value: object, *, last: bool) -> Any:
    if not part.isdigit() or int(part) > len(items):
        raise ValueError(f"no item {part}: the list has length {len(items)}, and items are counted from 0")
    if int(part) == len(items):
        items.append({})
    if last:
        items[int(part)] = value
    return items[int(part)]


def _typed(text: str, expected: Any) -> Any:
    """Parse an override's text as the schema expects it. If it does not fit, `find_problems` reports it."""
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    candidates = [value, text, *([None] if text.lower() in {"none", "null"} else [])]
    for candidate in reversed(candidates) if candidates[-1] is None else candidates:
        try:
            msgspec.convert(candidate, expected)
        except msgspec.ValidationError:
            continue
        return candidate
    return value
