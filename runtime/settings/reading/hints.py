"""Hints for unknown keys: another project's name for a setting, another table's key, or a typo.

What other projects call a setting is known to adapters, a package each in runtime/compat. Nothing imports them: those
that are there are found here, by the name `ADAPTER`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Final

from runtime.settings.megatron.fields import megatron_hint

CLOSE: Final = 0.75  # similarity of whole names; 1 is equal
CLOSE_WORD: Final = 0.6  # similarity of each word: min_lr is not a typo of max_lr
ENGINES: Final = "engines"
ITEMS: Final = ("data", ENGINES, "eval", "nodes")  # lists, and tables by name
OF_CRITIC: Final = "trainer.critic"  # has keys of `trainer` again
COMPAT: Final = "runtime.compat"

Hint = Callable[[str], str | None]  # gets a name, and returns what it is here; None: the project does not have it


def _unknown(_: str) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What the names of another project are here."""

    own: Hint = _unknown  # of a key: a flag that the project has itself; goes before guesses among our keys
    flag: Hint = _unknown  # of a key: any flag that it takes, also to pass it on
    setting: Hint = _unknown  # of a dotted key that ends with a setting's name there
    grader: Hint = _unknown  # of a grader's name
    value: Callable[[str, object], str | None] = lambda _key, _value: None  # our word for a value of one of our keys
    pages: Mapping[str, Callable[[], str]] = field(default_factory=dict[str, Callable[[], str]])  # in docs/reference/


@cache
def adapters() -> tuple[Adapter, ...]:
    """Return the adapters that there are."""
    folder = Path(__file__).parents[2] / COMPAT.rpartition(".")[2]
    names = sorted(module.name for module in iter_modules([str(folder)]) if module.ispkg)
    return tuple(import_module(f"{COMPAT}.{name}").ADAPTER for name in names)


def hint(key: str, siblings: Sequence[str], keys: Sequence[str]) -> str | None:
    """Return what an unknown key probably means; None if a guess could mislead.

    Args:
        key: dotted, "data.0.prompt-data".
        siblings: keys of its table.
        keys: every key of the schema; for lists and named tables those of one item, "data.0.path".
    """
    return next(filter(None, _hints(key, siblings, keys)), None)


def _hints(key: str, siblings: Sequence[str], keys: Sequence[str]) -> Iterator[str | None]:
    """Yield what a key may mean, the most certain first."""
    table, _, name = key.rpartition(".")
    yield from (adapter.own(key) for adapter in adapters())
    plain = name.lstrip("-").replace("-", "_").lower()
    yield f"did you mean {plain}?" if plain in siblings else None
    elsewhere = _nearest([known for known in keys if known.rpartition(".")[2] == plain], table)
    yield f"did you mean {' or '.join(beside(known, table) for known in elsewhere)}?" if elsewhere else None
    yield setting_hint(key)
    yield megatron_hint(key)
    yield flag_hint(key)
    close = [known for known in get_close_matches(plain, siblings, cutoff=CLOSE) if _is_typo(plain, known)]
    yield f"did you mean {close[0]}?" if close else None


def flag_hint(key: str) -> str | None:
    """Return the equivalent of another project's flag if the last part of a key is one."""
    return _first(adapter.flag(key) for adapter in adapters())


def setting_hint(key: str) -> str | None:
    """Return the equivalent of another project's setting that a dotted key ends with."""
    return _first(adapter.setting(key) for adapter in adapters())


def grader_hint(name: str) -> str | None:
    """Return a hint for the name of another project's grader."""
    return _first(adapter.grader(name) for adapter in adapters())


def our_value(key: str, value: object) -> str | None:
    """Return what a value of another project is called here, of the key with this dotted name."""
    return _first(adapter.value(key, value) for adapter in adapters())


def _first(hints: Iterator[str | None]) -> str | None:
    return next(filter(None, hints), None)


def beside(key: str, table: str) -> str:
    """Move a key to the item of a table: data.0.path becomes data.1.path for the table data.1."""
    parts, place = key.split("."), table.split(".")
    if len(place) > 1 and len(parts) > 2 and parts[0] == place[0] and parts[0] in ITEMS:
        parts[1] = place[1]
    return ".".join(parts)


def _nearest(keys: Sequence[str], table: str) -> Sequence[str]:
    """Leave out the critic's keys where others have the name, or the others in a table of the critic's."""
    of_critic = table.startswith(OF_CRITIC)
    return [key for key in keys if key.startswith(OF_CRITIC) == of_critic] or keys


def _is_typo(name: str, known: str) -> bool:
    """Return whether two names differ only by letters, not by a word."""
    words, meant = name.split("_"), known.split("_")
    if len(words) != len(meant):
        return "".join(words) == "".join(meant)
    return all(SequenceMatcher(None, *pair).ratio() >= CLOSE_WORD for pair in zip(words, meant, strict=True))
