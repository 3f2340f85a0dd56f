"""The base of every settings table, and the error that lists what is wrong with one."""

from collections.abc import Sequence
from typing import Self

import msgspec

from runtime.secrets import without_logins
from runtime.wording import show


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every settings table. Frozen; unknown keys are refused; bounds are checked when it is decoded."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing wrong with the input: where, what, and the value that was given if there was one."""

    key: str  # dotted, list items by index: "data.0.path"; "" for a whole file
    message: str
    value: str | None = None  # as it would stand in TOML
    file: str | None = None  # or "--set"

    @classmethod
    def of(cls, key: str, value: object, message: str) -> Self:
        """What is wrong with the value of a key."""
        return cls(key=key, value=show(value), message=message)

    def __str__(self) -> str:
        where = f"{self.key} = {self.value}" if self.value is not None else self.key
        return without_logins(": ".join(part for part in (self.file, where, self.message) if part))


class TopologyError(Exception):
    """The topology or its recipe cannot be used. Carries every problem found, one line each in its text."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))
