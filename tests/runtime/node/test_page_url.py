"""The URL of a page: where its secret is kept, who replaces it, and that a log never gets it."""

import os
from pathlib import Path

import pytest

from runtime.node.page_url import PAGES, PageUrl, page_lines, renew, url_in, url_of_watch, urls_of
from runtime.node.reopen import FoundRun
from runtime.settings.tables.observe import PAGE_FILE
from runtime.util.files import user_cache

PLACE = "http://127.0.0.1:8765"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return user_cache(PAGES)


def test_a_page_that_was_killed_comes_back_with_its_secret_only_at_its_place(tmp_path: Path) -> None:
    url = PageUrl(tmp_path / PAGE_FILE).write(PLACE)
    assert (tmp_path / PAGE_FILE).stat().st_mode & 0o777 == 0o600
    assert url_in(tmp_path / PAGE_FILE) == url
    assert PageUrl(tmp_path / PAGE_FILE).write(PLACE) == url
    elsewhere = PageUrl(tmp_path / PAGE_FILE).write("http://127.0.0.1:8766")
    assert elsewhere.partition("#")[2] != url.partition("#")[2]  # an open tab still sends the old one to the old place
    assert url_in(tmp_path / PAGE_FILE) == elsewhere


def test_a_renewed_secret_is_valid_at_once_and_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    page = PageUrl(tmp_path / PAGE_FILE)
    first = page.write(PLACE).rpartition("=")[2]
    assert page.secret() == first
    second = renew(page.path)
    assert second.startswith(f"{PLACE}/#token=")
    assert page.secret() == second.rpartition("=")[2] != first
    for damage in (
        b"",
        b"http://127.0.0.1:8765/#token=",
        b"#token=" + b"0" * 48,
        b"\xff",
        b"http://a/#token=x y",
    ):
        page.path.write_bytes(damage)
        assert page.secret() == second.rpartition("=")[2]
        with pytest.raises(ValueError, match=r"has no URL|can't decode"):
            url_in(page.path)
    page.path.chmod(0o644)
    page.path.write_text(f"{PLACE}/#token={first}")
    assert page.secret() == second.rpartition("=")[2]  # others may have read it
    page.remove()
    page.remove()
    assert page.secret() == second.rpartition("=")[2]


def test_the_pages_of_a_run_are_found_and_those_of_ended_commands_are_not(tmp_path: Path, cache: Path) -> None:
    runs = [FoundRun(name="r", directory=tmp_path / name) for name in ("a", "b")]
    for run in runs:
        run.directory.mkdir()
    own, watched, of_other = PageUrl(runs[0].directory / PAGE_FILE), url_of_watch(runs[0]), url_of_watch(runs[1])
    for page in (own, watched, of_other):
        page.write(PLACE)
    assert cache.stat().st_mode & 0o777 == 0o700
    killed = cache / watched.path.name.replace(f"-{os.getpid()}.", f"-{2**22 + 1}.")
    killed.write_text("")
    assert urls_of(runs[0]) == [own.path, watched.path]
    assert urls_of(runs[1]) == [of_other.path]
    assert not killed.exists()


@pytest.mark.parametrize(("name", "where", "command"), [
    ("laptop", "runs/laptop", "watch laptop --url"),
    ("laptop", "elsewhere/laptop", "elsewhere/laptop --url"),
    ("laptop", "runs/renamed", "runs/renamed --url"),
    ("a b", "a b", "'a b' --url"),
])  # fmt: skip
def test_a_line_for_a_log_names_the_command_and_has_no_secret(
    name: str, where: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"{PLACE}/#token={'ab' * 24}"
    first, second = page_lines(url, name, Path(where), shows_secret=False)
    assert first.startswith(f"page      {PLACE}; for its URL with the secret: ")
    assert first.endswith(command)
    assert "ab" * 24 not in first + second
    assert page_lines(url, name, Path(where), shows_secret=True) == [f"page      {url}", second]
    assert second.startswith("from another machine, first: ssh -L 8765:127.0.0.1:8765 ")
