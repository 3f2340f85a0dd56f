"""Descriptions of allowed values."""

from typing import Any

import msgspec.inspect


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
