"""Dated pages of results: one page per command and day, a table per section."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def write_results(folder: Path, subject: str, machine: Mapping[str, Any], sections: Mapping[str, Any]) -> Path:
    """Write `DATE-SUBJECT.md` into `folder`, in place of an earlier page of the same day, and return its path."""
    today = datetime.now(UTC).date()
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{today}-{subject}.md"
    head = "; ".join(f"{name} {value}" for name, value in figures(machine))
    tables = [f"## {name}\n\n{table_of(section)}" for name, section in sections.items()]
    page.write_text("\n".join([f"# Results of {subject}, {today}\n\nMachine: {head}.\n", *tables]))
    return page


def table_of(section: Any) -> str:
    """A row per figure."""
    rows = "".join(f"| {name} | {value} |\n" for name, value in figures(section))
    return f"| figure | value |\n|---|---|\n{rows}"


def figures(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Flatten nested results to dotted names with their values as text. Lists of plain values stay one value."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from figures(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(entry, Mapping | list) for entry in value):
        for place, inner in enumerate(value):
            yield from figures(inner, f"{name}.{place}")
    else:
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        yield name, " ".join(text.split()).replace("|", "\\|")
