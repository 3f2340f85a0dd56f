"""docs/develop/invariants.md: each rule cites tests that exist."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "develop" / "invariants.md"
CITED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rules() -> list[tuple[str, str]]:
    """Rules and the tests cited for each, of all tables before the list of what is not tested."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## Not tested yet")[0]
    rows = [line.strip("|").rsplit("|", 1) for line in text.splitlines() if line.startswith("| ")]
    return [(rule.strip(), tests.strip()) for rule, tests in rows if rule.strip() != "rule"]


@functools.cache
def functions_of(path: str) -> frozenset[str]:
    """Names of a file's test functions; none if there is no such file."""
    file = ROOT / path
    nodes = ast.parse(file.read_bytes()).body if file.is_file() else []
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_rule_cites_a_test() -> None:
    assert len(rules()) > 100
    assert [rule for rule, tests in rules() if not CITED.search(tests)] == []


def test_every_cited_test_exists() -> None:
    cited = [found for _, tests in rules() for found in CITED.findall(tests)]
    assert [f"{path}::{name}" for path, name in cited if name not in functions_of(path)] == []
    assert len(cited) == sum(tests.count("::") for _, tests in rules())
