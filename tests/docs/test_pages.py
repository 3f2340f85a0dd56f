"""Pages say first what the reader can do, lead only to what exists, and can be reached from an index."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
FOR_A_TASK: Final = ("start", "train", "run", "understand")  # folders whose pages begin with what the reader can do
BEGINNINGS: Final = ("README.md", "docs/README.md", "llms.txt")

SOURCES: Final = frozenset(
    {".py", ".toml", ".lock", ".sh", ".js", ".html", ".json", ".yml", ".yaml", ""}
)  # and scripts
NAMED: Final = re.compile(
    r"\bdocs/[\w/.-]+\.(?:md|conf)\b(?:#[\w-]+)?"
)  # as texts of errors, hints and help name a page

FENCE: Final = re.compile(r"^( *)```.*?^\1```$|^    .*?$", re.MULTILINE | re.DOTALL)
CODE: Final = re.compile(r"`[^`\n]*`")
LINK: Final = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
HEADING: Final = re.compile(r"^#+ (.*)$", re.MULTILINE)


def pages() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))


def below_docs(path: Path) -> str:
    return path.relative_to(DOCS).as_posix()


def links(path: Path) -> Iterator[str]:
    """The targets of a page's links, without those to other sites."""
    text = CODE.sub("", FENCE.sub("", path.read_text(encoding="utf-8")))
    yield from (target for target in LINK.findall(text) if "://" not in target)


def anchors(path: Path) -> set[str]:
    """What a link may name behind a #, by GitHub's rule."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower().strip() for title in HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def broken(path: Path) -> Iterator[str]:
    for target in links(path):
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists():
            yield f"{path.relative_to(ROOT)}: {target}: no such file"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield f"{path.relative_to(ROOT)}: {target}: no such heading"


def reached() -> set[Path]:
    """All pages that links lead to, from the beginnings on. A link to a folder leads to all pages in it."""
    found: set[Path] = set()
    waiting = [ROOT / name for name in BEGINNINGS]
    while waiting:
        page = waiting.pop()
        if page in found:
            continue
        found.add(page)
        for target in links(page):
            file = (page.parent / target.partition("#")[0]).resolve()
            waiting += (
                sorted(file.glob("*.md")) if file.is_dir() else [file] if file.suffix == ".md" and file.exists() else []
            )
    return found


@pytest.mark.parametrize("folder", FOR_A_TASK)
def test_a_page_says_first_what_the_reader_can_do(folder: str) -> None:
    found = sorted((DOCS / folder).glob("*.md"))
    assert found
    assert [page.name for page in found if not re.match(r"# .+\n\nAfter this page you ", page.read_text())] == []


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    others = [ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md", "llms.txt")]
    assert [problem for page in [*pages(), *others] if page.exists() for problem in broken(page)] == []


def test_every_page_can_be_reached_from_an_index() -> None:
    found = reached()
    assert [below_docs(page) for page in pages() if page not in found] == []


def test_broken_links_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# A page: `x`, and more\n\n[a](#a-page-x-and-more) [`b`](other.md)\n`[c](gone.md)` [d](#nothing)\n\n"
        "```\n[e](gone.md)\n```\n\n    [f](gone.md)\n\n[g\nh](https://example.com) [i](page.md#nor-this)\n"
    )
    assert list(broken(page)) == [
        "page.md: other.md: no such file",
        "page.md: #nothing: no such heading",
        "page.md: page.md#nor-this: no such heading",
    ]


def named_wrongly(text: str) -> Iterator[str]:
    """Pages and headings that a text names and that do not exist."""
    for target in sorted(set(NAMED.findall(text))):
        name, _, anchor = target.partition("#")
        if "DATE" in name:  # a page that a command writes
            continue
        if not (ROOT / name).exists():
            yield f"{target}: no such file"
        elif anchor and anchor not in anchors(ROOT / name):
            yield f"{target}: no such heading"


def test_every_page_that_a_source_file_names_exists() -> None:
    """Also those in errors, hints and help texts, with their headings."""
    folders = ("actors", "bin", "messages", "runtime", "tests", "topologies", "requirements", "docs/run/prometheus")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    files += [ROOT / name for name in ("AGENTS.md", "justfile", "pyproject.toml")]
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.is_file() and path != Path(__file__)}
    assert [f"{path.relative_to(ROOT)}: {wrong}" for path, text in texts.items() for wrong in named_wrongly(text)] == []


def test_pages_that_errors_name_wrongly_are_found() -> None:
    text = "see docs/README.md, docs/run/gone.md and docs/train/rewards.md#failed-scores, docs/train/rewards.md#gone"
    assert list(named_wrongly(text)) == [
        "docs/run/gone.md: no such file",
        "docs/train/rewards.md#gone: no such heading",
    ]
