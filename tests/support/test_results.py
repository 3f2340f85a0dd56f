"""Pages of results hold every figure once."""

from pathlib import Path

from tests.support.results import figures, write_results


def test_nested_figures_get_dotted_names() -> None:
    found = {"rate": 2.5, "by": [{"mode": "a", "s": 1}, {"mode": "b", "s": 2}], "runs": [1, 2], "error": "a | b\nc"}
    assert list(figures(found)) == [
        ("rate", "2.5"),
        ("by.0.mode", "a"),
        ("by.0.s", "1"),
        ("by.1.mode", "b"),
        ("by.1.s", "2"),
        ("runs", "1, 2"),
        ("error", "a \\| b c"),
    ]


def test_a_page_has_a_table_per_section_and_replaces_the_one_of_the_same_day(tmp_path: Path) -> None:
    write_results(tmp_path / "results", "bench", {"cores": 2}, {"bus": {"us": 9}})
    page = write_results(tmp_path / "results", "bench", {"cores": 2}, {"bus": {"us": 3}, "ledger": {"s": 1.5}})
    assert list((tmp_path / "results").iterdir()) == [page]
    text = page.read_text()
    assert page.name.endswith("-bench.md")
    assert page.name[:10] in text.splitlines()[0]
    assert "Machine: cores 2." in text
    assert "## bus\n\n| figure | value |\n|---|---|\n| us | 3 |\n" in text
    assert "## ledger\n" in text
    assert "| s | 1.5 |" in text
