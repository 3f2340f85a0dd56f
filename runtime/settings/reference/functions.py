"""Generates docs/reference/functions.md: what settings name, from what the tables declare."""

from collections.abc import Iterator
from math import isfinite

import msgspec

from runtime.functions.table import UserFunction
from runtime.settings.reading.access import Access, access_of, function_of
from runtime.settings.reference.page import Table, key_of, tables_of
from runtime.settings.topology import Topology

HEAD = """# Functions, programs and code that settings name

Written by `bin/describe-settings` from what the settings in `runtime/settings/tables/` declare; do not edit.

## Functions of yours

[Your own functions](../train/own-functions.md) has an example of each. A name is `module:function` or
`path/file.py:function`. `--check` and every start import each and compare its parameters, in a process with the limits
of a run where it has one; those of the trainer are also called with two samples. The process of a function has the
limits `reward.memory_bytes`, `reward.max_files` and `reward.env`. A stranger's file may name built-in functions alone:
`--trust` lets in others.

| settings | what it does | called with | runs in | a call is limited by |
|---|---|---|---|---|
"""
OTHERS = """
## Interpreters, and what code gets

No key of a stranger's file that this table has is taken without `--trust`. A relative path is looked up beside the
file, as that of a function is; also the directories of `PYTHONPATH` in `env`.

| settings | names |
|---|---|
"""


def functions_page() -> str:
    """Return the text of docs/reference/functions.md."""
    rows = (_row(function, keys) for function, keys in keys_by_function().items())
    return "".join([HEAD, *rows, OTHERS, *(_code_row(access) for access in (Access.PROGRAM, Access.CODE))])


def keys_by_function() -> dict[UserFunction, list[str]]:
    """Return the settings that name a function of each kind."""
    found: dict[UserFunction, list[str]] = {}
    for key, kind in _declared():
        if (function := function_of(kind)) is not None:
            found.setdefault(function, []).append(key)
    return found


def _declared() -> Iterator[tuple[str, object]]:
    for table in tables_of(Table(config=Topology, place="", heading="")):
        yield from ((key_of(table, field), field.type) for field in msgspec.structs.fields(table.config))


def _row(function: UserFunction, keys: list[str]) -> str:
    limit = f"{function.timeout_s:g} s" if isfinite(function.timeout_s) else function.limited_by
    about = f"[{function.name}](../{function.page}): {function.about}"
    return f"| {', '.join(f'`{key}`' for key in keys)} | {about} | {function.called} | {function.runs_in} | {limit} |\n"


def _code_row(access: Access) -> str:
    return f"| {', '.join(f'`{key}`' for key, kind in _declared() if access_of(kind) is access)} | {access.value} |\n"
