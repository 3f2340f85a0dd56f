"""Reads settings files: TOML with includes and overrides of single keys, or a run directory's JSON; records origins."""

import codecs
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec

from runtime.settings.reading.access import Access
from runtime.settings.reading.config import SET, Config, Problem, TopologyError
from runtime.settings.reading.foreign import Asked, harmless_part
from runtime.settings.reading.schema import chosen_keys, find_problems, stored_tables, type_at
from runtime.util.formatting import show

Table = dict[str, Any]
BOMS: Final = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
SHIPPED_TOPOLOGIES: Final = Path(__file__).resolve().parents[3] / "topologies"

NONE: Final = "none"  # type of an optional table that is left out
T = TypeVar("T", bound=Config)


def apply_override(tables: dict[str, Any], override: str, schema: type[Config]) -> str:
    """Apply one `dotted.key=value` to merged tables. List items go by index; one past the end appends.

    The value is parsed as TOML if the result fits the schema there (1e-3, true, ["a"], {x = 1}), else it is plain text.
    `none` unsets a key that may be unset. Another `type` replaces its table.

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
            if part == "type" and _is_other(key.removesuffix(".type"), cast("Table", holder), {"type": value}, schema):
                holder.clear()
            holder[part] = value
        else:
            table = cast("dict[str, Any]", holder)
            if table.get(part) is None:  # absent, or null in a JSON file
                table[part] = [] if following.isdigit() else {}
            holder = table[part]
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


def _is_other(key: str, before: Mapping[str, Any], after: Mapping[str, Any], schema: type[Config]) -> bool:
    """Return whether a table names another `type` than the one before, which it then replaces."""
    keys = chosen_keys(schema)
    return key in keys and "type" in after and after["type"] != before.get("type", keys[key].default)


def _fill_types(tables: Table, schema: type[Config]) -> None:
    """Write the default `type` of tables that leave it out, and leave out optional tables of the type "none"."""
    for key, (default, _) in chosen_keys(schema).items():
        *outer, name = key.split(".")
        holder: Any = tables
        for part in outer:
            holder = cast("Table", holder).get(part) if isinstance(holder, dict) else None
        table: Any = cast("Table", holder).get(name) if isinstance(holder, dict) else None
        if not isinstance(table, dict):
            continue
        if default is not None:
            cast("Table", table).setdefault("type", default)
        elif table == {"type": NONE}:
            holder[name] = None


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """Merged tables, their files (the named one last), and the origin of each key."""

    tables: Table
    files: tuple[Path, ...]
    origins: dict[str, str]
    left_out: tuple[Asked, ...] = ()  # keys of a stranger's file that were not taken, and that no override sets

    def origin(self, key: str) -> str:
        """Return the origin of a key: a file as the caller spelled it, or "--set". By default the named file."""
        while key:
            if key in self.origins:
                return self.origins[key]
            key = key.rpartition(".")[0]
        return str(self.files[-1])


def shipped_topologies() -> list[str]:
    """Return the names of the shipped topologies, such as "laptop" and "examples/sft"."""
    found = [path for place in ("*", "examples/*", "slime/*") for path in SHIPPED_TOPOLOGIES.glob(f"{place}.toml")]
    return sorted(str(path.relative_to(SHIPPED_TOPOLOGIES).with_suffix("")) for path in found)


def find_topology(path: Path) -> Path:
    """Return the file of a topology. A path that is not a file may be the name of a shipped topology.

    Raises:
        TopologyError: there is neither a file nor a shipped topology of this name.
    """
    shipped = shipped_topologies()
    name = path.with_suffix("") if path.name else path  # "/" and "." have no name
    if path.is_file() or str(name) not in shipped:
        if path.suffix or path.exists():
            return path
        message = f"is neither a file nor a shipped topology ({', '.join(shipped)})"
        raise TopologyError([Problem(key="", message=message, file=str(path))])
    return SHIPPED_TOPOLOGIES / name.with_suffix(".toml")


def load_tables(path: Path, overrides: Sequence[str], schema: type[Config], *, foreign: bool = False) -> Loaded:
    """Read a TOML file with its includes, or the JSON of a run directory, then apply `key=value` overrides in order.

    `path` may be the name of a shipped topology, such as `laptop`. `include` names one file or a list. Each is looked
    up next to the including file, then next to `path`, then among the shipped topologies. Later text wins: includes in
    order, the file itself, overrides. Tables merge key by key; anything else, including arrays, is replaced as a whole.
    A table with another `type` is replaced too. The order of overrides decides, but each `type` comes first.
    A `foreign` file may be a stranger's: only its harmless keys are taken, and no `include`.

    Raises:
        TopologyError: a file cannot be read or parsed, an include loops, or an override fits no key.
    """
    path = find_topology(path)
    reader = _Reader(path.parent, schema)
    asked: list[Asked] = []
    if foreign:
        tables, asked = _harmless(path, schema)
        reader.files.append(path)
    else:
        tables = reader.read(path, ())
    problems: list[Problem] = []
    for override in sorted(overrides, key=lambda each: each.partition("=")[0].strip() not in _type_keys(schema)):
        try:
            key = apply_override(tables, override, schema)
        except ValueError as error:
            problems.append(Problem(key=override, message=str(error), file=SET))
        else:
            reader.mark_override(key)
    if problems:
        raise TopologyError(problems)
    _fill_types(tables, schema)
    left_out = tuple(each for each in asked if not _is_set(each.key, reader.origins))
    return Loaded(tables=tables, files=tuple(reader.files), origins=reader.origins, left_out=left_out)


def _type_keys(schema: type[Config]) -> set[str]:
    return {f"{key}.type" for key in chosen_keys(schema)}


def _harmless(path: Path, schema: type[Config]) -> tuple[Table, list[Asked]]:
    tables = _parse(path, schema)
    includes = tables.pop("include", None)
    taken, asked = harmless_part(tables, schema)
    if includes is not None:
        asked.insert(0, Asked(key="include", value=includes, access=Access.READ))
    return taken, asked


def _is_set(key: str, origins: Mapping[str, str]) -> bool:
    return any(key == known or key.startswith(f"{known}.") for known in origins)


def convert(loaded: Loaded, schema: type[T]) -> T:
    """Convert merged tables to typed settings.

    Raises:
        TopologyError: lists every unknown or missing key, wrong type and value out of bounds.
    """
    problems = [
        msgspec.structs.replace(problem, file=loaded.origin(problem.key))
        for problem in find_problems(loaded.tables, schema)
    ]
    if problems:
        raise TopologyError(problems)
    return msgspec.convert(loaded.tables, schema)


class _Reader:
    """Follows includes and records the origin of each key."""

    def __init__(self, root: Path, schema: type[Config]) -> None:
        self._root, self._schema = root, schema
        self.files: list[Path] = []
        self.origins: dict[str, str] = {}

    def read(self, path: Path, including: tuple[Path, ...]) -> Table:
        if (place := Path(os.path.realpath(path))) in including:  # does not raise for a symlink loop
            raise TopologyError([Problem(key="include", message=f"{path} includes itself", file=str(including[-1]))])
        own = _parse(path, self._schema)
        merged: Table = {}
        for name in _includes(own.pop("include", ()), path):
            self._merge(merged, self.read(self._find(name, path), (*including, place)), None)
        self._merge(merged, own, str(path))
        self.files.append(path)
        return merged

    def mark_override(self, key: str) -> None:
        self._forget(key)
        self.origins[key] = SET

    def _find(self, name: str, including: Path) -> Path:
        places = (including.parent, self._root, SHIPPED_TOPOLOGIES)
        for place in places:
            if (place / name).is_file():
                return place / name
        looked = ", ".join(dict.fromkeys(str(place) or "." for place in places))
        message = f"no such file (looked in {looked})"
        raise TopologyError([Problem(key="include", value=show(name), message=message, file=str(including))])

    def _merge(self, into: Table, new: Mapping[str, Any], origin: str | None, prefix: str = "") -> None:
        for name, value in new.items():
            key = f"{prefix}{name}"
            before: Any = into.get(name, {})
            both = isinstance(value, dict) and isinstance(before, dict)
            if both and not _is_other(key, cast("Table", before), cast("Table", value), self._schema):
                self._merge(into.setdefault(name, {}), cast("Table", value), origin, f"{key}.")
                continue
            into[name] = value
            if origin is not None:  # an included file already recorded its own keys
                self._forget(key)
                self.origins[key] = origin

    def _forget(self, key: str) -> None:
        for known in [known for known in self.origins if known == key or known.startswith(f"{key}.")]:
            del self.origins[known]


def _parse(path: Path, schema: type[Config]) -> Table:
    try:
        if path.exists() and not path.is_file():
            raise OSError("is not a regular file: a run reads its topology again at each start")  # or it would hang
        if (data := path.read_bytes()).startswith(BOMS):
            message = "begins with a byte-order mark (BOM): save it as plain UTF-8, without one"
            raise TopologyError([Problem(key="", message=message, file=str(path))])
        text = data.decode()
        return stored_tables(text, schema) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
    except msgspec.DecodeError as error:
        message = f"not valid JSON: {error}"
    except RecursionError:
        message = "is nested too deeply"
    except tomllib.TOMLDecodeError as error:
        message = f"not valid TOML: {error}"
    except UnicodeDecodeError as error:
        message = f"not UTF-8 text: {error}"
    raise TopologyError([Problem(key="", message=message, file=str(path))])


def _includes(value: object, path: Path) -> tuple[str, ...]:
    try:
        names = msgspec.convert(value, str | tuple[str, ...])
    except msgspec.ValidationError as error:
        message = "expected a file name or a list of file names"
        raise TopologyError([Problem(key="include", value=show(value), message=message, file=str(path))]) from error
    return (names,) if isinstance(names, str) else names
