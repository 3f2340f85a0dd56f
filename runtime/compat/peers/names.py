"""What settings of verl, prime-rl, NeMo-RL and AReaL are called here: hints for unknown keys and values, and a page."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from runtime.compat.slime.flags import FlagAnswer, find_flag
from runtime.compat.slime.hints import answered

DATA: Final = Path(__file__).with_suffix(".toml")

HEAD: Final = """# Coming from verl, prime-rl, NeMo-RL or AReaL

Written by `bin/describe-settings` from `runtime/compat/peers/names.toml`; do not edit.

A key here has slime's name where slime has one, else verl's, else prime-rl's ([from slime](from-slime.md)). The others
are in these tables; an unknown key is refused with the same answer. A key of verl's `actor_rollout_ref.actor` is in
`algorithm` or `optimizer`. Names that mean the same there and here are left out. There is no converter for recipes of
these projects: this page and the hints of `--check` are all. Only slime's launch scripts are converted, by
[`bin/from-slime`](from-slime.md).

Versions: verl 0.9.1, prime-rl at 559b4477, NeMo-RL at 7ea279ab, AReaL at cbff54d6. Estimators and losses are in
[algorithms](../train/algorithms.md) and [losses](../train/losses.md); formulas and differences from the
others are in [functions](algorithms.md).
"""

FUNCTIONS_HEAD: Final = """
## Functions

What replaces the functions of slime (624b824a) and of the others. Results are equal to 1e-6 in float32 but for what the
last column names. Tests compare most of them with numbers that the others returned: `peer_numbers.json` and
`peer_edges.json` in `tests/actors/trainer/algorithms/`, each written by the script beside it.
"""


class Setting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One setting of another project. Exactly one of key, slime, no and not_yet is set."""

    name: str  # the end of its dotted key
    key: str | None = None
    note: str | None = None
    slime: str | None = None  # the slime flag whose answer is this setting's
    no: str | None = None
    not_yet: str | None = None

    @property
    def answer(self) -> FlagAnswer:
        """Return what replaces it here.

        Raises:
            ValueError: Not exactly one of the four is set, or slime has no such flag.
        """
        if self.slime is None:
            return FlagAnswer(key=self.key, note=self.note, no=self.no, not_yet=self.not_yet)
        found = find_flag(self.slime)
        if found is None or self.key or self.no or self.not_yet:
            raise ValueError(f"{self.name}: slime's flag {self.slime} has to exist, and to be its only answer")
        return found.answer


class Project(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One project and its settings."""

    name: str
    settings: tuple[Setting, ...]


class Values(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values that other projects give a setting, and the value here for each."""

    key: str
    ours: dict[str, str]


class Function(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Functions of another project, and the one that replaces them here."""

    there: str
    here: str  # module and name below actors.trainer.algorithms
    differs: str  # where their results differ; "" if nowhere


class Functions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Functions of one project."""

    name: str
    rows: tuple[Function, ...]


class Names(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the data file, names.toml."""

    projects: tuple[Project, ...]
    values: tuple[Values, ...]
    functions: tuple[Functions, ...]


@cache
def peer_names() -> Names:
    """Return the settings of other projects. The data file is read once.

    Raises:
        msgspec.ValidationError: The data file is invalid.
    """
    return msgspec.toml.decode(DATA.read_bytes(), type=Names)


def find_peer(key: str) -> tuple[str, Setting] | None:
    """Find the setting of another project that a dotted key ends with, and the project. The longest name wins."""
    name = "." + key.lstrip("-").replace("-", "_")
    fitting = [
        (len(setting.name), project.name, setting)
        for project in peer_names().projects
        for setting in project.settings
        if name.endswith(f".{setting.name}")
    ]
    if not fitting:
        return None
    _, project, setting = max(fitting, key=lambda found: found[0])
    return project, setting


def peer_hint(key: str) -> str | None:
    """Return the equivalent of a setting of verl, prime-rl or NeMo-RL that a dotted key ends with."""
    found = find_peer(key)
    if found is None:
        return None
    project, setting = found
    return answered(f"{project}'s {setting.name}", setting.answer, key.rpartition(".")[0])


def peer_value(key: str, value: object) -> str | None:
    """Return what a value of another project is called here, of the key with this dotted name."""
    named = {values.key: values.ours for values in peer_names().values}
    return named.get(key, {}).get(value) if isinstance(value, str) else None


def peers_page() -> str:
    """Return the text of docs/reference/from-verl.md."""
    settings = (_section(project) for project in peer_names().projects)
    functions = (_functions(project) for project in peer_names().functions)
    return "".join([HEAD, *settings, *_values(), FUNCTIONS_HEAD, *functions])


def _section(project: Project) -> str:
    rows = "".join(_row(setting) for setting in project.settings)
    return f"\n## {project.name}\n\n| there | here | |\n|---|---|---|\n{rows}"


def _row(setting: Setting) -> str:
    answer = setting.answer
    remark = answer.remark.replace("](", "](../").replace("../http", "http")
    here = answer.state if answer.key is None else f"`{answer.key}`"
    return f"| `{setting.name}` | {here} | {remark}{' ' if remark else ''}|\n"


def _values() -> Iterator[str]:
    yield "\n## Values\n\n| key here | there | here |\n|---|---|---|\n"
    for values in peer_names().values:
        yield from (f"| `{values.key}` | `{there}` | `{ours}` |\n" for there, ours in values.ours.items())


def _functions(project: Functions) -> str:
    rows = "".join(
        f"| {', '.join(f'`{name}`' for name in row.there.split(', '))} | {_linked(row.here)} | {row.differs or '-'} |\n"
        for row in project.rows
    )
    return f"\n### Functions of {project.name}\n\n| there | here | differs |\n|---|---|---|\n{rows}"


def _linked(function: str) -> str:
    module, _, name = function.partition(".")
    return f"[`{name}`](algorithms/{module}.md#{name})"
