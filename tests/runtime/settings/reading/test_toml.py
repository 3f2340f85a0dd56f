"""Loading TOML: merging, includes, overrides, and what an error says."""

import codecs
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.settings.reading.config import Config, TopologyError
from runtime.settings.reading.schema import describe
from runtime.settings.reading.toml import SET, SHIPPED_TOPOLOGIES, apply_override, convert, load_tables


class Leaf(Config, frozen=True, kw_only=True):
    path: str
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0


class Branch(Config, frozen=True, kw_only=True):
    size: Annotated[int, msgspec.Meta(ge=1)] = 1
    kind: Literal["oak", "elm"] = "oak"
    label: str | None = None
    flag: bool = False
    words: tuple[str, ...] = ()
    free: dict[str, Any] = {}


class Tree(Config, frozen=True, kw_only=True):
    name: str
    branch: Branch = Branch()
    leaves: tuple[Leaf, ...] = ()
    named: dict[str, Leaf] = {}


def write(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def load(path: Path, *overrides: str) -> Tree:
    return convert(load_tables(path, overrides, Tree), Tree)


def errors(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(TopologyError) as caught:
        load(path, *overrides)
    lines = [str(problem) for problem in caught.value.problems]
    assert str(caught.value) == "\n".join(lines)
    return lines


def test_files_merge_key_by_key_and_the_including_one_wins(tmp_path: Path) -> None:
    write(tmp_path, "a.toml", 'name = "a"\nbranch = { size = 2, kind = "elm" }\n[[leaves]]\npath = "one"')
    write(tmp_path, "b.toml", 'branch.size = 3\n[named.x]\npath = "x"')
    path = write(tmp_path, "c.toml", 'include = ["a.toml", "b.toml"]\nbranch.label = "c"\nnamed.x.weight = 2')
    tree = load(path)
    assert tree.branch == Branch(size=3, kind="elm", label="c")
    assert tree.named == {"x": Leaf(path="x", weight=2.0)}
    assert tree.leaves == (Leaf(path="one"),)


def test_arrays_are_replaced_whole(tmp_path: Path) -> None:
    write(tmp_path, "a.toml", 'name = "a"\n[[leaves]]\npath = "one"\n[[leaves]]\npath = "two"')
    path = write(tmp_path, "b.toml", 'include = "a.toml"\n[[leaves]]\npath = "three"')
    assert load(path).leaves == (Leaf(path="three"),)


def test_include_is_found_beside_the_including_file_then_beside_the_named_one(tmp_path: Path) -> None:
    write(tmp_path, "sub/a.toml", 'include = "b.toml"\nname = "a"')
    write(tmp_path, "sub/b.toml", "branch.size = 7")
    write(tmp_path, "b.toml", "branch.size = 8")
    path = write(tmp_path, "top.toml", 'include = "sub/a.toml"')
    assert load(path).branch.size == 7
    (tmp_path / "sub/b.toml").unlink()
    assert load(path).branch.size == 8


def test_include_falls_back_to_the_shipped_topologies(tmp_path: Path) -> None:
    path = write(tmp_path, "top.toml", 'include = "recipes/reverse-digits.toml"')
    assert load_tables(path, (), Tree).tables["rollout"]["rollout_batch_size"] == 64


def test_a_name_that_is_no_file_is_that_of_a_shipped_topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "laptop").mkdir()
    for name in ("laptop", "laptop.toml"):
        assert load_tables(Path(name), (), Tree).files[-1] == SHIPPED_TOPOLOGIES / "laptop.toml"
    own = write(tmp_path, "laptop.toml", 'name = "mine"')
    assert load_tables(Path("laptop.toml"), (), Tree).tables == load_tables(own, (), Tree).tables == {"name": "mine"}
    (line,) = errors(Path("lptop"))
    assert line.startswith("lptop: is neither a file nor a shipped topology (boxed-copy, ")


def test_include_that_loops_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a.toml", 'include = "b.toml"')
    path = write(tmp_path, "b.toml", 'include = "a.toml"')
    assert errors(path) == [f"{tmp_path}/a.toml: include: {path} includes itself"]


def test_include_that_does_not_exist_says_where_it_was_looked_for(tmp_path: Path) -> None:
    path = write(tmp_path, "a.toml", 'include = "no.toml"')
    (line,) = errors(path)
    assert line.startswith(f'{path}: include = "no.toml": no such file (looked in {tmp_path}')


def test_missing_file_and_broken_toml_are_input_errors(tmp_path: Path) -> None:
    assert errors(tmp_path / "no.toml") == [f"{tmp_path}/no.toml: cannot be read: No such file or directory"]
    (line,) = errors(write(tmp_path, "bad.toml", 'name = "x"\nsize == 3'))
    assert "bad.toml: not valid TOML" in line
    assert "line 2" in line


def test_unknown_key_is_refused_with_the_close_one_and_all_allowed(tmp_path: Path) -> None:
    path = write(tmp_path, "a.toml", 'name = "a"\nbranch.sise = 3')
    assert errors(path) == [f"{path}: branch.sise: unknown key, did you mean size?"]


def test_wrong_type_and_bound_name_file_key_value_and_what_is_allowed(tmp_path: Path) -> None:
    write(tmp_path, "a.toml", 'name = "a"\nbranch = { size = "many", kind = "ash" }')
    path = write(tmp_path, "b.toml", 'include = "a.toml"\n[[leaves]]\npath = "p"\nweight = 0')
    assert sorted(errors(path)) == [
        f"{tmp_path}/a.toml: branch.kind = \"ash\": invalid enum value 'ash'; allowed: one of 'elm', 'oak'",
        f'{tmp_path}/a.toml: branch.size = "many": expected int, got str; allowed: int >= 1',
        f"{path}: leaves.0.weight = 0: expected float > 0.0; allowed: float > 0",
    ]


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "a.toml", "brunch = 1\nbranch = 3\nleaves = [{ weight = 2 }]\nnamed.x = { path = 4 }")
    found = errors(path)
    assert len(found) == 5
    assert f"{path}: name: missing; expected a string" in found
    assert f"{path}: leaves.0.path: missing; expected a string" in found


def test_overrides_are_typed_by_the_schema(tmp_path: Path) -> None:
    path = write(tmp_path, "a.toml", 'name = "a"\nbranch.label = "x"\n[[leaves]]\npath = "one"')
    tree = load(
        path,
        "name=42",
        "branch.size = 5",
        "branch.kind=elm",
        "branch.label=none",
        "branch.flag=true",
        'branch.words=["a", "b"]',
        "branch.free.deep=1e-3",
        "leaves.0.path=two",
        "leaves.0.weight=3",
        "leaves.1.path=three",
        "named.y.path=n0:0-7",
    )
    assert tree == Tree(
        name="42",
        branch=Branch(size=5, kind="elm", label=None, flag=True, words=("a", "b"), free={"deep": 1e-3}),
        leaves=(Leaf(path="two", weight=3.0), Leaf(path="three")),
        named={"y": Leaf(path="n0:0-7")},
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("name", "expected key=value"),
        ("=3", "expected key=value"),
        ("branch.sise=1", "unknown key, did you mean size?"),
        ("leaves.7.path=x", "no item 7: the list has length 1"),
        ("leaves.x.path=x", "no item x"),
        ("name.x=1", "name is a value, not a table: it has no key x"),
    ],
)
def test_override_that_fits_nowhere_is_refused(tmp_path: Path, override: str, message: str) -> None:
    path = write(tmp_path, "a.toml", 'name = "a"\n[[leaves]]\npath = "one"')
    (line,) = errors(path, override)
    assert line.startswith(f"{SET}: {override}: ")
    assert message in line


def test_override_with_a_wrong_value_names_itself_as_the_origin(tmp_path: Path) -> None:
    path = write(tmp_path, "a.toml", 'name = "a"')
    assert errors(path, "branch.size=none") == [
        '--set: branch.size = "none": expected int, got str; allowed: int >= 1',
    ]


def test_descriptions_read_like_a_sentence() -> None:
    assert describe(Annotated[float, msgspec.Meta(ge=0, le=1)]) == "float >= 0 and <= 1"
    assert describe(Annotated[int, msgspec.Meta(ge=1)] | None) == "int >= 1, or unset"
    assert describe(tuple[str, ...]) == "a list, each a string"
    assert describe(bool) == "true or false"


@given(st.text(min_size=1).filter(lambda text: text.strip() == text and text.lower() not in {"none", "null"}))
def test_any_text_reaches_a_string_key_unharmed_or_as_the_toml_string_it_spells(text: str) -> None:
    tables: dict[str, Any] = {}
    apply_override(tables, f"name={text}", Tree)
    assert tables["name"] == text or text[0] in "\"'"


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Branch().size = 3  # type: ignore[misc]


@pytest.mark.parametrize("mark", [codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE])
def test_a_byte_order_mark_is_named(mark: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(mark + b'name = "a"')
    with pytest.raises(TopologyError, match="begins with a byte-order mark"):
        load_tables(path, (), Tree)
