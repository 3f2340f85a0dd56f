"""docs/develop/invariants.md: each rule cites tests that exist."""

from tests.docs.citations import CITED, ROOT, cited_files, wrong_citations

PAGE = ROOT / "docs" / "develop" / "invariants.md"


def rules() -> list[tuple[str, str]]:
    """Rules and the tests cited for each, of all tables before the list of what is not tested."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## Not tested yet")[0]
    rows = [line.strip("|").rsplit("|", 1) for line in text.splitlines() if line.startswith("| ")]
    return [(rule.strip(), tests.strip()) for rule, tests in rows if rule.strip() != "rule"]


def test_every_rule_cites_a_test() -> None:
    assert len(rules()) > 140
    assert [rule for rule, tests in rules() if not CITED.search(tests)] == []


def test_every_cited_test_exists() -> None:
    assert wrong_citations("\n".join(tests for _, tests in rules())) == []


def test_citations_that_are_wrong_are_found() -> None:
    here = "test_every_rule_cites_a_test"
    assert [file.name for file in cited_files("docs/test_invariants_doc.py", here)] == ["test_invariants_doc.py"]
    assert [file.name for file in cited_files("", here)] == ["test_invariants_doc.py"]
    assert wrong_citations(f"`{here}`, `test_no_such_test`") == ["test_no_such_test"]
    assert wrong_citations(f"`test_pages.py::{here}`, `test_invariants_doc.py::test_no_such_test`") == [
        f"test_pages.py::{here}",
        "test_invariants_doc.py::test_no_such_test",
    ]
    assert wrong_citations("tests/docs/test_pages.py::test_x") == ["a citation of another form"]
