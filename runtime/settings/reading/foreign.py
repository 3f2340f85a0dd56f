"""The part of a stranger's settings that may be taken: keys that declare themselves harmless, see access.py."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, cast

import msgspec

from runtime.functions.load import is_plugin
from runtime.settings.reading.access import Access, function_of
from runtime.settings.reading.config import Config
from runtime.settings.reading.schema import choices, declared, is_config, item_type
from runtime.util.formatting import show
from runtime.util.secrets import without_logins

TRUST: Final = "--trust"
UNKNOWN: Final = "something undeclared"
OMITTED: Final = object()
MAX_SHOWN: Final = 200  # characters of a value
WRITABLE_BY_OTHERS: Final = 0o022


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A key of a stranger's file that is not harmless: only the user may let it in."""

    key: str
    value: Any
    access: Access | None = None  # None: the key declares nothing, or there is no such key


def is_own(directory: Path, runs: Path, files: Sequence[str]) -> bool:
    """Return whether a directory lies below the user's runs, and only the user owns and can write it.

    Args:
        directory: of a dump or a run; symbolic links are resolved.
        runs: the configured run.dir.
        files: names of files in it that must be the user's too, where they exist.
    """
    place = os.path.realpath(directory)
    return Path(place).is_relative_to(os.path.realpath(runs)) and is_written_by_the_user_alone(directory, files)


def is_written_by_the_user_alone(directory: Path, files: Sequence[str]) -> bool:
    """Return whether a directory exists that the user owns and no other user can write, with these files in it."""
    place = Path(os.path.realpath(directory))
    try:
        stats = [path.stat() for path in (place, *(place / name for name in files)) if path.exists()]
    except OSError:
        return False
    return bool(stats) and all(
        found.st_uid == os.geteuid() and not found.st_mode & WRITABLE_BY_OTHERS for found in stats
    )


def harmless_part(tables: dict[str, Any], schema: type[Config]) -> tuple[dict[str, Any], list[Asked]]:
    """Split a stranger's tables into those that may be taken, and the keys that ask for more.

    A stranger does not choose the number of tables that are not harmless either: their list is left out.

    A value that is the default asks for nothing. Neither does the name of a built-in function.
    """
    asked: list[Asked] = []
    return _table(tables, schema, "", asked), asked


def left_out_line(file: str, asked: Sequence[Asked]) -> str:
    """Say in one line which keys of a stranger's file are not taken."""
    return f"{file} may be a stranger's: left out are {named_line(asked)}; {TRUST} takes them"


def let_in_line(file: str, asked: Sequence[Asked]) -> str:
    """Say in one line what the user's consent lets in."""
    return f"{TRUST}: {file} names {named_line(asked, values=True)}"


def named_line(asked: Sequence[Asked], *, values: bool = False) -> str:
    """List keys by what they name, with or without their values."""
    found: dict[str, list[str]] = {}
    for each in asked:
        shown = f"{each.key} = {without_logins(show(each.value))[:MAX_SHOWN]}" if values else each.key
        found.setdefault(UNKNOWN if each.access is None else each.access.value, []).append(shown)
    return "; ".join(f"{what} ({', '.join(keys)})" for what, keys in found.items())


def _table(table: dict[str, Any], schema: type[Config], prefix: str, asked: list[Asked]) -> dict[str, Any]:
    fields = {field.encode_name: field for field in msgspec.structs.fields(schema)}
    taken: dict[str, Any] = {}
    for name, value in table.items():
        key, field = f"{prefix}{name}", fields.get(name)
        if field is None:
            asked.append(Asked(key=key, value=value))
        elif (
            found := value if _is_default(value, field) else _taken(value, field.type, key, schema, asked)
        ) is not OMITTED:
            taken[name] = found
    return taken


def _taken(value: Any, kind: Any, key: str, table: type[Config], asked: list[Asked]) -> Any:
    """Return the part of a value of a table that may be taken, or OMITTED.

    Where tables are expected and others stand, the value is returned as it is: converting it refuses it.
    """
    access, item = declared(table, kind), item_type(kind)
    if tables := choices(kind):
        return _chosen(cast("object", value), tables, key, asked)
    if is_config(kind):
        if not isinstance(value, dict):
            return cast("object", value)
        return _table(cast("dict[str, Any]", value), kind, f"{key}.", asked)
    if isinstance(value, dict) and (item is not None or access is Access.FUNCTION):
        found = _entries(cast("dict[str, Any]", value), item or Annotated[str, function_of(kind)], key, table, asked)
        return {name: entry for name, entry in found.items() if entry is not OMITTED} if _allowed(item) else OMITTED
    if isinstance(value, list) and item is not None:
        found = _entries(dict(enumerate(cast("list[Any]", value))), item, key, table, asked)
        return list(found.values()) if _allowed(item) else OMITTED
    if (
        item is not None
        or access is Access.HARMLESS
        or (access is Access.FUNCTION and table.harmless and _is_built_in(value))
    ):
        return cast("object", value)
    asked.append(Asked(key=key, value=value, access=access))
    return OMITTED


def _chosen(value: Any, tables: Mapping[str, type[Config]], key: str, asked: list[Asked]) -> Any:
    """Return the part of a table with a `type` that may be taken, or OMITTED if it is not whole without the rest."""
    table = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    chosen = tables.get(str(table.get("type")))
    if chosen is None:
        return cast("object", value)
    num_asked = len(asked)
    rest = {name: entry for name, entry in table.items() if name != "type"}
    taken = _table(rest, chosen, f"{key}.", asked)
    needed = {field.encode_name for field in msgspec.structs.fields(chosen) if field.required}
    is_whole = len(asked) == num_asked or needed <= taken.keys()
    return {"type": table["type"], **taken} if is_whole else OMITTED


def _entries(
    entries: Mapping[Any, Any], kind: Any, key: str, table: type[Config], asked: list[Asked]
) -> dict[Any, Any]:
    """Return what may be taken of tables in a list or by name, or of functions by name."""
    found: dict[Any, Any] = {}
    for name, entry in entries.items():
        num_asked, place = len(asked), f"{key}.{name}"
        found[name] = _taken(entry, kind, place, table, asked)
        if not _allowed(kind) and len(asked) == num_asked:
            asked.append(Asked(key=place, value=entry, access=Access.RUNNING))
    return found


def _allowed(kind: Any) -> bool:
    """Return whether a stranger decides how many there are of a kind: not of tables that say how the run runs."""
    return not is_config(kind) or kind.harmless


def _is_built_in(value: Any) -> bool:
    return isinstance(value, str) and not is_plugin(value)


def _is_default(value: Any, field: msgspec.structs.FieldInfo) -> bool:
    """Return whether a value is the field's default. Compared as JSON, where a list is a tuple."""
    if field.required:
        return False
    default: Any = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return msgspec.json.encode(default) == msgspec.json.encode(value)
