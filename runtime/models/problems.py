"""Collects every problem of a config.json, so that one start names them all."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec.structs import NODEFAULT, FieldInfo

from runtime.models.directory import decoded

Content = Mapping[str, msgspec.Raw]  # a JSON object, whose values are decoded later
T = TypeVar("T")


class Unsupported(ValueError):
    """Values of a config.json that are not supported."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class Problems(list[str]):
    """The problems found so far."""

    def of(self, read: Callable[[], T]) -> T | None:
        """Return what a function reads. If it raises, add its problems and return None."""
        try:
            return read()
        except Unsupported as error:
            self.extend(error.problems)
        except ValueError as error:
            self.append(str(error))
        return None

    def struct(self, content: Content, kind: type[T]) -> T | None:
        """Decode the keys of a struct. Adds a problem for each that is missing or has another type."""
        values, before = dict[str, Any](), len(self)
        for field in _fields(kind):
            if field.name in content:
                self._decode(content[field.name], field, values)
            elif field.default is NODEFAULT and field.default_factory is NODEFAULT:
                self.append(f"{field.name} is missing")
        return kind(**values) if len(self) == before else None

    def _decode(self, value: msgspec.Raw, field: FieldInfo, values: dict[str, Any]) -> None:
        try:
            values[field.name] = decoded(value, field.type)
        except ValueError as error:
            message = f"{field.name}: {error}"
            if message not in self:  # two structs may have this key
                self.append(message)


@cache
def _fields(kind: Any) -> tuple[FieldInfo, ...]:
    return msgspec.structs.fields(kind)
