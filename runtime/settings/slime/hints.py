"""Hints for unknown keys: a name of slime, verl, prime-rl or NeMo-RL for a setting, another table's key, or a typo."""

import re
from collections.abc import Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import Final

from runtime.settings.megatron.fields import megatron_hint
from runtime.settings.peers.names import find_peer
from runtime.settings.slime.flags import FlagAnswer, Found, find_by_rule, find_flag, from_slime, spelled_as_flag

CLOSE: Final = 0.75  # similarity of whole names; 1 is equal
CLOSE_WORD: Final = 0.6  # similarity of each word: min_lr is not a typo of max_lr
ENGINES: Final = "engines"
ITEMS: Final = ("data", ENGINES, "eval", "nodes")  # lists, and tables by name
OF_CRITIC: Final = "trainer.critic"  # has keys of `trainer` again
OF_TRAINERS: Final = "Megatron"  # its names in an engine pool are SGLang arguments


def slime_grader_hint(name: str) -> str | None:
    """Return a hint for the name of a slime grader; None for other names, and if our grader has the same name."""
    grader = next((grader for grader in from_slime().graders if grader.name == name), None)
    return (
        None
        if grader is None or grader.key == name
        else f"slime's {name} is not implemented yet: {plain_text(grader.remark)};"
    )


def hint(key: str, siblings: Sequence[str], keys: Sequence[str]) -> str | None:
    """Return what an unknown key probably means; None if a guess could mislead.

    Args:
        key: dotted, "data.0.prompt-data".
        siblings: keys of its table.
        keys: every key of the schema; for lists and named tables those of one item, "data.0.path".
    """
    table, _, name = key.rpartition(".")
    below_its_prefix = find_flag(f"{table.partition('.')[0]}-{name}")
    found = find_flag(name) if name.startswith("-") else below_its_prefix or find_flag(name)
    if found is not None:
        return _text_of(found, table)
    plain = spelled_as_flag(name).replace("-", "_").lower()
    if plain in siblings:
        return f"did you mean {plain}?"
    if elsewhere := _nearest([known for known in keys if known.rpartition(".")[2] == plain], table):
        return f"did you mean {' or '.join(_beside(known, table) for known in elsewhere)}?"
    if of_peer := peer_hint(key):
        return of_peer
    if of_megatron := megatron_hint(key):
        return of_megatron
    close = [known for known in get_close_matches(plain, siblings, cutoff=CLOSE) if _is_typo(plain, known)]
    return flag_hint(key) or (f"did you mean {close[0]}?" if close else None)


def flag_hint(key: str) -> str | None:
    """Return the equivalent of a slime flag if the last part of a key is one."""
    table, _, name = key.rpartition(".")
    found = find_flag(name) or find_by_rule(name)
    if found is None or (table.startswith(ENGINES) and found.whose == OF_TRAINERS):
        return None
    return _text_of(found, table)


def peer_hint(key: str) -> str | None:
    """Return the equivalent of a setting of verl, prime-rl or NeMo-RL that a dotted key ends with."""
    found = find_peer(key)
    if found is None:
        return None
    project, setting = found
    return _answered(f"{project}'s {setting.name}", setting.answer, key.rpartition(".")[0])


def _text_of(found: Found, table: str) -> str:
    return _answered(f"{found.whose}'s --{found.flag}", found.answer, table)


def _answered(flag: str, answer: FlagAnswer, table: str) -> str:
    remark = plain_text(answer.remark)
    if answer.key is not None:
        return f"{flag} is {_beside(answer.key, table)} here" + (f" ({remark})" if remark else "")
    return f"{flag} {'has no key here' if answer.no is not None else 'is not implemented yet'}: {remark}"


def _beside(key: str, table: str) -> str:
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


def plain_text(text: str) -> str:
    """Convert Markdown of docs/ to plain text for a terminal."""
    return re.sub(r"\[[^]]+\]\(([^)]+)\)", r"docs/\1", text).replace("`", "")
