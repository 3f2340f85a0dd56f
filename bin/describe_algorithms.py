"""Write docs/reference/graders.md and docs/reference/algorithms/ from the functions that they describe, or check."""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, get_args

from actors.reward.graders.boxed import last_boxed
from actors.reward.graders.builtin import FUNCTIONS
from bin.entry import docs_folder, parser_of
from runtime.settings.objective import default_formula
from runtime.settings.reading.config import type_of
from runtime.settings.tables.algorithm import Kl, Reduction
from runtime.settings.tables.estimators import Estimator
from runtime.settings.tables.losses import Loss

PACKAGE: Final = "actors.trainer.algorithms"
CODE: Final = Path(__file__).resolve().parent.parent
SECTIONS: Final = ("Args", "Returns", "Raises", "Edges", "Source", "Example")
HEAD: Final = re.compile(rf"^({'|'.join(SECTIONS)}):$", re.MULTILINE)
OTHER_LOSSES: Final = {"sft": "sft_loss", "dpo": "dpo_loss", "preference_ipo": "dpo_loss", "rm": "rm_loss"}
METRIC: Final = re.compile(r"train/\w+$")
ENTRY: Final = re.compile(r"^(\w+): ", re.MULTILINE)

INTRODUCTION: Final = """# Functions of advantages, losses and corrections

Written by `bin/describe-algorithms` from `actors/trainer/algorithms/`; do not edit. Every function is pure: it changes
no argument and reads no setting, clock or random number. Each page has its functions' import paths, arguments,
shapes, defaults, metrics, edges and sources, and one example that a test runs. What the settings choose is in
[algorithms](../train/algorithms.md) and [losses](../train/losses.md).

- Losses, corrections and KL estimators take torch tensors, float32 or float64, and return the same dtype. Estimators of
  advantages, whitening, penalties and reductions take lists, numpy arrays or torch tensors of any dtype, compute in
  float64, and return numpy arrays.
- Arguments before `*` can be given by position; those after it by name alone.
- A column of another shape raises a ValueError that names it, and so does an unknown name of a choice, with what is
  allowed, or a missing column.
- B is the number of samples, M the number of trained tokens, N the number of tokens of all samples. `[M]` is a shape.
- Log-probs are natural logarithms at the sampling temperature. Losses are minimised.
- Formulas are those of the settings, with their defaults: arguments have the same names.
- Log-ratios are limited to +-`max_log_ratio` before they are exponentiated. The default of functions and of the setting
  is 20 nats. Estimators of advantages, returns, whitening and reductions limit nothing.

| function | does |
|---|---|
"""


GRADERS: Final = """# Graders

Written by `bin/describe-algorithms` from `actors/reward/graders/`; do not edit. `rm_type` names a grader. Each of these
functions returns for every text and raises nothing for it; what a response or label that it cannot read is worth stands
under its edges. [Rewards](../train/rewards.md) says how a run calls them, and
[coming from slime](from-slime.md#graders) where slime's graders of the same names differ.

- In a run, each function runs in a process that is killed after `reward.timeout_s`. A call outside of a run has no such
  limit; `math` and `deepscaler` then end by themselves after 5 s of CPU time.
- A run refuses rows whose label is missing or fits no response, before it starts.
- `boxed_` before any name but `remote_rm` and a function of yours gives the grader the content of the last closed
  `\\boxed{...}` in place of the response, or "" without one. `math` and `deepscaler` read that box by themselves;
  `boxed_dapo` reads it as its answer.
- Labels are text or numbers; `Label` is `str | int | float | None`.

| `rm_type` | import |
|---|---|
"""


@dataclass(frozen=True)
class Source:
    """One module, parsed."""

    name: str
    text: str

    @cached_property
    def body(self) -> list[ast.stmt]:
        """Its statements."""
        return ast.parse(self.text).body

    @cached_property
    def comments(self) -> Mapping[int, str]:
        """Comments behind code or alone, by line."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}

    @property
    def docstring(self) -> str:
        """Its docstring."""
        return ast.get_docstring(ast.parse(self.text)) or ""

    @property
    def functions(self) -> list[ast.FunctionDef]:
        """Its public functions."""
        return [node for node in self.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]

    @property
    def classes(self) -> list[ast.ClassDef]:
        """Its public classes."""
        return [node for node in self.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]

    @cached_property
    def values(self) -> Mapping[str, str]:
        """Its public constants and type aliases, as source text."""
        return dict(_values(self.body))

    @property
    def imported(self) -> Iterator[tuple[str, str]]:
        """Names that it imports from this repository, each with its module."""
        for node in self.body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("actors.", "runtime.")):
                yield from ((alias.name, node.module or "") for alias in node.names)


def _values(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for node in body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.expr) and not target.id.startswith("_"):
            yield target.id, ast.unparse(value)


def sections_of(docstring: str) -> dict[str, str]:
    """Split a docstring: its first line ("summary"), its text ("text"), and its sections by name, not indented."""
    found = HEAD.split(docstring)
    summary, _, text = found[0].partition("\n")
    sections = {"summary": summary.strip(), "text": text.strip("\n")}
    return sections | {name: _dedented(body) for name, body in zip(found[1::2], found[2::2], strict=True)}


def _dedented(text: str) -> str:
    return re.sub(r"^ {4}", "", text, flags=re.MULTILINE).strip("\n")


def entries_of(section: str) -> dict[str, str]:
    """Split a section of arguments into their texts, by name."""
    found = ENTRY.split(section)
    return {name: " ".join(text.split()) for name, text in zip(found[1::2], found[2::2], strict=True)}


@cache
def source_of(module: str) -> Source:
    """Read a module of this repository."""
    path = CODE / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return Source(module, file.read_text(encoding="utf-8"))


def sources() -> list[Source]:
    """Return all modules of the package that have public functions or classes."""
    names = sorted(path.stem for path in (CODE / PACKAGE.replace(".", "/")).glob("*.py"))
    found = [source_of(f"{PACKAGE}.{name}") for name in names if name not in ("__init__", "arguments")]
    return [source for source in found if source.functions or source.classes]


def signature(node: ast.FunctionDef, *, name: str, is_method: bool = False) -> str:
    """Format a function's signature, one argument a line if there are several. A method is one line without self."""
    given = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(given, ast.FunctionDef)
    arguments = given.args
    if is_method:
        arguments.args = arguments.args[1:]
    parts = _arguments(arguments)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    if len(parts) < 3 or is_method:
        return f"{name}({', '.join(parts)}){returns}"
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def _arguments(arguments: ast.arguments) -> list[str]:
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults)) + [*arguments.defaults]
    parts = [_argument(argument, default) for argument, default in zip(plain, defaults, strict=True)]
    if arguments.kwonlyargs:
        parts.append("*")
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return parts + [_argument(argument, default) for argument, default in named]


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
    return f"{argument.arg}{kind}" + (f" = {ast.unparse(default)}" if default else "")


@cache
def formulas() -> Mapping[str, Mapping[str, str]]:
    """Return the formulas of the types that each function computes, by setting and type: settings tables name them."""
    from actors.trainer.algorithms.kl import FORMS  # imports torch
    from actors.trainer.algorithms.policy_losses import LOSSES
    from actors.trainer.algorithms.reductions import AggMode
    from actors.trainer.step.estimator import ESTIMATORS

    losses = {name: _name_of(function) for name, function in LOSSES.items()} | OTHER_LOSSES
    estimators = {name: _name_of(estimate.function) for name, estimate in ESTIMATORS.items()} | {"ppo": "gae"}
    found: dict[str, dict[str, str]] = {}
    for key, union, functions in (
        ("loss", Loss, losses),
        ("estimator", Estimator, estimators),
        ("kl", Kl, dict.fromkeys(FORMS, "kl_divergence")),
        ("reduction", Reduction, dict.fromkeys(get_args(AggMode), "reduction")),
    ):
        for table in get_args(union):
            function, formula = functions.get(type_of(table)), default_formula(table)
            if function is not None and formula:
                found.setdefault(function, {})[f'algorithm.{key}.type = "{type_of(table)}"'] = formula
    return found


def _name_of(function: Any) -> str:
    return str(getattr(function, "func", function).__name__)


def page(source: Source) -> str:
    """Return the page of one module."""
    parts = sections_of(source.docstring)
    title = source.name.rpartition(".")[2]
    lines = [f"# {title}", "", f"Written by `bin/describe-algorithms` from `{source.name}`; do not edit.", ""]
    lines += [f"{parts['summary']} {' '.join(parts['text'].split())}".strip(), ""]
    lines += ["## Example", "", parts.get("Example", ""), ""]
    lines += _names(source)
    lines += [line for node in source.classes for line in _class(source, node)]
    lines += [line for node in source.functions for line in _function(source, node)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _names(source: Source) -> list[str]:
    """Describe the constants and types that signatures of the page name."""
    shown = " ".join(ast.unparse(node) for node in (*source.functions, *source.classes))
    known = dict(source.values)
    for name, module in source.imported:
        if value := source_of(module).values.get(name):
            known[name] = value
        if module.startswith(PACKAGE) and name in [node.name for node in source_of(module).classes]:
            page_of = module.rpartition(".")[2]
            known[name] = f"a class: [{page_of}]({page_of}.md)"
    used = {name: value for name, value in known.items() if re.search(rf"\b{name}\b", shown)}
    if not used:
        return []
    cells = {name: value if value.startswith("a class") else f"`{value}`" for name, value in used.items()}
    rows = [f"| `{name}` | {cell} |" for name, cell in cells.items()]
    return ["## Constants and types", "", "| name | value |", "|---|---|", *rows, ""]


def _class(source: Source, node: ast.ClassDef) -> list[str]:
    lines = [f"## `{node.name}`", "", ast.get_docstring(node) or "", ""]
    lines += ["```python", f"from {source.name} import {node.name}", "```", ""]
    if any("kw_only=True" in ast.unparse(decorator) for decorator in node.decorator_list):
        lines += ["All of these are given by name.", ""]
    elif any(isinstance(part, ast.AnnAssign) for part in node.body):
        lines += ["In this order, by position or by name.", ""]
    for part in node.body:
        if isinstance(part, ast.AnnAssign):
            default = f" = {ast.unparse(part.value)}" if part.value else ""
            comment = source.comments.get(part.lineno, "")
            lines.append(
                f"- `{ast.unparse(part.target)}: {ast.unparse(part.annotation)}{default}`: {comment}".rstrip(": ")
            )
        elif isinstance(part, ast.FunctionDef) and (part.name == "__init__" or not part.name.startswith("_")):
            lines += _method(node, part)
    return [*lines, ""]


def _method(owner: ast.ClassDef, node: ast.FunctionDef) -> list[str]:
    is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
    parts = sections_of(ast.get_docstring(node) or "")
    name = owner.name if node.name == "__init__" else node.name
    called = f"{name}: {ast.unparse(node.returns)}" if is_property and node.returns else ""
    called = called or signature(node, name=name, is_method=True)
    lines = [f"- `{called}`: {parts['summary']}"]
    return lines + [f"  - `{name}`: {text}" for name, text in entries_of(parts.get("Args", "")).items()]


def _function(source: Source, node: ast.FunctionDef) -> list[str]:
    parts = sections_of(ast.get_docstring(node) or "")
    lines = [f"## `{node.name}`", "", parts["summary"], ""]
    lines += ["```python", f"from {source.name} import {node.name}", "", signature(node, name=node.name), "```", ""]
    lines += [parts["text"], ""] if parts["text"] else []
    for setting, formula in formulas().get(node.name, {}).items():
        lines += [f"Formula of `{setting}`: `{formula}`", ""]
    lines += [f"- `{name}`: {text}" for name, text in entries_of(parts.get("Args", "")).items()]
    if node.returns is not None and "Returns" in parts:
        parts["Returns"] = f"`{ast.unparse(node.returns)}`. {parts['Returns']}"
    if names := sorted(metrics_of(source, node.name)):
        parts["Metrics"] = ", ".join(f"`{name}`" for name in names) + "."
    for section in ("Returns", "Metrics", "Raises", "Edges", "Source"):
        if section in parts:
            lines += ["", f"**{section}.** {' '.join(parts[section].split())}"]
    return [*lines, ""]


def metrics_of(source: Source, function: str, seen: frozenset[str] = frozenset()) -> set[str]:
    """Return the names of metrics that a function's code has, also in functions of its module that it calls."""
    known = {node.name: node for node in source.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    found: set[str] = set()
    for node in ast.walk(known[function]):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and METRIC.match(node.value):
            found.add(node.value)
        elif isinstance(node, ast.Name) and node.id in known and node.id not in seen | {function}:
            found |= metrics_of(source, node.id, seen | {function})
    return found


def pages() -> dict[str, str]:
    """Return the text of every page, by its path below docs/reference/."""
    texts = {f"algorithms/{source.name.rpartition('.')[2]}.md": page(source) for source in sources()}
    rows = [row for source in sources() for row in _rows(source)]
    return texts | {"algorithms.md": INTRODUCTION + "\n".join(rows) + "\n", "graders.md": graders_page()}


def graders_page() -> str:
    """Return the page of the built-in graders, and of the function that finds a box."""
    named = [(name, function.__module__, function.__name__) for name, function in FUNCTIONS.items()]
    rows = [f"| `{name}` | `from {module} import {function}` |" for name, module, function in named]
    lines = list[str]()
    for name, module, function in [*named, ("", last_boxed.__module__, last_boxed.__name__)]:
        node = next(node for node in map(_as_plain, source_of(module).body) if node and node.name == function)
        found = _function(source_of(module), node)
        head = [f"## `{name}`"] if name else found[:1]
        lines += [*head, *found[1:]]
    return GRADERS + "\n".join(rows) + "\n\n" + "\n".join(lines).rstrip("\n") + "\n"


def _as_plain(node: ast.stmt) -> ast.FunctionDef | None:
    """A function, async or not, as a plain one; None for other statements."""
    if isinstance(node, ast.AsyncFunctionDef):
        return ast.copy_location(ast.FunctionDef(**{name: getattr(node, name) for name in node._fields}), node)
    return node if isinstance(node, ast.FunctionDef) else None


def _rows(source: Source) -> Iterator[str]:
    name = source.name.rpartition(".")[2]
    for node in source.functions:
        summary = sections_of(ast.get_docstring(node) or "")["summary"].replace("|", "\\|")
        yield f"| [{name}](algorithms/{name}.md#{node.name}): `{node.name}` | {summary} |"


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return 0, or 1 if --check finds a stale page."""
    parser = parser_of("describe-algorithms", __doc__)
    parser.add_argument("--check", action="store_true", help="Write nothing, and exit with 1 if a page is not current.")
    parser.add_argument("--docs", type=Path, default=docs_folder(), help="Directory to write to.")
    args = parser.parse_args(argv)
    texts = {args.docs / name: text for name, text in pages().items()}
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    removed = [path for path in (args.docs / "algorithms").glob("*.md") if path not in texts]
    for path in stale + removed:
        if args.check:
            print(f"{path}: not current: run bin/describe-algorithms", file=sys.stderr)
        elif path in texts:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[path], encoding="utf-8")
        else:
            path.unlink()
    return 1 if args.check and stale + removed else 0
