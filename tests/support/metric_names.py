"""Metric names: those that the code writes, read from its source, and those that docs/metrics.md has a row for."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
WRITERS = {"trainer": "actors/trainer", "buffer": "actors/buffer", "report": "runtime/report"}
ROW_KEYS = {"report": ("step", "time")}  # names without a family, which a source cannot be searched for
READ = {  # what the report takes of the trainer's
    ("report", "rollout/staleness_max"),
    ("report", "rollout/staleness_mean"),
    ("report", "train/sft_loss"),
}
NAME = re.compile(r"(train|rollout|perf|eval|multi_turn|groups|weights)/[\w<>@.-][\w<>@./-]*")
ROW = re.compile(r"^\| `([^`]+)` \| ([a-z, ]+) \| ")


def written() -> set[tuple[str, str]]:
    """Who writes which metric; what a name takes from elsewhere is <>."""
    found = {(writer, name) for writer, names in ROW_KEYS.items() for name in names}
    for writer, folder in WRITERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            found |= {(writer, name) for name in _names(ast.parse(path.read_text(encoding="utf-8")))}
    return found - READ


def documented() -> set[tuple[str, str]]:
    """The same of the page."""
    rows = filter(None, map(ROW.match, PAGE.read_text(encoding="utf-8").splitlines()))
    return {(writer, _any_hole(row[1])) for row in rows for writer in row[2].split(", ")}


def undocumented(rows: Iterable[Mapping[str, object]]) -> set[str]:
    """Names of real rows that the page has no row for."""
    forms = [re.compile(re.escape(name).replace("<>", r"[\w.-]+")) for _, name in documented()]
    names = {name for row in rows for name in row}
    return {name for name in names if not any(form.fullmatch(name) for form in forms)}


def _names(tree: ast.AST) -> Iterator[str]:
    parts: set[ast.AST] = set()  # of an f-string, which come after it
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts.update(node.values)
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "<>" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            text = node.value
        else:
            continue
        if NAME.fullmatch(text):
            yield text


def _any_hole(name: str) -> str:
    return re.sub(r"<[^>]*>", "<>", name)
