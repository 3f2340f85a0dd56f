"""Checks plain tables against a schema: its keys, and problems of the values."""

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from typing import Any, Final, TypeGuard, cast, get_args, get_origin

import msgspec
import msgspec.inspect

from runtime.settings.peers.names import peer_value
from runtime.settings.reading.config import Config, Problem
from runtime.settings.slime.hints import flag_hint, hint, peer_hint
from runtime.util.formatting import show

# Renamed keys and values of settings, for the errors about the old ones. "*" is any name.
RENAMED_KEYS: Final = {
    "algorithm.use_kl_loss": "removed: algorithm.kl_loss_coef above 0 turns the KL loss on",
    **{f"critic.{name}": f"it is trainer.critic.{name}" for name in ("gpus", "num_processes", "nodes", "megatron")},
    "critic.device": "the critic has the device of the actor, trainer.device",
    "engines.*.update_timeout_s": "renamed to update_stall_s: seconds without progress, not of a whole update",
    "trainer.finetune": "renamed to trainer.load_weights_only",
    "trainer.handover": 'renamed to trainer.weight_export: "live" (was "stream") or "async" (was "copy")',
}
RENAMED_VALUES: Final = {("engines.*.kind", "embedded"): 'renamed to "tiny"'}


def describe(expected: Any) -> str:
    """Describe the values that a type allows: "int >= 1", "one of 'a', 'b'"."""
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


def find_problems(value: object, expected: Any, key: str = "", schema: Any = None) -> Iterator[Problem]:
    """Compare plain values with a schema and yield every problem.

    Args:
        value: parsed TOML: tables, lists, scalars.
        expected: a Config, or any type msgspec can convert to.
        key: dotted position of `value`.
        schema: schema of the whole topology, to find keys that belong in another table; none: `expected`.
    """
    schema = schema or expected
    item = item_type(expected)
    if is_config(expected):
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
    ours = peer_value(key, value)
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
        keys += [field.encode_name, *(place + key for key in keys_of(item or field.type))]
    return tuple(keys)


def type_at(schema: Any, parts: Sequence[str]) -> Any:
    """Find the type of a dotted key.

    Raises:
        ValueError: there is no such key; the message names similar ones.
    """
    whole = schema
    for number, part in enumerate(parts):
        item = item_type(schema)
        if is_config(schema):
            fields = {field.encode_name: field.type for field in msgspec.structs.fields(schema)}
            if part not in fields:
                message = unknown_key(".".join(parts[: number + 1]), list(fields), whole)
                if number + 1 < len(parts) and (meant := peer_hint(".".join(parts))):
                    message = f"unknown key, {meant}"
                raise ValueError(f"{message} (in {'.'.join(parts[:number]) or 'the topology'})")
            schema = fields[part]
        elif item is not None:
            schema = item
        elif get_origin(schema) is dict:
            return Any
        else:
            raise ValueError(f"{'.'.join(parts[:number])} is a value, not a table: it has no key {part}")
    return schema


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
