"""Writes a converted start script as two TOML files: a recipe, and the topology that includes it."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from textwrap import wrap
from typing import Any, Final

from bin.slime_scripts.convert import Converted
from bin.slime_scripts.given import Left, Setting

RECIPE: Final = ("model", "data", "rollout", "algorithm", "critic", "optimizer", "train", "eval", "reward")
TOPOLOGY: Final = ("run", "bus", "nodes", "trainer", "engines", "observe")
LEARNING: Final = (  # keys of other tables that decide what is learnt: they are in the recipe, for all that include it
    "run.seed",
    "trainer.load",
    "trainer.load_weights_only",
    "trainer.megatron.moe_",
    "trainer.megatron.mtp_",
    "trainer.optimizer.apply_wd_",
)
STATES: Final = ("by hand", "unknown", "not yet", "no")
LOST: Final = """
# The run is another one without these. --check refuses each: delete its line once a setting replaces it, or the run may
# go without it.
[not_converted]"""
WIDTH: Final = 110
BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


def written_recipe(converted: Converted, source: str) -> str:
    """Return the text of the recipe, with the flags that became no setting at its end.

    Args:
        source: what it was made from, for the first line.
    """
    tables = _tables([setting for setting in converted.settings if _is_learnt(setting)], (*RECIPE, *TOPOLOGY))
    lost = _lost([left for left in converted.left if left.is_lost])
    left = _left([left for left in converted.left if not left.is_lost])
    return "\n".join([f"# Recipe, made by bin/from-slime from {source}.", *tables, *lost, *left]) + "\n"


def written_topology(converted: Converted, source: str, recipe: str) -> str:
    """Return the text of the topology, which includes the recipe."""
    head = [f"# Topology, made by bin/from-slime from {source}.", f"include = {toml(recipe)}"]
    others = [setting for setting in converted.settings if not _is_learnt(setting)]
    return "\n".join([*head, *_tables(others, TOPOLOGY)]) + "\n"


def _is_learnt(setting: Setting) -> bool:
    """Return whether a setting decides what is learnt, not where."""
    return setting.key.partition(".")[0] in RECIPE or setting.key.startswith(LEARNING)


def toml(value: Any) -> str:
    """Write a value in TOML: text, number, bool, list, or table on one line."""
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(name)} = {toml(entry)}" for name, entry in value.items())  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return f"{{ {inner} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml(entry) for entry in value)}]"  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, float):
        return re.sub(r"e([-+])0+(\d)", r"e\1\2", repr(value))
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _tables(settings: Iterable[Setting], names: Sequence[str]) -> Iterator[str]:
    """Yield the lines of tables in the order of `names`."""
    ordered = sorted(settings, key=lambda setting: (names.index(setting.key.partition(".")[0]), _table(setting.key)))
    for table, group in groupby(ordered, key=lambda setting: _table(setting.key)):
        yield ""
        yield _heading(table)
        lines = [
            (f"{_key(setting.key[len(table) + 1 :])} = {toml(setting.value)}", setting.remark) for setting in group
        ]
        width = min(max(len(line) for line, _ in lines), 48)
        yield from (f"{line:<{width}}  # {remark}" if remark else line for line, remark in lines)


def _table(key: str) -> str:
    return key.rpartition(".")[0]


def _heading(table: str) -> str:
    """Return the heading of a table; those of a list have its name alone."""
    name, _, number = table.rpartition(".")
    return f"[[{name}]]" if number.isdigit() else f"[{table}]"


def _key(name: str) -> str:
    return name if BARE.fullmatch(name) else json.dumps(name)


def _lost(lost: Sequence[Left]) -> Iterator[str]:
    """Yield one line for each flag without which the run is another one."""
    if lost:
        yield LOST
    for flag, named in groupby(sorted(lost, key=lambda left: left.flag), key=lambda left: left.flag):
        what = "; ".join(f"{one.remark} ({one.place})" for one in named)
        yield f"{json.dumps(flag, ensure_ascii=False)} = {toml(what)}"


def _left(left: Sequence[Left]) -> Iterator[str]:
    """Yield the flags without a setting as comments, by state."""
    for state, heading in (("not yet", "Not implemented yet"), ("no", "No setting here, and why")):
        of_state = [flag for flag in left if flag.state == state]
        if of_state:
            yield f"\n# {heading}:"
        for remark in dict.fromkeys(flag.remark for flag in of_state):
            names = ", ".join(f"{flag.flag} ({flag.place})" for flag in of_state if flag.remark == remark)
            text = f"{names}: {remark}".replace("\n", " ")
            yield from wrap(
                text,
                WIDTH,
                initial_indent="#   ",
                subsequent_indent="#     ",
                break_long_words=False,
                break_on_hyphens=False,
            )
