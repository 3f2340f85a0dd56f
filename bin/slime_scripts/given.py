"""The flags and environment variables of a start script, and the settings that are made from them."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, get_args, get_origin

import msgspec

from bin.slime_scripts.script import Given, StartScript
from bin.slime_scripts.syntax import Word, variables_in
from runtime.compat.slime.flags import FlagAnswer, find_flag, find_variable
from runtime.compat.slime.hints import plain_text
from runtime.settings.reading.schema import type_at
from runtime.settings.topology import Topology

INHERITED: Final = "variables of the environment: processes inherit those of bin/start-topology"
SECRET: Final = frozenset({"wandb-key"})  # flags whose values are written nowhere
WORDS: Final[Mapping[str, Any]] = {"true": True, "false": False}


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of the result."""

    key: str  # dotted; items of lists by number
    value: Any
    remark: str  # the flag that it comes from, or why it is there


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """A flag that became no setting."""

    flag: str  # as in the script, with its values
    place: str  # "file:line"
    state: str  # "no", "not yet", "by hand" or "unknown"
    remark: str
    is_lost: bool  # the run trains or measures something else until someone deals with it


class WrongValue(Exception):
    """One flag cannot be converted; the text is the remark."""


class Flags:
    """The flags of a script; remembers which have been dealt with."""

    def __init__(self, script: StartScript) -> None:
        self.program, self.environment, self.unread = script.program, script.environment, script.unread
        self.left: list[Left] = []
        self.missing: list[str] = []
        self._given = {given.flag: given for given in script.given}
        self._taken: set[str] = set()

    def peek(self, flag: str) -> Given | None:
        """Return a flag that someone else takes."""
        return self._given.get(flag)

    def take(self, flag: str) -> Given | None:
        """Return a flag, and do not return it again from `rest`."""
        self._taken.add(flag)
        return self._given.get(flag)

    def text(self, flag: str) -> str | None:
        """Take a flag and return its only value; None without the flag. A value that is missing is noted."""
        given = self.take(flag)
        if given is None:
            return None
        self.note_missing(given)
        return given.values[0].text if given.values else ""

    def number(self, flag: str, default: int) -> int:
        """Take a flag and return its whole number."""
        text = self.text(flag)
        if text is not None and not re.fullmatch(r"\d+", text):
            self.leave(self._given[flag], "by hand", "not a whole number")
        return int(text) if text is not None and re.fullmatch(r"\d+", text) else default

    def note_missing(self, given: Given) -> None:
        """Note the variables that a flag's values lack."""
        for lacking in dict.fromkeys(name for word in given.values for name in word.missing):
            how = f"give it with --var {lacking}=VALUE" if lacking.isidentifier() else "only the machine knows it"
            self.missing.append(f"{given.place}: --{given.flag} needs {lacking}: {how}")

    def leave(self, given: Given, state: str, remark: str, *, is_lost: bool | None = None) -> None:
        """Note a flag that becomes no setting. What is to set by hand, or unknown, is lost until someone sets it."""
        lost = state in ("by hand", "unknown") if is_lost is None else is_lost
        self.note(_as_written(given), given.place, state, remark, is_lost=lost)

    def note(self, flag: str, place: str, state: str, remark: str, *, is_lost: bool) -> None:
        """Note something of the script that becomes no setting."""
        self.left.append(Left(flag=flag, place=place, state=state, remark=plain_text(remark), is_lost=is_lost))

    def leave_taken(self, flag: str, state: str, remark: str) -> None:
        """Note a flag by its name, if the script gives it."""
        if (given := self._given.get(flag)) is not None:
            self.leave(given, state, remark)

    def rest(self) -> Iterator[Given]:
        """Yield the flags that no one has taken."""
        yield from (given for flag, given in self._given.items() if flag not in self._taken)


def leave_environment(flags: Flags) -> None:
    """Note the environment variables that the script gives to training, and arrays of flags that are not known."""
    passed = flags.take("train-env-vars")
    variables = {given.flag: given for given in flags.environment}
    if passed is not None and passed.values:
        word = passed.values[0]
        for name, value in variables_in(word.text).items():
            one = msgspec.structs.replace(word, text=value)
            variables[name] = Given(flag=name, values=(one,), place=word.place)
    for name, given in variables.items():
        found, values = find_variable(name), [word.text for word in given.values]
        lost = found is not None and (found.is_lost(values) or (bool(found.loses) and bool(given.values[0].missing)))
        state, remark = ("no", INHERITED) if found is None else (found.state, found.remark)
        written = f"{name}={' '.join(values)}" if lost else name  # other values may be secrets
        flags.note(written, given.place, state, remark, is_lost=lost)
    for array in flags.unread:
        remark = "a file that is not here sets it: its flags are not known"
        flags.note(f"${{{array.flag}[@]}}", array.place, "unknown", remark, is_lost=True)


def is_off(flags: Flags, coefficient: str) -> bool:
    """Return whether a coefficient is 0 or not given."""
    given = flags.peek(coefficient)
    return given is None or not given.values or number_in(given.values[0].text) == 0


def typed(key: str, values: Sequence[Word]) -> Any:
    """Convert a flag's values to the type of a key.

    Raises:
        WrongValue: they do not fit, or there is no such key.
    """
    try:
        expected = type_at(Topology, key.split("."))
    except ValueError as error:
        raise WrongValue(str(error)) from None
    texts = [word.text for word in values]
    if expected is Any:  # of an engine
        guessed = [_guessed(text) for text in texts]
        return True if not guessed else guessed[0] if len(guessed) == 1 else guessed
    if expected is bool and not texts:
        return True
    is_list = get_origin(expected) is tuple
    if not is_list and len(texts) != 1:
        raise WrongValue(f"{len(texts)} values in place of one")
    value: Any = texts if is_list else _decoded(texts[0], expected)
    try:
        return msgspec.to_builtins(msgspec.convert(value, expected, strict=False))
    except msgspec.ValidationError as error:
        raise WrongValue(str(error)) from None


def _decoded(text: str, expected: Any) -> Any:
    """Return the text, or the object that it spells in JSON where a table is expected."""
    if not any(get_origin(part) is dict for part in (expected, *get_args(expected))):
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise WrongValue(f"not JSON: {error}") from None


def _guessed(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    number = number_in(text)
    return text if number is None else int(number) if re.fullmatch(r"-?\d+", text) else number


def number_in(text: str) -> float | None:
    """Return a finite number from its text; None for other texts."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def whole_number(given: Given | None) -> int | None:
    """Return a flag's only value as a whole number; None without one."""
    if given is None or len(given.values) != 1 or not re.fullmatch(r"\d+", given.values[0].text):
        return None
    return int(given.values[0].text)


def first(given: Given | None) -> str | None:
    """Return a flag's first value; None without one."""
    return given.values[0].text if given is not None and given.values else None


def answer_of(flag: str) -> FlagAnswer:
    """Return what replaces a flag of slime's. Raises KeyError for other names."""
    found = find_flag(flag)
    if found is None:
        raise KeyError(flag)
    return found.answer


def _as_written(given: Given) -> str:
    if given.flag in SECRET:
        return f"--{given.flag} ***"
    return " ".join([f"--{given.flag}", *(word.text or "?" for word in given.values)])
