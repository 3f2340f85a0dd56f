"""Hints for names of slime: what its flags and graders are here."""

import re
from typing import Final

from runtime.compat.slime.flags import FlagAnswer, Found, find_by_rule, find_flag, from_slime
from runtime.settings.reading.hints import ENGINES, beside

OF_TRAINERS: Final = "Megatron"  # its names in an engine pool are SGLang arguments


def grader_hint(name: str) -> str | None:
    """Return a hint for the name of a slime grader; None for other names, and if our grader has the same name."""
    grader = next((grader for grader in from_slime().graders if grader.name == name), None)
    return (
        None
        if grader is None or grader.key == name
        else f"slime's {name} is not implemented yet: {plain_text(grader.remark)};"
    )


def own_flag_hint(key: str) -> str | None:
    """Return the equivalent of a flag that slime itself has, if a key is one, or becomes one with its table's name."""
    table, _, name = key.rpartition(".")
    below_its_prefix = None if name.startswith("-") else find_flag(f"{table.partition('.')[0]}-{name}")
    found = below_its_prefix or find_flag(name)
    return None if found is None else _text_of(found, table)


def flag_hint(key: str) -> str | None:
    """Return the equivalent of a slime flag if the last part of a key is one."""
    table, _, name = key.rpartition(".")
    found = find_flag(name) or find_by_rule(name)
    if found is None or (table.startswith(ENGINES) and found.whose == OF_TRAINERS):
        return None
    return _text_of(found, table)


def _text_of(found: Found, table: str) -> str:
    return answered(f"{found.whose}'s --{found.flag}", found.answer, table)


def answered(name: str, answer: FlagAnswer, table: str) -> str:
    """Format the answer to a name of another project in a settings table."""
    remark = plain_text(answer.remark)
    if answer.key is not None:
        return f"{name} is {beside(answer.key, table)} here" + (f" ({remark})" if remark else "")
    return f"{name} {'has no key here' if answer.no is not None else 'is not implemented yet'}: {remark}"


def plain_text(text: str) -> str:
    """Convert Markdown of docs/ to plain text for a terminal."""
    return re.sub(r"\[[^]]+\]\(([^)]+)\)", r"docs/\1", text).replace("`", "")
