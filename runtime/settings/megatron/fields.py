"""The fields of Megatron-core's configs, from a generated file, and what becomes of each."""

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
    """One field, as its dataclass writes it."""

    type: str
    default: str  # Python's repr


class Fields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a version of megatron-core takes."""

    version: str
    megatron: dict[str, Field]
    optimizer: dict[str, Field]
    ddp: dict[str, Field]


class NoKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why fields are no keys here: those of these names, and those that begin so."""

    why: str
    names: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()


@cache
def megatron_fields() -> Fields:
    """The table, read once.

    Raises:
        msgspec.ValidationError: a mistake in the data file.
    """
    return msgspec.toml.decode(FIELDS.read_bytes(), type=Fields)


@cache
def answers() -> dict[Table, tuple[NoKey, ...]]:
    """Why fields are no keys, read once.

    Raises:
        msgspec.ValidationError: a mistake in the data file.
    """
    return msgspec.toml.decode(ANSWERS.read_bytes(), type=dict[Table, tuple[NoKey, ...]])


def why_no_key(table: Table, name: str) -> str | None:
    """Why a field of Megatron-core's is no key here; None for a name that it does not have, or that is one."""
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
    """Say why a key of one of the three tables, which does not exist, cannot be set."""
    table, _, name = key.rpartition(".")
    why = why_no_key(TABLES[table], name) if table in TABLES else None
    return None if why is None else f"Megatron-core's {name} has no key here: {why}"
