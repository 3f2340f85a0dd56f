"""Checks plain tables against a schema: its keys, and problems of the values."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import cache
from types import NoneType
from typing import Any, Final, Literal, NamedTuple, TypeGuard, TypeVar, cast, get_args, get_origin

import msgspec
import msgspec.inspect

from runtime.functions.table import UserFunction
from runtime.settings.reading.access import Access, access_of, function_of, undeclared
from runtime.settings.reading.config import Choice, Config, Problem, type_of
from runtime.settings.reading.former import former_keys, in_new_form
from runtime.settings.reading.hints import flag_hint, hint, our_value, setting_hint
from runtime.util.formatting import show

C = TypeVar("C", bound=Config)

# Renamed keys and values of settings, for the errors about the old ones. "*" is any name.
RENAMED_KEYS: Final = {
    **dict(former_keys()),
    "algorithm.use_kl_loss": "removed: algorithm.kl.loss_coef above 0 turns the KL loss on",
    **{f"critic.{name}": f"it is trainer.critic.{name}" for name in ("gpus", "num_processes", "nodes", "megatron")},
    "critic.device": "the critic has the device of the actor, trainer.device",
    "engines.*.update_timeout_s": "renamed to update_stall_s: seconds without progress, not of a whole update",
    "trainer.finetune": "renamed to trainer.load_weights_only",
    "trainer.handover": 'renamed to trainer.weight_export: "live" (was "stream") or "async" (was "copy")',
}
RENAMED_VALUES: Final = {
    ("engines.*.kind", "embedded"): 'renamed to "tiny"',
    **{
        ("algorithm.estimator.type", name): f'a loss, not an estimator: write "grpo" and algorithm.loss.type = "{name}"'
        for name in ("gspo", "cispo")
    },
}


def describe(expected: Any) -> str:
    """Describe the values that a type allows: "int >= 1", "one of 'a', 'b'"."""
    return _describe(msgspec.inspect.type_info(expected))


def _describe(info: msgspec.inspect.Type) -> str:
    match info:
        case msgspec.inspect.Metadata(type=inner):
            return _describe(inner)
        case msgspec.inspect.UnionType(types=types):
            parts = dict.fromkeys(_describe(part) for part in types if not isinstance(part, msgspec.inspect.NoneType))
            is_optional = any(isinstance(part, msgspec.inspect.NoneType) for part in types)
            return " or ".join(parts) + (", or unset" if is_optional else "")
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


def find_problems(value: object, expected: Any, key: str = "", schema: Any = None) -> Iterator[Problem]:
    """Compare plain values with a schema and yield every problem.

    Args:
        value: parsed TOML: tables, lists, scalars.
        expected: a Config, or any type msgspec can convert to.
        key: dotted position of `value`.
        schema: schema of the whole topology, to find keys that belong in another table; none: `expected`.
    """
    schema = schema or expected
    expected = undeclared(expected)
    item = item_type(expected)
    if tables := choices(expected):
        if value is not None or NoneType not in get_args(expected):
            yield from _choice_problems(value, tables, key, schema)
    elif is_config(expected):
        yield from _table_problems(value, expected, key, schema)
    elif item is not None and isinstance(value, dict) and get_origin(expected) is dict:
        for name, entry in cast("dict[str, Any]", value).items():
            yield from (_key_problem(problem, name) for problem in find_problems(name, get_args(expected)[0], key))
            yield from find_problems(entry, item, f"{key}.{name}", schema)
    elif item is not None and isinstance(value, list) and get_origin(expected) is tuple:
        for index, entry in enumerate(cast("list[object]", value)):
            yield from find_problems(entry, item, f"{key}.{index}", schema)
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(key=key, value=str(value), message="is not finite; allowed: finite numbers")
    else:
        try:
            msgspec.convert(value, expected)
        except msgspec.ValidationError as error:
            given = cast("object", value)
            shown = show(given)
            found = _renamed_value(key, shown) or f"{_readable(error)}; {_meant(key, given, expected)}"
            yield Problem(key=key, value=shown, message=found)


def _meant(key: str, value: object, expected: Any) -> str:
    """Return what a value is called here, if another project has it, and what is allowed."""
    ours = our_value(key, value)
    meant = f"did you mean {show(ours)}? " if ours in get_args(_without_none(expected)) else ""
    return f"{meant}allowed: {describe(expected)}"


def _without_none(expected: Any) -> Any:
    """Return the other type of an optional one."""
    return next((part for part in get_args(expected) if get_args(part)), expected)


def _renamed_value(key: str, value: str) -> str | None:
    return next((new for (old, was), new in RENAMED_VALUES.items() if fnmatch(key, old) and value == show(was)), None)


def _key_problem(problem: Problem, name: str) -> Problem:
    return Problem(key=f"{problem.key}.{name}", message=f"this name is not allowed: {problem.message}")


def _table_problems(value: object, expected: type[Config], key: str, schema: Any) -> Iterator[Problem]:
    if not isinstance(value, dict):
        meant = flag_hint(key)
        yield Problem(key=key, value=show(value), message="expected a table" + (f"; {meant}" if meant else ""))
        return
    table = cast("dict[str, Any]", value)
    fields = {field.encode_name: field for field in msgspec.structs.fields(expected)}
    prefix = f"{key}." if key else ""
    for name in table.keys() - fields.keys():
        yield Problem(key=f"{prefix}{name}", message=unknown_key(f"{prefix}{name}", list(fields), schema))
    for name, field in fields.items():
        if name in table:
            yield from find_problems(table[name], field.type, f"{prefix}{name}", schema)
        elif field.required:
            yield Problem(key=f"{prefix}{name}", message=f"missing; expected {describe(field.type)}")


def _choice_problems(value: object, tables: Mapping[str, type[Config]], key: str, schema: Any) -> Iterator[Problem]:
    """Yield the problems of a table that chooses by its key `type`."""
    allowed = f"allowed: {', '.join(repr(name) for name in tables)}"
    if not isinstance(value, dict):
        yield Problem(key=key, value=show(value), message=f"expected a table with a type; {allowed}")
        return
    table = dict(cast("dict[str, Any]", value))
    chosen = table.pop("type", None)
    if chosen is None:
        yield Problem(key=f"{key}.type", message=f"missing; {allowed}")
    elif not isinstance(chosen, str) or chosen not in tables:
        ours = our_value(f"{key}.type", chosen)
        meant = f"did you mean {show(ours)}? " if ours in tables else ""
        renamed = _renamed_value(f"{key}.type", show(chosen))
        yield Problem(key=f"{key}.type", value=show(chosen), message=renamed or f"unknown type; {meant}{allowed}")
    else:
        others = {name for each in tables.values() for name in each.__struct_fields__} - {*_fields(tables[chosen])}
        for name in sorted(table.keys() & others):
            owners = " or ".join(show(each) for each, of in tables.items() if name in of.__struct_fields__)
            message = (
                f"is a key of type = {owners}, not of {show(chosen)}; allowed: {', '.join(_fields(tables[chosen]))}"
            )
            yield Problem(key=f"{key}.{name}", value=show(table.pop(name)), message=message)
        yield from _table_problems(table, tables[chosen], key, schema)


def _fields(table: type[Config]) -> tuple[str, ...]:
    return ("type", *table.__struct_fields__)


def unknown_key(key: str, allowed: Sequence[str], schema: Any) -> str:
    """Format the message for an unknown key: what was probably meant, or else the keys of its table."""
    renamed = (meant for old, meant in RENAMED_KEYS.items() if fnmatch(key, old))
    meant = next(renamed, None) or hint(key, allowed, keys_of(schema))
    return f"unknown key, {meant}" if meant else f"unknown key; allowed: {', '.join(allowed) or 'none'}"


@cache
def keys_of(schema: Any) -> tuple[str, ...]:
    """Return every dotted key of a Config, tables included. Lists and named tables give the keys of one item."""
    keys: list[str] = []
    for field in msgspec.structs.fields(schema) if is_config(schema) else ():
        item = item_type(field.type)
        place = f"{field.encode_name}." + (
            "" if item is None else "<name>." if get_origin(field.type) is dict else "0."
        )
        inner = choices(field.type)
        below = (
            (key for table in inner.values() for key in ("type", *keys_of(table)))
            if inner
            else keys_of(item or field.type)
        )
        keys += [field.encode_name, *(place + key for key in dict.fromkeys(below))]
    return tuple(keys)


@cache
def choices(expected: Any) -> Mapping[str, type[Config]]:
    """Return the tables that a key's table chooses from, by their `type`. None: the key has no such table."""
    parts = get_args(expected) or (expected,)
    return {type_of(part): part for part in parts if is_config(part) and issubclass(part, Choice)}


class Chosen(NamedTuple):
    """A key whose table is chosen by its `type`."""

    default: str | None  # None: there is no table by default
    tables: Mapping[str, type[Config]]  # by type


@cache
def chosen_keys(schema: type[Config], prefix: str = "") -> Mapping[str, Chosen]:
    """Return every key whose table is chosen by its `type`, outer ones first; not those in lists and named tables."""
    found: dict[str, Chosen] = {}
    for field in msgspec.structs.fields(schema):
        key, tables = f"{prefix}{field.encode_name}", choices(field.type)
        if tables:
            found[key] = Chosen(field.default.type if isinstance(field.default, Choice) else None, tables)
        for table in tables.values() or ([field.type] if is_config(field.type) else ()):
            found |= chosen_keys(table, f"{key}.")
    return found


def stored_tables(data: bytes | str, schema: type[Config]) -> dict[str, Any]:
    """Return the tables of a topology.json, also of one that the last version wrote.

    Raises:
        msgspec.DecodeError: it is not a JSON object.
    """
    return in_new_form(msgspec.json.decode(data, type=dict[str, Any]), chosen_keys(schema))


def type_at(schema: Any, parts: Sequence[str]) -> Any:
    """Find the type of a dotted key.

    Raises:
        ValueError: there is no such key; the message names similar ones.
    """
    whole = schema
    for number, part in enumerate(parts):
        schema = undeclared(schema)
        item, tables = item_type(schema), choices(schema)
        if tables or is_config(schema):
            fields = _types_of(*tables.items()) if tables else _types_of(("", schema))
            if part not in fields:
                message = unknown_key(".".join(parts[: number + 1]), list(fields), whole)
                if number + 1 < len(parts) and (meant := setting_hint(".".join(parts))):
                    message = f"unknown key, {meant}"
                raise ValueError(f"{message} (in {'.'.join(parts[:number]) or 'the topology'})")
            schema = fields[part]
        elif item is not None:
            schema = item
        elif get_origin(schema) is dict:
            return Any
        else:
            raise ValueError(f"{'.'.join(parts[:number])} is a value, not a table: it has no key {part}")
    return undeclared(schema)


@cache
def _types_of(*named: tuple[str, Any]) -> Mapping[str, Any]:
    """Return the types of the keys of one of several tables. A key that may be unset in one of them may be so here."""
    tables = dict(named)
    fields = [field for table in tables.values() for field in msgspec.structs.fields(table)]
    ordered = sorted(fields, key=lambda field: NoneType in get_args(undeclared(field.type)))  # later ones win
    chosen = {} if "" in tables else {"type": cast("Any", Literal)[tuple(tables)]}
    return chosen | {field.encode_name: field.type for field in ordered}


class Declaration(NamedTuple):
    """What a field of a table declares."""

    access: Access | None
    function: UserFunction | None  # kind of function that it names


def with_values(config: C, change: Callable[[str, Any, Declaration], Any], prefix: str = "") -> C:
    """Return a table with changed values, in the tables in it too.

    Args:
        config: the table.
        change: gets the key, the value and the declaration of a setting, and returns its new value.
        prefix: of the keys, with its dot.
    """
    changed: dict[str, Any] = {}
    for name, declaration in _declared(type(config)):
        key, value = f"{prefix}{name}", getattr(config, name)
        if isinstance(value, Config):
            changed[name] = with_values(value, change, f"{key}.")
        elif isinstance(value, tuple) and any(isinstance(item, Config) for item in cast("tuple[Any, ...]", value)):
            items = enumerate(cast("tuple[Config, ...]", value))
            changed[name] = tuple(with_values(item, change, f"{key}.{index}.") for index, item in items)
        elif isinstance(value, dict) and any(
            isinstance(item, Config) for item in cast("dict[str, Any]", value).values()
        ):
            tables = cast("dict[str, Config]", value).items()
            changed[name] = {label: with_values(item, change, f"{key}.{label}.") for label, item in tables}
        else:
            changed[name] = change(key, value, declaration)
    return msgspec.structs.replace(config, **changed)


def functions_in(config: Config) -> Iterator[tuple[str, str, UserFunction]]:
    """Yield the key, the value and the kind of each setting that names a function, also in the tables in a table."""
    found: list[tuple[str, str, UserFunction]] = []

    def note(key: str, value: Any, declaration: Declaration) -> Any:
        if (function := declaration.function) is not None:
            found.extend((place, text, function) for place, text in texts_in(key, value))
        return value

    with_values(config, note)
    yield from found


def named_function(config: Config, function: UserFunction) -> tuple[str, str] | None:
    """Return the key and the value of the first setting that names a function of a kind; None: none does."""
    return next(((key, value) for key, value, kind in functions_in(config) if kind is function), None)


def texts_in(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the texts in a setting's value, which may be one, a list or a table, with their keys."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list | tuple):
        items: Any = cast("dict[str, Any]", value).items() if isinstance(value, dict) else enumerate(cast("Any", value))
        for name, item in items:
            yield from texts_in(f"{key}.{name}", item)


@cache
def _declared(config: type[Config]) -> tuple[tuple[str, Declaration], ...]:
    fields = msgspec.structs.fields(config)
    return tuple((field.name, Declaration(declared(config, field.type), function_of(field.type))) for field in fields)


def declared(table: type[Config], kind: Any) -> Access | None:
    """Return what a field of a table declares, by its type: what is harmless says how the run runs in most tables."""
    access = access_of(kind)
    return Access.RUNNING if access is Access.HARMLESS and not table.harmless else access


def is_config(expected: Any) -> TypeGuard[type[Config]]:
    """Return whether a type is a settings table."""
    return isinstance(expected, type) and issubclass(expected, Config)


def item_type(expected: Any) -> Any | None:
    """Return the Config in a `dict[str, C]` or `tuple[C, ...]`; None for other types."""
    arguments = get_args(expected)
    if get_origin(expected) is dict and is_config(arguments[1]):
        return arguments[1]
    if get_origin(expected) is tuple and is_config(arguments[0]):
        return arguments[0]
    return None


def _readable(error: msgspec.ValidationError) -> str:
    message = str(error).partition(" - at `$`")[0].replace("`", "")
    return message[:1].lower() + message[1:]
