"""Files and folders that the pages for developers name exist."""

import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
MAPS: Final = [ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "develop").glob("*.md"))]
PATH: Final = re.compile(r"`((?:actors|bin|docs|messages|requirements|runtime|tests|topologies)/[\w./-]*)(?:::\w+)?`")
WRITTEN: Final = re.compile(r"docs/results/(DATE|$)")  # by commands


@pytest.mark.parametrize("page", MAPS, ids=lambda page: page.name)
def test_every_path_that_a_map_names_exists(page: Path) -> None:
    named = {path for path in PATH.findall(page.read_text(encoding="utf-8")) if not WRITTEN.match(path)}
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def test_paths_are_found() -> None:
    text = "`tests/a.py`, `tests/b.py::test_c`, `actors/d/` and not `bin/test --all`"
    assert PATH.findall(text) == ["tests/a.py", "tests/b.py", "actors/d/"]
