"""docs/from-slime.md names only keys that exist, and says of every flag what becomes of it."""

import re
from pathlib import Path

import pytest

from runtime.settings.toml import type_at
from runtime.settings.topology import Topology

LINES = (Path(__file__).resolve().parents[3] / "docs/from-slime.md").read_text(encoding="utf-8").splitlines()
FLAG_ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in LINES[: LINES.index("## Sample fields")]
    if line.startswith("| ") and not line.startswith("| slime |")
]
KEYS = sorted(
    {
        key
        for line in LINES
        for key in re.findall(r"`([a-z_]+(?:\.[a-z0-9_]+)+)`", line)
        if key.split(".")[0] in Topology.__struct_fields__
    }
)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_that_is_named_exists(key: str) -> None:
    type_at(Topology, key.split("."))


@pytest.mark.parametrize("row", FLAG_ROWS, ids=lambda row: row[0])
def test_every_flag_has_a_key_or_an_answer(row: list[str]) -> None:
    _flag, ours, remark = row
    assert ours in {"no", "not yet"} or ours.strip("`") in KEYS
    assert remark or ours != "no", "a no has a reason"


def test_every_recipe_key_with_a_name_of_slime_is_in_the_table() -> None:
    for table in ("rollout", "algorithm", "optimizer"):
        for name in type_at(Topology, [table]).__struct_fields__:
            assert f"{table}.{name}" in KEYS or name in {"max_attempts", "max_barren_groups", "adam_beta2"}, (
                f"{table}.{name}"
            )
