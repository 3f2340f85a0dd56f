"""Plug-ins: what is found, what is refused, and in which words."""

import sys
from pathlib import Path

import pytest

from runtime.functions.load import PluginError, is_plugin, load_plugin

USER_CODE = """
import dataclasses

def plain(sample): return 1.0
async def slow(sample): return 2.0
def two(args, sample): return 3.0
def with_default(sample, bonus=1.0): return bonus
def anything(*args, **kwargs): return 4.0
def needs_keyword(sample, *, judge): return 5.0
NUMBER = 7

class Grader:
    def __call__(self, sample): return 6.0
    def method(self, sample): return 8.0
    @staticmethod
    def static(sample): return 9.0

class AsyncGrader:
    async def __call__(self, sample): return 7.0

@dataclasses.dataclass
class State:
    count: int = 0

grader, async_grader = Grader(), AsyncGrader()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(USER_CODE)
    return tmp_path


def load(folder: Path, value: str, **options: object):
    return load_plugin("rm_type", value, parameters=("sample",), base_dirs=[folder], allow_async=True, **options)


@pytest.mark.parametrize("name", ["plain", "with_default", "anything", "grader", "grader.method", "Grader.static"])
def test_plain_callables_are_found_in_a_file(folder: Path, name: str) -> None:
    plugin = load(folder, f"mine.py:{name}")
    assert isinstance(plugin.function(None), float)
    assert not plugin.is_async


@pytest.mark.parametrize("name", ["slow", "async_grader"])
def test_coroutine_functions_are_told_apart(folder: Path, name: str) -> None:
    assert load(folder, f"mine.py:{name}").is_async


def test_an_async_function_is_refused_where_a_plain_one_is_needed(folder: Path) -> None:
    with pytest.raises(PluginError, match="slow is async"):
        load_plugin("k", "mine.py:slow", parameters=("sample",), base_dirs=[folder])


def test_a_module_is_found_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a_user_module.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(folder)
    assert load(folder, "a_user_module:plain").function(None) == 1.0


def test_a_file_is_imported_once_and_under_a_name_of_its_own(folder: Path) -> None:
    (folder / "mine2.py").write_text("import sys\nassert __name__ in sys.modules\ncalls = []\ndef f(x): return calls")
    first, second = (load(folder, f"{place}:f").function for place in ("mine2.py", str(folder / "mine2.py")))
    assert first is second
    assert "mine2" not in sys.modules


def test_files_are_looked_for_in_each_folder_in_order(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    plugin = load_plugin("k", "mine.py:plain", parameters=("sample",), base_dirs=[other, folder])
    assert plugin.function(None) == 1.0


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("missing.py:f", "no such file; looked for /"),
        ("no_such_module_here:f", "no module named 'no_such_module_here'"),
        ("json.no_such_part:f", "no module named 'json.no_such_part'"),
        ("mine.py:plan", "there is no 'plan' in it; did you mean 'plain'?"),
        ("mine.py:Grader.metod", "there is no 'metod' in it; did you mean 'method'?"),
        ("mine.py:NUMBER", "NUMBER cannot be called: it is of type int"),
        ("mine.py:Grader", "Grader is a class; name a function"),
        ("mine.py:two", "takes (args, sample) but is called with (sample)"),
        ("mine.py:needs_keyword", "takes (sample, *, judge) but is called with (sample)"),
        ("folder/mine:plain", "does not end in .py"),
        ("json.loads", 'did you mean "json:loads"?'),
        ("mine.py", 'did you mean "mine.py:function"?'),
        ("mine.py:", 'write "module:function" or "path/file.py:function"'),
        (":f", 'write "module:function"'),
    ],
)
def test_errors_name_the_key_the_value_and_what_is_wrong(folder: Path, value: str, problem: str) -> None:
    with pytest.raises(PluginError) as caught:
        load(folder, value)
    assert f"rm_type = {value!r}: " in str(caught.value)
    assert problem in str(caught.value)
    assert (caught.value.key, caught.value.value) == ("rm_type", value)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (
            "import a_package_nobody_has",
            "importing it failed: No module named 'a_package_nobody_has' (FOLDER/broken.py, line 1)",
        ),
        ("\n1 / 0", "importing it failed: ZeroDivisionError: division by zero (FOLDER/broken.py, line 2)"),
        ("def f(:", "importing it failed: SyntaxError"),
        ("import sys; sys.exit('usage')", "importing it failed: SystemExit: usage"),
    ],
)
def test_a_file_that_cannot_be_imported_says_why(folder: Path, code: str, problem: str) -> None:
    (folder / "broken.py").write_text(code)
    for _ in range(2):  # a failed import leaves nothing behind
        with pytest.raises(PluginError, match="importing it failed") as caught:
            load(folder, "broken.py:f")
        assert problem.replace("FOLDER", str(folder)) in str(caught.value)


@pytest.mark.parametrize(("name", "place"), [("beside_it", "inner"), ("inner.beside_it", "")])
def test_a_module_beside_a_file_is_not_found_by_itself_and_the_error_says_what_to_do(
    tmp_path: Path, name: str, place: str
) -> None:
    """A name that two folders have would otherwise be another module than the author meant, without a word."""
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "beside_it.py").touch()
    (inner / "mine.py").write_text(f"import {name}")
    with pytest.raises(PluginError) as caught:
        load(tmp_path, "inner/mine.py:f")
    top, found = name.partition(".")[0], tmp_path / place
    assert str(caught.value).endswith(f"; to import {top}, start in {found}, or with PYTHONPATH={found}")


def test_a_colon_makes_a_plugin() -> None:
    assert is_plugin("a:b")
    assert not is_plugin("exact_match")
