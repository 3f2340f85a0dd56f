"""Generates docs/reference/settings.md from the schema: a section per table, a row per key.

A field with a comment above it, which describes it, and the comment `# expert` at its end is an expert setting.
"""

import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final, get_origin

import msgspec

from runtime.settings.objective import default_formula
from runtime.settings.reading.access import Access, access_of
from runtime.settings.reading.config import Choice, Config, type_of
from runtime.settings.reading.schema import choices, describe, is_config, item_type
from runtime.settings.recipe import Recipe
from runtime.settings.topology import Topology
from runtime.util.field_comments import Field, fields_in
from runtime.util.formatting import show

HEAD: Final = """# All settings

Written by `bin/describe-settings` from `runtime/settings/tables/`; do not edit.

A topology is a TOML file that says what runs where. It includes a recipe, which says what is trained. Both are one
set of tables: any key may be in either file, and can be set for one start with `--set`:

    bin/start-topology topologies/laptop.toml --set train.num_steps=3 --set data.0.path=other.jsonl

Keys are written as `--set` takes them. In a file `data.0` is the first `[[data]]`, `data.1` the second, and
`engines.<name>` is `[engines.policy]`. Later values win, in this order: included files, the file itself, `--set`.
Tables are merged key by key, but a table with another `type` replaces the one before; lists are replaced whole.
A default of none means that the key is left out; `--set key=none` leaves it out for one start.

A table with a `type` has the keys of that type: `[algorithm.loss]` with `type = "gspo"` has those of the section with
this name. Without `type` it has the default one. `type = "none"` leaves out a table that has no default.

`include = "recipes/demo.toml"` at the top of a file (or a list) names files that are read first. They are looked up
in the folder of the file and among the shipped topologies.

`bin/start-topology FILE --check` reports all violated rules between keys at once.

The end of a description says what the key names or decides, if it is not harmless. Such keys of a stranger's dump need
`--trust`, and so do all keys of most tables ([files from other people](../run/security.md#dumps)).
"""
RECIPE: Final = "\n# Recipe: what is trained\n"
TOPOLOGY: Final = "\n# Topology: what runs where\n"
ROWS: Final = "\n| key | allowed | default | means |\n|---|---|---|---|\n"
EXPERT: Final = """### Expert settings

For runs where an error message names the setting, or where you measure its effect. The defaults fit all others.
"""
BAR: Final = r"\|"  # a bar inside a cell


EXPERT_MARK: Final = "expert"


@cache
def meanings(config: type[Config]) -> Mapping[str, str]:
    """Return the description of each field of a table by name, inherited fields included; "" where there is none."""
    return {field.name: field.text for field in _all_fields(config)}


@cache
def expert_settings(config: type[Config]) -> frozenset[str]:
    """Return the names of the fields of a table that are expert settings, inherited ones included."""
    return frozenset(field.name for field in _all_fields(config) if field.beside == EXPERT_MARK)


def _all_fields(config: type[Config]) -> Iterator[Field]:
    for base in reversed(config.__mro__):
        if issubclass(base, Config):
            yield from fields_in(inspect.getsource(base))


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A settings table at one place in the topology."""

    config: type[Config]
    place: str  # prefix of its keys: "run", "data.0", "engines.<name>"; "" for the whole topology
    heading: str  # as TOML writes it
    note: str = ""  # description of the field that holds it


def settings_page() -> str:
    """Return the text of docs/reference/settings.md."""
    tables = list(tables_of(Table(config=Topology, place="", heading="")))
    recipe = set(Recipe.__struct_fields__)
    parts = [[table for table in tables if (_top(table) in recipe) is is_recipe] for is_recipe in (True, False)]
    return "".join([HEAD, RECIPE, *map(_section, parts[0]), TOPOLOGY, *map(_section, parts[1])])


def tables_of(whole: Table) -> Iterator[Table]:
    """Yield a table and all tables in it, outer tables first."""
    yield whole
    for field in msgspec.structs.fields(whole.config):
        for config in choices(field.type).values():
            key = key_of(whole, field)
            heading = f'[{key}] type = "{type_of(config)}"'
            yield from tables_of(Table(config=config, place=key, heading=heading))
        if is_config(field.type) or item_type(field.type) is not None:
            yield from tables_of(_inner(whole, field))


def _inner(whole: Table, field: msgspec.structs.FieldInfo) -> Table:
    key = key_of(whole, field)
    place, heading = {
        dict: (f"{key}.<name>", f"[{key}.<name>]"),
        tuple: (f"{key}.0", f"[[{key}]]"),
    }.get(get_origin(field.type), (key, f"[{key}]"))
    note = meanings(whole.config)[field.name]
    return Table(config=item_type(field.type) or field.type, place=place, heading=heading, note=note)


def _is_plain(field: msgspec.structs.FieldInfo) -> bool:
    return not is_config(field.type) and item_type(field.type) is None  # also the `type` of a table that has one


def key_of(table: Table, field: msgspec.structs.FieldInfo) -> str:
    return f"{table.place}.{field.encode_name}".lstrip(".")


def _top(table: Table) -> str:
    return table.place.partition(".")[0]


def _section(table: Table) -> str:
    heading = f"## `{table.heading}`" if table.heading else "## Above all tables"
    about = (table.config.__doc__ or "").partition("\n")[0]
    if issubclass(table.config, Choice):
        about = " ".join(inspect.cleandoc(table.config.__doc__ or "").split()) + _formula(table.config)
    note = f" {table.note}" if table.note else ""
    note += (
        "" if table.config.harmless or not table.heading else " In a stranger's dump all of its keys need `--trust`."
    )
    fields = [field for field in msgspec.structs.fields(table.config) if _is_plain(field)]
    expert = expert_settings(table.config)
    rows = "".join(_row(table, field) for field in fields if field.name not in expert)
    expert_rows = "".join(_row(table, field) for field in fields if field.name in expert)
    text = f"\n{heading}\n\n{about}{note}\n{f'{ROWS}{rows}' if rows else ''}"
    return text + (f"\n{EXPERT}{ROWS}{expert_rows}" if expert_rows else "")


def _formula(config: type[Choice]) -> str:
    """Say the formula of a type with its defaults, and its source."""
    formula = default_formula(config)
    return f" `{formula}`{f' ({config.source})' if config.source else ''}." if formula else ""


def _row(table: Table, field: msgspec.structs.FieldInfo) -> str:
    tables, key, allowed = choices(field.type), key_of(table, field), describe(field.type)
    if tables:
        key, allowed = f"{key}.type", f"one of {', '.join(repr(name) for name in tables)}"
    cells = (allowed, _default(field), f"{meanings(table.config)[field.name]}{_names(field)}")
    return f"| `{key}` | {' | '.join(cell.replace('|', BAR) for cell in cells)} |\n"


def _names(field: msgspec.structs.FieldInfo) -> str:
    """Say what a key gives access to; nothing of one that its table describes."""
    access = access_of(field.type)
    if access is None or access is Access.HARMLESS:
        return ""
    return f" {'Decides' if access is Access.RUNNING else 'Names'} {access.value}."


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value: Any = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if isinstance(value, Choice):
        value = value.type
    return "none" if value is None else f"`{show(value)}`"
