"""The fields of Megatron-core's configs, from a generated file, and why some are not keys."""

from functools import cache
from pathlib import Path
from typing import Final, Literal

import msgspec

HERE: Final = Path(__file__).parent
FIELDS: Final = HERE / "fields.toml"  # written by `python -m tests.support.megatron_fields`
ANSWERS: Final = HERE / "answers.toml"
TABLES: Final[dict[str, "Table"]] = {
    "trainer.megatron": "megatron",
    "trainer.optimizer": "optimizer",
    "trainer.ddp": "ddp",
}

Table = Literal["megatron", "optimizer", "ddp"]  # TransformerConfig, OptimizerConfig, DistributedDataParallelConfig


class Field(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One field, as in its dataclass."""

    type: str
    default: str  # Python's repr


class Fields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The config fields of one version of megatron-core."""

    version: str
    megatron: dict[str, Field]
    optimizer: dict[str, Field]
    ddp: dict[str, Field]


class NoKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why some fields are not keys here: fields with these names or prefixes."""

    why: str
    names: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()


@cache
def megatron_fields() -> Fields:
    """Return the table of Megatron-core's config fields, read once.

    Raises:
        msgspec.ValidationError: the data file is invalid.
    """
    return msgspec.toml.decode(FIELDS.read_bytes(), type=Fields)


@cache
def answers() -> dict[Table, tuple[NoKey, ...]]:
    """Return why fields are not keys, read once.

    Raises:
        msgspec.ValidationError: the data file is invalid.
    """
    return msgspec.toml.decode(ANSWERS.read_bytes(), type=dict[Table, tuple[NoKey, ...]])


def why_no_key(table: Table, name: str) -> str | None:
    """Return why a Megatron-core field is not a key here; None if it is one, or no field."""
    if name not in getattr(megatron_fields(), table):
        return None
    fitting = [
        (len(name) + 1 if name in answer.names else _prefix(answer, name), answer) for answer in answers()[table]
    ]
    length, best = max(fitting, key=lambda found: found[0])
    return best.why if length else None


def _prefix(answer: NoKey, name: str) -> int:
    return max((len(prefix) for prefix in answer.prefixes if name.startswith(prefix)), default=0)


def megatron_hint(key: str) -> str | None:
    """Return why an unknown key of one of the three tables cannot be set; None for other keys."""
    table, _, name = key.rpartition(".")
    why = why_no_key(TABLES[table], name) if table in TABLES else None
    return None if why is None else f"Megatron-core's {name} has no key here: {why}"
