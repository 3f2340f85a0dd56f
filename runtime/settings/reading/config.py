"""The base of every settings table, and the error that lists its problems."""

from collections.abc import Sequence
from typing import Any, ClassVar, Final, Self

import msgspec

from runtime.util.formatting import show
from runtime.util.secrets import without_logins

SET: Final = "--set"  # origin of keys from overrides


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every settings table. Frozen. Decoding refuses unknown keys and checks bounds.

    A stranger's file may set the harmless keys of a table that declares itself `harmless`. In all other tables a number
    or a choice can ask for processes, memory or time of this machine.
    """

    harmless = False


class Choice(Config, frozen=True, kw_only=True):
    """Base of tables whose key `type` chooses what they are: one class for each type, with the keys of that type."""

    formula: ClassVar[str] = ""  # as `--plan` shows it: {name} is a field or a property of the class
    source: ClassVar[str] = ""

    @property
    def type(self) -> Any:  # a string: only the union of classes says which ones a key allows
        """The value of `type`."""
        return type_of(type(self))


def type_of(choice: type[Config]) -> str:
    """Return the value of `type` that chooses a table."""
    return str(choice.__struct_config__.tag)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One problem of the input: its key, a message, and the given value if there is one."""

    key: str  # dotted, with list items by index: "data.0.path"; "" for a whole file
    message: str
    value: str | None = None  # as TOML
    file: str | None = None  # its path, or "--set"

    @classmethod
    def of(cls, key: str, value: object, message: str) -> Self:
        """Make a problem of a key's value."""
        return cls(key=key, value=show(value), message=message)

    def __str__(self) -> str:
        where = f"{self.key} = {self.value}" if self.value is not None else self.key
        return without_logins(": ".join(part for part in (self.file, where, self.message) if part))


class TopologyError(Exception):
    """The topology or its recipe cannot be used. Its text lists every problem, one per line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))
