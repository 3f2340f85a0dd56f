"""Settings from TOML: the Config base, includes, overrides, errors that name file, key and allowed values."""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar, cast, get_args, get_origin

import msgspec
import msgspec.inspect

from runtime.settings.hints import flag_hint, hint

Table = dict[str, Any]
SET: Final = "--set"  # the origin of a key that an override wrote
SHIPPED_TOPOLOGIES: Final = Path(__file__).resolve().parents[2] / "topologies"
MAX_SHOWN: Final = 80  # characters of an offending value


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every settings table. Frozen; unknown keys are refused; bounds are checked when it is decoded."""


T = TypeVar("T", bound=Config)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing wrong with the input: where, what, and the value that was given if there was one."""

    key: str  # dotted, list items by index: "data.0.path"; "" for a whole file
    message: str
    value: str | None = None  # as it would stand in TOML
    file: str | None = None  # or "--set"

    def __str__(self) -> str:
        where = f"{self.key} = {self.value}" if self.value is not None else self.key
        return ": ".join(part for part in (self.file, where, self.message) if part)


class TopologyError(Exception):
    """The topology or its recipe cannot be used. Carries every problem found, one line each in its text."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """Merged tables, the files they came from (the named one last) and which of them wrote each key."""

    tables: Table
    files: tuple[Path, ...]
    origins: dict[str, str]

    def origin(self, key: str) -> str:
        """Name who wrote a key: a file as the caller spelled it, or "--set"; the named file if nobody did."""
        while key:
            if key in self.origins:
                return self.origins[key]
            key = key.rpartition(".")[0]
        return str(self.files[-1])


def load_tables(path: Path, overrides: Sequence[str], schema: type[Config]) -> Loaded:
    """Read a TOML file with its includes, or the JSON of a run directory, then apply `key=value` overrides in order.

    `include` names one file or a list, looked up beside the including file, then beside `path`, then among the
    shipped topologies. Later text wins: includes in order, the file itself, overrides. Tables merge key by key,
    anything else (arrays too) is replaced whole.

    Raises:
        TopologyError: a file that cannot be read or parsed, an include that loops, an override that fits nowhere.
    """
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
    """Turn merged tables into typed settings.

    Raises:
        TopologyError: every unknown or missing key, wrong type and value out of bounds, not only the first.
    """
    problems = [
        msgspec.structs.replace(problem, file=loaded.origin(problem.key))
        for problem in find_problems(loaded.tables, schema)
    ]
    if problems:
        raise TopologyError(problems)
    return msgspec.convert(loaded.tables, schema)


class _Reader:
    """Follows includes and remembers who wrote which key."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.files: list[Path] = []
        self.origins: dict[str, str] = {}

    def read(self, path: Path, including: tuple[Path, ...]) -> Table:
        if path.resolve() in including:
            raise TopologyError([Problem(key="include", message=f"{path} includes itself", file=str(including[-1]))])
        own = _parse(path)
        merged: Table = {}
        for name in _includes(own.pop("include", ()), path):
            self._merge(merged, self.read(self._find(name, path), (*including, path.resolve())), None)
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
            if origin is not None:  # an included file has marked its own keys already
                self._forget(key)
                self.origins[key] = origin

    def _forget(self, key: str) -> None:
        for known in [known for known in self.origins if known == key or known.startswith(f"{key}.")]:
            del self.origins[known]


def _parse(path: Path) -> Table:
    try:
        text = path.read_text(encoding="utf-8")
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


def find_problems(value: object, expected: Any, key: str = "", schema: Any = None) -> Iterator[Problem]:
    """Compare plain values with a schema, going on after each problem.

    Args:
        value: what TOML gave: tables, lists, scalars.
        expected: a Config, or any type msgspec can convert to.
        key: dotted position of `value`.
        schema: what is expected of the whole, to find a key that stands in the wrong table; none: `expected`.
    """
    schema = schema or expected
    item = _item_type(expected)
    if _is_config(expected):
        yield from _table_problems(value, expected, key, schema)
    elif item is not None and isinstance(value, dict) and get_origin(expected) is dict:
        for name, entry in cast("Table", value).items():
            yield from (_key_problem(problem, name) for problem in find_problems(name, get_args(expected)[0], key))
            yield from find_problems(entry, item, f"{key}.{name}", schema)
    elif item is not None and isinstance(value, list) and get_origin(expected) is tuple:
        for index, entry in enumerate(cast("list[object]", value)):
            yield from find_problems(entry, item, f"{key}.{index}", schema)
    else:
        try:
            msgspec.convert(value, expected)
        except msgspec.ValidationError as error:
            shown = show(cast("object", value))
            yield Problem(key=key, value=shown, message=f"{_readable(error)}; allowed: {describe(expected)}")


def _key_problem(problem: Problem, name: str) -> Problem:
    return Problem(key=f"{problem.key}.{name}", message=f"the name does not fit: {problem.message}")


def _table_problems(value: object, expected: type[Config], key: str, schema: Any) -> Iterator[Problem]:
    if not isinstance(value, dict):
        meant = flag_hint(key)
        yield Problem(key=key, value=show(value), message="expected a table" + (f"; {meant}" if meant else ""))
        return
    table = cast("Table", value)
    fields = {field.encode_name: field for field in msgspec.structs.fields(expected)}
    prefix = f"{key}." if key else ""
    for name in table.keys() - fields.keys():
        yield Problem(key=f"{prefix}{name}", message=unknown_key(f"{prefix}{name}", list(fields), schema))
    for name, field in fields.items():
        if name in table:
            yield from find_problems(table[name], field.type, f"{prefix}{name}", schema)
        elif field.required:
            yield Problem(key=f"{prefix}{name}", message=f"missing; expected {describe(field.type)}")


def unknown_key(key: str, allowed: Sequence[str], schema: Any) -> str:
    """Say that a key does not exist, what may have been meant, and which exist in its table."""
    meant = hint(key, allowed, keys_of(schema))
    return f"unknown key{f', {meant}' if meant else ''}; allowed: {', '.join(allowed) or 'none'}"


@cache
def keys_of(schema: Any) -> tuple[str, ...]:
    """Every key of a Config, dotted, tables included; of lists and named tables those of one item, "data.0.path"."""
    keys: list[str] = []
    for field in msgspec.structs.fields(schema) if _is_config(schema) else ():
        item = _item_type(field.type)
        place = f"{field.encode_name}." + (
            "" if item is None else "<name>." if get_origin(field.type) is dict else "0."
        )
        keys += [field.encode_name, *(place + key for key in keys_of(item or field.type))]
    return tuple(keys)


def apply_override(tables: Table, override: str, schema: type[Config]) -> str:
    """Write one `dotted.key=value` into merged tables; list items go by index, one past the end appends.

    The value is read as TOML if that fits the schema there (1e-3, true, ["a"], {x = 1}), else as bare text;
    `none` unsets a key that may be unset.

    Returns:
        The key.

    Raises:
        ValueError: no "=", no such key, or an index that is out of range.
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
            holder = cast("Table", holder).setdefault(part, [] if following.isdigit() else {})
        if not last and not isinstance(holder, dict | list):
            raise ValueError(f"{part} is {show(cast('object', holder))}, not a table")
    return key


def _set_item(items: list[Any], part: str, value: object, *, last: bool) -> Any:
    if not part.isdigit() or int(part) > len(items):
        raise ValueError(f"no item {part}: there are {len(items)}, counted from 0")
    if int(part) == len(items):
        items.append({})
    if last:
        items[int(part)] = value
    return items[int(part)]


def type_at(schema: Any, parts: Sequence[str]) -> Any:
    """Find the type of a dotted key.

    Raises:
        ValueError: there is no such key; names the close ones.
    """
    whole = schema
    for number, part in enumerate(parts):
        item = _item_type(schema)
        if _is_config(schema):
            fields = {field.encode_name: field.type for field in msgspec.structs.fields(schema)}
            if part not in fields:
                message = unknown_key(".".join(parts[: number + 1]), list(fields), whole)
                raise ValueError(f"{message} (in {'.'.join(parts[:number]) or 'the topology'})")
            schema = fields[part]
        elif item is not None:
            schema = item
        elif get_origin(schema) is dict:
            return Any
        else:
            raise ValueError(f"{'.'.join(parts[:number])} is a plain value: it has no key {part}")
    return schema


def _typed(text: str, expected: Any) -> Any:
    """Read an override's text as what the schema expects; a misfit is left for `find_problems` to report."""
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


def _is_config(expected: Any) -> bool:
    return isinstance(expected, type) and issubclass(expected, Config)


def _item_type(expected: Any) -> Any | None:
    """The Config held by a `dict[str, C]` or `tuple[C, ...]`, if it is one of these."""
    arguments = get_args(expected)
    if get_origin(expected) is dict and _is_config(arguments[1]):
        return arguments[1]
    if get_origin(expected) is tuple and _is_config(arguments[0]):
        return arguments[0]
    return None


def show(value: object) -> str:
    """Spell a value as TOML or JSON would, cut when long."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def _readable(error: msgspec.ValidationError) -> str:
    message = str(error).partition(" - at `$`")[0].replace("`", "")
    return message[:1].lower() + message[1:]


def describe(expected: Any) -> str:
    """Say in words what a type allows: "int >= 1", "one of 'a', 'b'"."""
    return _describe(msgspec.inspect.type_info(expected))


def _describe(info: msgspec.inspect.Type) -> str:
    match info:
        case msgspec.inspect.Metadata(type=inner):
            return _describe(inner)
        case msgspec.inspect.UnionType(types=types):
            parts = [_describe(part) for part in types if not isinstance(part, msgspec.inspect.NoneType)]
            return " or ".join(parts) + (", or unset" if len(parts) < len(types) else "")
        case msgspec.inspect.LiteralType(values=values):
            return f"one of {', '.join(repr(value) for value in values)}"
        case msgspec.inspect.VarTupleType(item_type=item):
            return f"a list, each {_describe(item)}"
        case msgspec.inspect.StructType() | msgspec.inspect.DictType():
            return "a table"
        case msgspec.inspect.StrType(pattern=pattern, min_length=shortest):
            return f"a string matching {pattern}" if pattern else "a string" + (" not empty" if shortest else "")
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            name = "int" if isinstance(info, msgspec.inspect.IntType) else "float"
            bounds = ((">=", info.ge), (">", info.gt), ("<=", info.le), ("<", info.lt))
            return " and ".join([name, *(f"{sign} {bound}" for sign, bound in bounds if bound is not None)]).replace(
                f"{name} and ", f"{name} "
            )
        case _:
            return type(info).__name__.removesuffix("Type").lower()
