"""Checks that fields typed `Any` hold plain data, which every reader can encode again.

A JSON decoder accepts integers of any length and nesting as deep as its stack. An encoder raises on them later.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import Any, Final, cast, get_args, get_type_hints

import msgspec

# errors of msgspec, numpy, a struct's own check and deep nesting for malformed bytes
UNREADABLE: Final = (msgspec.DecodeError, ValueError, OverflowError, RecursionError, MemoryError)
MAX_DEPTH: Final = 128  # nesting of lists and dicts
MIN_INT: Final = -(2**63)  # range of msgpack integers
MAX_INT: Final = 2**64 - 1
_PLAIN: Final = frozenset({str, float, bool, NoneType})
_LONG: Final = b"0" * 19  # digits of the shortest number that may be out of range
_Values = Callable[[msgspec.Struct], tuple[Any, ...]]
# digits become zeros, and all but points spaces: zeros after a point are those of a fraction
_DIGITS: Final = bytes(
    ord("0") if code in b"0123456789" else code if code == ord(".") else ord(" ") for code in range(256)
)


def check_json(message: msgspec.Struct, payload: bytes) -> None:
    """Check a message decoded from this JSON. Skips the fields if the bytes already show that they are harmless.

    Raises:
        ValueError: nesting is too deep, or an integer is out of range.
    """
    if payload.count(b"[") + payload.count(b"{") > MAX_DEPTH:
        check_open_fields(message)
    digits = payload.translate(_DIGITS)
    if _LONG in digits and b" " + _LONG in digits:  # the first search alone takes a tenth of the time of the second
        for number in _integers(message):
            _check_int(number)


def clipped(text: str, limit: int) -> str:
    """Make external text safe to send: cut it to `limit` characters, and replace invalid Unicode with "?"."""
    return (text if len(text) <= limit else f"{text[:limit]}...").encode("utf-8", "replace").decode()


def is_plain_json(payload: bytes) -> bool:
    """Whether the payload is one JSON value that any decoder can read and any encoder can write."""
    try:
        if payload.count(b"[") + payload.count(b"{") > MAX_DEPTH:
            check_plain(msgspec.json.decode(payload))
        else:
            msgspec.json.decode(payload, type=msgspec.Raw)
    except UNREADABLE:
        return False
    return True


def check_open_fields(message: msgspec.Struct) -> None:
    """Check the values in a message's fields of type Any.

    Raises:
        ValueError: nesting is too deep, an integer is out of range, or a dict key is neither a string nor an integer.
    """
    open_values, structs = _plan(type(message))
    for value in open_values(message):
        if value:
            check_plain(value)
    for value in structs(message):
        if type(value) is tuple:
            for item in cast("tuple[msgspec.Struct]", value):
                check_open_fields(item)
        elif value:
            check_open_fields(value)


def check_plain(value: Any, depth: int = 0) -> None:
    """Check one value of any type.

    Raises:
        ValueError: nesting is too deep, an integer is out of range, or a dict key is neither a string nor an integer.
    """
    kind: type[Any] = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind in _PLAIN:
        return
    if kind is int:
        _check_int(value)
    elif isinstance(value, list | tuple | dict):
        if depth >= MAX_DEPTH:
            raise ValueError(f"lists and dicts are over {MAX_DEPTH} deep")
        items: Iterable[Any] = cast("Iterable[Any]", value)
        if isinstance(value, dict):
            items = cast("dict[Any, Any]", value).values()
            for key in cast("dict[Any, Any]", value):
                if type(key) is not str:
                    _check_key(key)
        for item in items:
            if type(item) not in _PLAIN:
                check_plain(item, depth + 1)


def _check_int(number: int) -> None:
    if not MIN_INT <= number <= MAX_INT:
        raise ValueError("an integer is out of range: from -2**63 to 2**64 - 1 are allowed")


def _check_key(key: Any) -> None:
    if type(key) is not int:
        raise ValueError(f"a dict has a key of type {type(key).__name__}: allowed are str and int")
    _check_int(key)


def _integers(value: Any) -> Iterator[int]:
    if type(value) is int:
        yield value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _integers(getattr(value, name))
    elif isinstance(value, dict):
        yield from _integers(list(cast("dict[Any, Any]", value).values()))
    elif isinstance(value, list | tuple):
        for item in cast("Iterable[Any]", value):
            yield from _integers(item)


def has_open_fields(struct: type[msgspec.Struct]) -> bool:
    """Whether anything in messages of this type is typed `Any`."""
    return any(_open_fields(struct))


@cache
def _plan(struct: type[msgspec.Struct]) -> tuple[_Values, _Values]:
    """Getters of the values to check, one call each: values of open fields, and structs with such fields."""
    open_names, struct_names = _open_fields(struct)
    return _getter(open_names), _getter(struct_names)


def _getter(names: tuple[str, ...]) -> _Values:
    if len(names) == 1:
        get = attrgetter(names[0])
        return lambda message: (get(message),)
    return attrgetter(*names) if names else lambda _: ()


@cache
def _open_fields(struct: type[msgspec.Struct]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the fields typed `Any`, and names of the fields whose structs have such fields."""
    found: tuple[list[str], list[str]] = ([], [])
    hints = get_type_hints(struct)
    for name in struct.__struct_fields__:
        parts = set(_parts(hints[name]))
        nested = [part for part in parts if isinstance(part, type) and issubclass(part, msgspec.Struct)]
        if Any in parts:
            found[0].append(name)
        elif any(has_open_fields(part) for part in nested):
            found[1].append(name)
    return tuple(found[0]), tuple(found[1])


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for part in get_args(hint):
        yield from _parts(part)
