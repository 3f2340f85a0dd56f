"""slime's flags and what became of them: the data of docs/from-slime.md and of the hints for keys that do not exist."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, Literal

import msgspec

DATA: Final = Path(__file__).with_suffix(".toml")
OWN: Final = "slime"

Origin = Literal["slime", "sglang", "older"]  # slime's own, its own among SGLang's options, gone from slime since
State = Literal["key", "no", "not yet"]


class FlagAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of a flag. Texts are Markdown of docs/.

    Raises ValueError unless exactly one of key, no and not_yet is set.
    """

    key: str | None = None  # ours, dotted; of several data sources, pools or nodes the first
    note: str | None = None  # what to know of the key
    no: str | None = None  # why it will not come, or what to do instead
    not_yet: str | None = None  # what is missing, or holds meanwhile

    def __post_init__(self) -> None:
        if sum(text is not None for text in (self.key, self.no, self.not_yet)) != 1:
            raise ValueError("exactly one of key, no and not_yet is needed")

    @property
    def state(self) -> State:
        """Which of the three it is."""
        if self.key is not None:
            return "key"
        return "no" if self.no is not None else "not yet"

    @property
    def remark(self) -> str:
        """What is said beside the state, "" for nothing."""
        return self.note or self.no or self.not_yet or ""


class Flag(FlagAnswer, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One flag, without its dashes."""

    flag: str
    default: str | None = None  # slime's, where it is more than off or unset
    also: tuple[str, ...] = ()  # other names that slime has for it
    origin: Origin = OWN


class Rule(FlagAnswer, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A family of flags that slime hands on. With `into` the key is a table that takes them by their own names."""

    whose: str
    names: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    into: bool = False

    def answer_for(self, flag: str) -> FlagAnswer:
        """What became of one flag of the family."""
        if not self.into:
            return self
        name = flag[len(next((prefix for prefix in self.prefixes if flag.startswith(prefix)), "")) :]
        return FlagAnswer(key=f"{self.key}.{name.replace('-', '_')}", note=self.note)


class Grader(FlagAnswer, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value of slime's --rm-type; `key` is the rm_type that it has here."""

    name: str


class Ours(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key without a flag of slime's, for what a reader who comes from there would look for."""

    key: str
    note: str


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A heading of the page and its flags."""

    title: str
    flags: tuple[Flag, ...]
    ours: tuple[Ours, ...] = ()


class FromSlime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole table."""

    sections: tuple[Section, ...]
    graders: tuple[Grader, ...]
    rules: tuple[Rule, ...]

    def flags(self) -> Iterator[Flag]:
        """Every flag that is listed, in the order of the page."""
        for section in self.sections:
            yield from section.flags


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A flag that was recognised."""

    flag: str  # without dashes, as its owner spells it
    whose: str
    answer: FlagAnswer


@cache
def from_slime() -> FromSlime:
    """The table, read once.

    Raises:
        msgspec.ValidationError: a mistake in the data file.
    """
    return msgspec.toml.decode(DATA.read_bytes(), type=FromSlime)


def find_flag(name: str) -> Found | None:
    """A flag that is listed, by its name as a command line or as a key spells it."""
    flag = _listed().get(spelled_as_flag(name))
    return None if flag is None else Found(flag=flag.flag, whose=OWN, answer=flag)


def find_by_rule(name: str) -> Found | None:
    """A flag that slime hands on; of the rules that fit, the one that names it or has the longest prefix decides."""
    flag = spelled_as_flag(name)
    fitting = [(len(start), rule) for rule in from_slime().rules for start in _starts(rule, flag)]
    if not fitting:
        return None
    _, rule = max(fitting, key=lambda pair: pair[0])
    return Found(flag=flag, whose=rule.whose, answer=rule.answer_for(flag))


def spelled_as_flag(name: str) -> str:
    """`rollout-batch-size` of `--rollout-batch-size` or `rollout_batch_size`."""
    return name.lstrip("-").replace("_", "-")


@cache
def _listed() -> dict[str, Flag]:
    return {name: flag for flag in from_slime().flags() for name in (flag.flag, *flag.also)}


def _starts(rule: Rule, flag: str) -> Iterator[str]:
    """What of a rule fits a flag."""
    if flag in rule.names:
        yield flag
    yield from (prefix for prefix in rule.prefixes if flag.startswith(prefix) and flag != prefix)
