"""Writes the fields of the installed megatron-core's configs in the form of runtime/settings/megatron/fields.toml.

Run: python -m tests.support.megatron_fields > runtime/settings/megatron/fields.toml
"""

import sys
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from importlib import metadata
from typing import Any, Final

import msgspec

from actors.trainer.megatron import imports

CONFIGS: Final = {
    "megatron": imports.TransformerConfig,
    "optimizer": imports.OptimizerConfig,
    "ddp": imports.DistributedDataParallelConfig,
}


def found() -> dict[str, dict[str, dict[str, str]]]:
    """Type and default of every field, by table."""
    tables = {table: {field.name: _row(field) for field in fields(config)} for table, config in CONFIGS.items()}
    of_latents = {field.name: _row(field) for field in fields(imports.MLATransformerConfig)}
    return tables | {"megatron": of_latents | tables["megatron"]}


def _row(field: Field[Any]) -> dict[str, str]:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    type_name = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    return {"type": type_name.replace("typing.", ""), "default": "required" if default is MISSING else _shown(default)}


def _shown(default: Any) -> str:
    return f"{type(default).__name__}.{default.name}" if hasattr(default, "name") else repr(default)


def page(tables: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    """Format the file."""
    lines = [
        "# Written by `python -m tests.support.megatron_fields`; do not edit.",
        f'version = "{metadata.version("megatron-core")}"',
    ]
    for table, rows in tables.items():
        lines += ["", f"[{table}]"]
        lines += [f"{name} = {{ {', '.join(_entry(*part) for part in row.items())} }}" for name, row in rows.items()]
    return "\n".join(lines) + "\n"


def _entry(key: str, text: str) -> str:
    return f"{key} = {msgspec.json.encode(text).decode()}"  # JSON strings are valid TOML


if __name__ == "__main__":
    sys.stdout.write(page(found()))
