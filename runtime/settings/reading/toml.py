"""Reads settings files: TOML with includes and overrides of single keys, or a run directory's JSON; records origins."""

import codecs
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec

from runtime.settings.reading.config import Config, Problem, TopologyError
from runtime.settings.reading.schema import find_problems, type_at
from runtime.util.formatting import show

Table = dict[str, Any]
BOMS: Final = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
SET: Final = "--set"  # origin of keys from overrides
SHIPPED_TOPOLOGIES: Final = Path(__file__).resolve().parents[3] / "topologies"

T = TypeVar("T", bound=Config)


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


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """Merged tables, their files (the named one last), and the origin of each key."""

    tables: Table
    files: tuple[Path, ...]
    origins: dict[str, str]

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
    if path.is_file() or str(name := path.with_suffix("")) not in shipped:
        if path.suffix or path.exists():
            return path
        message = f"is neither a file nor a shipped topology ({', '.join(shipped)})"
        raise TopologyError([Problem(key="", message=message, file=str(path))])
    return SHIPPED_TOPOLOGIES / name.with_suffix(".toml")


def load_tables(path: Path, overrides: Sequence[str], schema: type[Config]) -> Loaded:
    """Read a TOML file with its includes, or the JSON of a run directory, then apply `key=value` overrides in order.

    `path` may be the name of a shipped topology, such as `laptop`. `include` names one file or a list. Each is looked
    up next to the including file, then next to `path`, then among the shipped topologies. Later text wins: includes in
    order, the file itself, overrides. Tables merge key by key; anything else, including arrays, is replaced as a whole.

    Raises:
        TopologyError: a file cannot be read or parsed, an include loops, or an override fits no key.
    """
    path = find_topology(path)
    reader = _Reader(path.parent)
    tables = reader.read(path, ())
    problems: list[Problem] = []
    for override in overrides:
        try:
            key = apply_override(tables, override, schema)
        except ValueError as error:
            problems.append(Problem(key=override, message=str(error), file=SET))
        else:
            reader.mark_override(key)
    if problems:
        raise TopologyError(problems)
    return Loaded(tables=tables, files=tuple(reader.files), origins=reader.origins)


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

    def __init__(self, root: Path) -> None:
        self._root = root
        self.files: list[Path] = []
        self.origins: dict[str, str] = {}

    def read(self, path: Path, including: tuple[Path, ...]) -> Table:
        if (place := Path(os.path.realpath(path))) in including:  # does not raise for a symlink loop
            raise TopologyError([Problem(key="include", message=f"{path} includes itself", file=str(including[-1]))])
        own = _parse(path)
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
            if isinstance(value, dict) and isinstance(into.get(name, {}), dict):
                self._merge(into.setdefault(name, {}), cast("Table", value), origin, f"{key}.")
                continue
            into[name] = value
            if origin is not None:  # an included file already recorded its own keys
                self._forget(key)
                self.origins[key] = origin

    def _forget(self, key: str) -> None:
        for known in [known for known in self.origins if known == key or known.startswith(f"{key}.")]:
            del self.origins[known]


def _parse(path: Path) -> Table:
    try:
        if path.exists() and not path.is_file():
            raise OSError("is not a regular file: a run reads its topology again at each start")  # or it would hang
        if (data := path.read_bytes()).startswith(BOMS):
            message = "begins with a byte-order mark (BOM): save it as plain UTF-8, without one"
            raise TopologyError([Problem(key="", message=message, file=str(path))])
        text = data.decode()
        return msgspec.json.decode(text, type=Table) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
    except msgspec.DecodeError as error:
        message = f"not valid JSON: {error}"
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
