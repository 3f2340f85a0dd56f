"""Metric names in the source code, and those with a row in docs/reference/metrics.md."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "metrics.md"
WRITERS = {"trainer": "actors/trainer", "buffer": "actors/buffer", "report": "runtime/report"}
ROW_KEYS = {"report": ("step", "time")}  # names without a family, which a search of the source cannot find
READ = {  # metrics that the report reads from the trainer
    ("report", "perf/<>_time"),
    ("report", "perf/fetch_time"),
    ("report", "perf/train_time"),
    ("report", "perf/train_wait_time"),
    ("report", "perf/update_weights_time"),
    ("report", "rollout/staleness_max"),
    ("report", "rollout/staleness_mean"),
    ("report", "train/entropy_loss"),
    ("report", "train/grad_norm"),
    ("report", "train/kl_loss"),
    ("report", "train/loss"),
    ("report", "train/num_response_tokens"),
    ("report", "train/preference_loss"),
    ("report", "train/sft_loss"),
}
FROM_USERS = {("trainer", "train/<>")}  # named by an importance-sampling function of the user
NAME = re.compile(r"(train|rollout|perf|eval|multi_turn|groups|weights|passrate)/[\w<>@.-][\w<>@./-]*")
ROW = re.compile(r"^\| `([^`]+)` \| ([a-z, ]+) \| ")


def written() -> set[tuple[str, str]]:
    """Find the metrics that each component writes. The variable parts of names become <>."""
    found = {(writer, name) for writer, names in ROW_KEYS.items() for name in names}
    for writer, folder in WRITERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            found |= {(writer, name) for name in _names(ast.parse(path.read_text(encoding="utf-8")))}
    return found - READ - FROM_USERS


def documented() -> set[tuple[str, str]]:
    """Find the metrics that the page documents, in the same form."""
    rows = filter(None, map(ROW.match, PAGE.read_text(encoding="utf-8").splitlines()))
    return {(writer, _any_hole(row[1])) for row in rows for writer in row[2].split(", ")}


def undocumented(rows: Iterable[Mapping[str, object]]) -> set[str]:
    """Names in real rows without a row in the page."""
    forms = [re.compile(re.escape(name).replace("<>", r"[\w.-]+")) for _, name in documented()]
    names = {name for row in rows for name in row}
    return {name for name in names if not any(form.fullmatch(name) for form in forms)}


def _names(tree: ast.AST) -> Iterator[str]:
    parts: set[ast.AST] = set()  # parts of f-strings; ast.walk yields them after the f-string
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
