"""Files and folders that the pages for developers name exist."""

import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
MAPS: Final = [ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "develop").glob("*.md"))]
PATH: Final = re.compile(r"`((?:actors|bin|docs|messages|requirements|runtime|tests|topologies)/[\w./-]*)(?:::\w+)?`")
NAME: Final = re.compile(r"`(_?[A-Z][A-Z_]{3,}|_[a-z_]+|[A-Z][a-z]+[A-Z]\w+)`")  # constants, private functions, classes
SOURCES: Final = ("actors", "bin", "messages", "runtime", "tests/messages")
WRITTEN: Final = re.compile(r"docs/results/(DATE|$)")  # by commands


@pytest.mark.parametrize("page", MAPS, ids=lambda page: page.name)
def test_every_path_that_a_map_names_exists(page: Path) -> None:
    named = {path for path in PATH.findall(page.read_text(encoding="utf-8")) if not WRITTEN.match(path)}
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def sources() -> str:
    """All modules, in one text."""
    files = (file for folder in SOURCES for file in sorted((ROOT / folder).rglob("*.py")))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def test_every_name_of_the_code_that_the_steps_use_exists() -> None:
    text = sources()
    named = {name for name in NAME.findall((ROOT / "docs" / "develop" / "changes.md").read_text(encoding="utf-8"))}
    assert {"FOLD_VERSION", "_parser", "EngineConfig"} <= named
    assert sorted(name for name in named if not re.search(rf"\b{name}\b", text)) == []


def test_paths_are_found() -> None:
    text = "`tests/a.py`, `tests/b.py::test_c`, `actors/d/` and not `bin/test --all`"
    assert PATH.findall(text) == ["tests/a.py", "tests/b.py", "actors/d/"]
