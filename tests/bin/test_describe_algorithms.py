"""docs/reference/algorithms is what the code says, and says all that a caller needs."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from actors.reward.graders.builtin import BUILT_IN_GRADERS, FUNCTIONS
from bin import describe_algorithms
from bin.describe_algorithms import Source, entries_of, formulas, graders_page, page, sections_of, sources
from runtime.settings.reading.config import type_of
from runtime.settings.tables.algorithm import Kl, Reduction
from runtime.settings.tables.estimators import Estimator
from runtime.settings.tables.losses import Loss
from tests.docs.snippets import snippets

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "algorithms"
ARRAYS = re.compile(r"\b(Tensor|ArrayLike|NDArray|Floats|Floats32|Ints|Flags)\b")
RETURNS_TENSORS = re.compile(r"\b(Tensor|Terms|Correction)\b")
STATES_CLAMP = re.compile(r"\b(clamp|clip|limit|bound)", re.IGNORECASE)
SHAPED = re.compile(r"\[[A-Z]")
SOURCES = {source.name.rpartition(".")[2]: source for source in sources()}


def faults(source: Source) -> Iterator[str]:
    """What the docstrings of a module lack."""
    if "assert " not in sections_of(source.docstring).get("Example", ""):
        yield "the module has no example with assertions"
    for node in source.functions:
        parts = sections_of(ast.get_docstring(node) or "")
        given, arguments = node.args, entries_of(parts.get("Args", ""))
        for argument in [*given.posonlyargs, *given.args, *given.kwonlyargs]:
            kind, text = ast.unparse(argument.annotation) if argument.annotation else "", arguments.get(argument.arg)
            if text is None:
                yield f"{node.name}: {argument.arg} is not described"
            elif ARRAYS.search(kind) and not SHAPED.search(text):
                yield f"{node.name}: {argument.arg} has no shape"
        if node.name not in formulas() and not re.search(r"[-+*/=]|exp|mean", parts["text"] + parts["summary"]):
            yield f"{node.name}: no formula"
        whole = ast.get_docstring(node) or ""
        if node.returns and RETURNS_TENSORS.search(ast.unparse(node.returns)) and not STATES_CLAMP.search(whole):
            yield f"{node.name}: does not say what is clamped"
        for section in ("Returns", "Edges", "Source"):
            if not parts.get(section, "").strip():
                yield f"{node.name}: no {section}"


def test_the_committed_pages_are_current() -> None:
    assert describe_algorithms.main(["--check"]) == 0


def test_stale_and_superfluous_pages_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert describe_algorithms.main(["--docs", str(tmp_path)]) == 0
    assert describe_algorithms.main(["--docs", str(tmp_path), "--check"]) == 0
    (tmp_path / "algorithms" / "kl.md").write_text("old")
    (tmp_path / "algorithms" / "gone.md").write_text("of a module that is gone")
    assert describe_algorithms.main(["--docs", str(tmp_path), "--check"]) == 1
    named = capsys.readouterr().err
    assert ("kl.md" in named, "gone.md" in named, "whitening.md" in named) == (True, True, False)
    assert describe_algorithms.main(["--docs", str(tmp_path)]) == 0
    assert describe_algorithms.main(["--docs", str(tmp_path), "--check"]) == 0


@pytest.mark.parametrize("name", SOURCES)
def test_every_function_has_a_formula_shapes_edges_and_a_source(name: str) -> None:
    assert list(faults(SOURCES[name])) == []


def test_a_function_without_them_is_found() -> None:
    text = '''"""A module."""

def bare(values: Tensor, size: int) -> Tensor:
    """Do.

    Args:
        values: Any.
    """
'''
    assert list(faults(Source("bare", text))) == [
        "the module has no example with assertions",
        "bare: values has no shape",
        "bare: size is not described",
        "bare: no formula",
        "bare: does not say what is clamped",
        "bare: no Returns",
        "bare: no Edges",
        "bare: no Source",
    ]


def test_the_page_of_graders_has_each_grader_with_its_import_path_arguments_return_and_edges() -> None:
    found = graders_page()
    assert list(FUNCTIONS) == list(BUILT_IN_GRADERS)
    for name, function in FUNCTIONS.items():
        part = found.partition(f"\n## `{name}`\n")[2].partition("\n## `")[0]
        assert f"```python\nfrom {function.__module__} import {function.__name__}\n\n{function.__name__}(" in part
        arguments = set(inspect.signature(function).parameters)
        assert (name, set(re.findall(r"^- `(\w+)`: ", part, re.MULTILINE))) == (name, arguments)
        assert ("**Returns.** `" in part, "**Edges.** " in part) == (True, True), name


@pytest.mark.parametrize("name", SOURCES)
def test_the_example_of_a_page_runs(name: str) -> None:
    example = snippets(DOCS / f"{name}.md", "python")[0]
    assert "assert " in example
    exec(compile(example, f"{name}.md", "exec"), {})


@pytest.mark.parametrize("name", SOURCES)
def test_every_import_path_of_a_page_exists(name: str) -> None:
    found = re.findall(r"^from (\S+) import (\w+)$", page(SOURCES[name]), re.MULTILINE)
    public = [node.name for node in (*SOURCES[name].classes, *SOURCES[name].functions)]
    assert {imported for _, imported in found} >= set(public)
    assert [pair for pair in found if not hasattr(importlib.import_module(pair[0]), pair[1])] == []


def test_the_formula_of_each_type_stands_on_the_page_of_its_function_alone() -> None:
    """A settings table declares it; the docstring of the function and the pages by hand do not say it again."""
    assert {"ppo_loss", "dppo_loss", "sft_loss", "dpo_loss", "rm_loss", "gae", "kl_divergence"} <= formulas().keys()
    tables = [table for union in (Loss, Estimator, Kl, Reduction) for table in get_args(union)]
    computed = [setting for settings in formulas().values() for setting in settings]
    assert len(computed) == len(set(computed)) == len([table for table in tables if type_of(table) != "custom"])
    shown = "".join(map(page, SOURCES.values()))
    for settings in formulas().values():
        for setting, formula in settings.items():
            assert shown.count(f"Formula of `{setting}`: `{formula}`\n") == 1
    docstrings = [ast.get_docstring(node) or "" for source in SOURCES.values() for node in source.functions]
    by_hand = [*docstrings, *(path.read_text() for path in (DOCS.parents[1] / "train").glob("*.md"))]
    long = [formula for settings in formulas().values() for formula in settings.values() if len(formula) > 20]
    assert [formula for formula in long if any(formula in text for text in by_hand)] == []


def test_signatures_have_defaults_and_types_and_a_class_its_fields() -> None:
    text = '''"""A module."""

from typing import Final

LIMIT: Final = 3.0

class Pair(NamedTuple):
    """Two numbers."""

    one: float  # nats
    other: float = LIMIT

def halves(pair: Pair, *, by: float = LIMIT, deep: bool = False) -> float:
    """Divide."""
'''
    found = page(Source("made.up", text))
    assert "halves(\n    pair: Pair,\n    *,\n    by: float = LIMIT,\n    deep: bool = False,\n) -> float\n" in found
    assert "| `LIMIT` | `3.0` |" in found
    assert "In this order, by position or by name.\n\n- `one: float`: nats\n- `other: float = LIMIT`\n" in found


def test_a_page_names_the_metrics_of_a_function_and_of_those_that_it_calls() -> None:
    text = '''"""A module."""

def outer(values: Tensor) -> Terms:
    """Add train/not_one of its own."""
    return Terms(values, {"train/own": values, **_inner(values)})

def _inner(values: Tensor) -> dict[str, Tensor]:
    return {"train/inner": values} or outer(values)

def other(values: Tensor) -> Tensor:
    """Has none."""
'''
    found = page(Source("made.up", text))
    assert "**Metrics.** `train/inner`, `train/own`.\n" in found
    assert found.count("**Metrics.**") == 1


def test_a_page_links_the_classes_of_its_arguments_and_says_how_to_give_them() -> None:
    assert "| `LossInputs` | a class: [loss_inputs](loss_inputs.md) |" in page(SOURCES["policy_losses"])
    assert page(SOURCES["loss_inputs"]).count("All of these are given by name.") == 1
    assert "`train/pg_clipfrac`, `train/pg_clipfrac_lower`, `train/ppo_kl`, `train/ratio_clampfrac`." in page(
        SOURCES["policy_losses"]
    )
