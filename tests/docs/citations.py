"""Test functions that pages cite: `test_name`, or `file.py::test_name` where several files have one of that name."""

import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEFINED = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)  # parsing all tests takes seconds
CITED = re.compile(r"`(?:([\w/]+\.py)::)?(test_\w+)`")


@functools.cache
def files_of_tests() -> dict[str, tuple[Path, ...]]:
    """Files of each test function under tests/."""
    found: dict[str, tuple[Path, ...]] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in dict.fromkeys(DEFINED.findall(file.read_text(encoding="utf-8"))):
            found[name] = (*found.get(name, ()), file)
    return found


def cited_files(path: str, name: str) -> list[Path]:
    """Files that a citation may mean: exactly one where the citation is right."""
    wanted = Path(path).parts
    return [file for file in files_of_tests().get(name, ()) if not wanted or file.parts[-len(wanted) :] == wanted]


def wrong_citations(text: str) -> list[str]:
    """Citations that name no test or more than one, or that have another form."""
    cited = CITED.findall(text)
    wrong = [f"{path}::{name}".removeprefix("::") for path, name in cited if len(cited_files(path, name)) != 1]
    whole = sum(bool(path) for path, _ in cited)
    return wrong if whole == text.count(".py::") else [*wrong, "a citation of another form"]
