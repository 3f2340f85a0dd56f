"""The base of every settings table, and the error that lists its problems."""

from collections.abc import Sequence
from typing import Self

import msgspec

from runtime.util.formatting import show
from runtime.util.secrets import without_logins


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every settings table. Frozen. Decoding refuses unknown keys and checks bounds."""


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
