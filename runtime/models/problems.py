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

    def struct(self, content: Content, kind: type[T], defaults: Mapping[str, Any]) -> T | None:
        """Decode the keys of a struct. Adds a problem for each that is missing or has another type.

        A key that is absent has its value of `defaults`, unless the struct requires it or has the default None.
        """
        values, found = dict[str, Any](), list[str]()
        for field in _fields(kind):
            if field.name in content:
                try:
                    values[field.name] = decoded(content[field.name], field.type)
                except ValueError as error:
                    found.append(f"{field.name}: {error}")
            elif field.default is NODEFAULT and field.default_factory is NODEFAULT:
                found.append(f"{field.name} is missing")
            elif field.default is not None and defaults.get(field.name) is not None:
                values[field.name] = defaults[field.name]
        self.extend(message for message in found if message not in self)  # two structs may have this key
        return None if found else kind(**values)


@cache
def _fields(kind: Any) -> tuple[FieldInfo, ...]:
    return msgspec.structs.fields(kind)
