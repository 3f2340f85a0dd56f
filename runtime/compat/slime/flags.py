"""slime's flags and their equivalents: the data of docs/reference/from-slime.md and of the hints for unknown keys."""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

DATA: Final = Path(__file__).with_suffix(".toml")
OWN: Final = "slime"

Origin = Literal["slime", "sglang", "older"]  # slime's own, its own among SGLang's options, removed from slime
State = Literal["key", "no", "not yet"]
# What a script without the flag needs here: nothing, these keys, what convert.py works out, or the user's word
Absent = Literal["same", "computed", "lost"] | dict[str, Any]


class FlagAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The equivalent of a flag. Texts are Markdown for docs/.

    Raises ValueError unless exactly one of key, no and not_yet is set.
    """

    key: str | None = None  # our dotted key; the first of several data sources, pools or nodes
    note: str | None = None  # remark on the key
    no: str | None = None  # why it will not be implemented, or an alternative
    not_yet: str | None = None  # what is missing, or what applies until then
    value: Any = None  # of the key, from a flag whose own value means something else
    loses: bool | None = None  # whether a run without the flag trains or measures something else; needed with not_yet
    unless: tuple[str, ...] = ()  # values with which it does not

    def __post_init__(self) -> None:
        if sum(text is not None for text in (self.key, self.no, self.not_yet)) != 1:
            raise ValueError("exactly one of key, no and not_yet is needed")

    def is_lost(self, values: Sequence[str]) -> bool:
        """Return whether a flag with these values makes another run, and has no key that says the same."""
        return bool(self.loses) and not any(_same(values, without) for without in self.unless)

    @property
    def state(self) -> State:
        """Return which of the three is set."""
        if self.key is not None:
            return "key"
        return "no" if self.no is not None else "not yet"

    @property
    def remark(self) -> str:
        """Return the remark next to the state; "" if there is none."""
        return self.note or self.no or self.not_yet or ""


class Flag(FlagAnswer, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One flag of slime: its name without dashes, and what replaces it here."""

    flag: str
    default: str | None = None  # slime's, unless it is off or unset
    also: tuple[str, ...] = ()  # other names in slime
    origin: Origin = OWN
    absent: Absent


class Rule(FlagAnswer, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"needs": "with"}):
    """A family of flags that slime passes on. With `into` the key is a table that takes them by their own names.

    Raises ValueError as an answer does, and if several flags without a value would set the same keys.
    """

    whose: str
    names: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    into: bool = False
    absent: Absent
    needs: str | None = None  # a flag without which `absent` means nothing

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.absent, dict) and len(self.names) != 1:
            raise ValueError("keys for an absent flag need a rule of one name")

    def answer_for(self, flag: str) -> FlagAnswer:
        """Return the equivalent here of one of the flags that this rule covers."""
        if not self.into:
            return self
        name = flag[len(next((prefix for prefix in self.prefixes if flag.startswith(prefix)), "")) :]
        return FlagAnswer(key=f"{self.key}.{name.replace('-', '_')}", note=self.note)


class Variable(FlagAnswer, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A family of environment variables that start scripts give to training."""

    names: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # parts of a name between underscores


class Grader(FlagAnswer, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value of slime's --rm-type; `key` is our rm_type for it."""

    name: str


class Ours(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key without a slime flag that a slime user may look for."""

    key: str
    note: str
    always: Any = None  # what slime does without a flag for it, if that is not our default


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the page: heading and flags."""

    title: str
    flags: tuple[Flag, ...]
    ours: tuple[Ours, ...] = ()


class FromSlime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the data file, flags.toml."""

    sections: tuple[Section, ...]
    graders: tuple[Grader, ...]
    rules: tuple[Rule, ...]
    variables: tuple[Variable, ...]

    def flags(self) -> Iterator[Flag]:
        """Yield every listed flag in the order of the page."""
        for section in self.sections:
            yield from section.flags


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A flag of slime that a name was recognized as, and what replaces it here."""

    flag: str  # without leading dashes, as its owner spells it
    whose: str
    answer: FlagAnswer


@cache
def from_slime() -> FromSlime:
    """Return slime's flags with their equivalents here. The data file is read once.

    Raises:
        msgspec.ValidationError: the data file is invalid.
    """
    return msgspec.toml.decode(DATA.read_bytes(), type=FromSlime)


def find_flag(name: str) -> Found | None:
    """Find a listed flag by its name on a command line or as a key."""
    flag = _listed().get(spelled_as_flag(name))
    return None if flag is None else Found(flag=flag.flag, whose=OWN, answer=flag)


def find_by_rule(name: str) -> Found | None:
    """Find the rule of a flag that slime passes on. An exact name wins, then the longest prefix."""
    flag = spelled_as_flag(name)
    fitting = [(len(start), rule) for rule in from_slime().rules for start in _starts(rule, flag)]
    if not fitting:
        return None
    _, rule = max(fitting, key=lambda pair: pair[0])
    return Found(flag=flag, whose=rule.whose, answer=rule.answer_for(flag))


def find_variable(name: str) -> Variable | None:
    """Find what replaces an environment variable. An exact name wins, then the longest prefix, then a word of it."""
    parts = set(name.upper().split("_"))
    fitting = [
        (length, variable)
        for variable in from_slime().variables
        for length in (
            *(math.inf for known in variable.names if known == name),
            *(len(prefix) for prefix in variable.prefixes if name.startswith(prefix)),
            *(0 for word in variable.words if word in parts),
        )
    ]
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


def spelled_as_flag(name: str) -> str:
    """Normalize a name: `--rollout-batch-size` and `rollout_batch_size` become `rollout-batch-size`."""
    return name.lstrip("-").replace("_", "-")


@cache
def _listed() -> dict[str, Flag]:
    return {name: flag for flag in from_slime().flags() for name in (flag.flag, *flag.also)}


def _same(values: Sequence[str], without: str) -> bool:
    """Return whether a flag has this one value, as a text or as a number."""
    if len(values) != 1:
        return not values and without == ""
    try:
        return float(values[0]) == float(without)
    except ValueError:
        return values[0].lower() == without


def _starts(rule: Rule, flag: str) -> Iterator[str]:
    """Yield the names and prefixes of a rule that match a flag."""
    if flag in rule.names:
        yield flag
    yield from (prefix for prefix in rule.prefixes if flag.startswith(prefix) and flag != prefix)
