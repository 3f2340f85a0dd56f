"""Docstrings, comments, setting descriptions, messages and pages avoid the worst habits of our English."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
AT_THE_BEGINNING = r"(?:^|(?<=\. ))"
REFUSED = {
    r"\breckon(s|ed)?\b": "compute, predict, estimate",
    r"\b(whoever|somebody|nobody)\b": "name the process, or say that no process does it",
    rf"{AT_THE_BEGINNING}(?-i:Of|So many)\b": "begin with the subject",
    r"\b(is|are) (told|asked|said)\b": "publish, call, report, request",
    r"\bwhat is left\b": "a relative clause without a subject",
    r"\bnode agent\b": "node daemon",
    r"\bembedded engine\b": "tiny engine",
    r"\b(prove[sdn]?|proofs?)\b(?!\.py)": "verify, verification",
    r"\bhappenings?\b": "trigger",
}
ANY_REFUSED = re.compile("|".join(REFUSED), re.MULTILINE | re.IGNORECASE)
ANYWHERE = re.compile("|".join(REFUSED).replace(AT_THE_BEGINNING, r"\b"), re.IGNORECASE)
BETWEEN_LITERALS = re.compile(r"""["']\s*f?["']""")  # of one text
MODULE = re.compile(r"([a-z_0-9]+\.py)\b")
# A comment, and what follows a # in a string: it is our text as well. Python's own tokenizer is slower.
COMMENT = re.compile(r"#[# ]*([^#\n]*)")


@cache
def may_have_refused(source: str) -> bool:
    """Whether a module has a refused word at all, in a text or not. Most have none, and need no parsing."""
    return ANYWHERE.search(BETWEEN_LITERALS.sub("", source)) is not None


def sources_of(package: str) -> Iterator[tuple[Path, str]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        yield path.relative_to(ROOT), path.read_text()


@cache
def tree_of(source: str) -> ast.Module:
    return ast.parse(source)


def definitions_in(node: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Classes and functions at any depth. Expressions, most of a tree, have none."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.stmt | ast.excepthandler | ast.match_case):
            if isinstance(part, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield part
            yield from definitions_in(part)


@cache
def texts_of(source: str) -> tuple[str, ...]:
    """Docstrings and comments."""
    return tuple(_texts_of(source))


def _texts_of(source: str) -> Iterator[str]:
    tree = tree_of(source)
    for node in (tree, *definitions_in(tree)):
        yield ast.get_docstring(node) or ""
    yield from COMMENT.findall(source)


def messages_of(source: str) -> Iterator[str]:
    """Texts that a person may read: errors, log fields, terminal lines, helps. String literals with a space."""
    tree = tree_of(source)
    nodes = list(ast.walk(tree))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    others = parts | {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # and docstrings
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            values = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            yield "".join(map(str, values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            if id(node) not in others:
                yield node.value


def paragraphs_of(page: str) -> Iterator[str]:
    """Paragraphs, list items and table rows of a page, without code blocks and the targets of links."""
    page = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    for text in re.split(r"\n(?=- |\| |\d+\. )|\n\n", re.sub(r"\]\([^)]*\)", "]", page)):
        yield re.sub(r"^(- |\| |\d+\. |#+ )", "", " ".join(text.split()))


def habits_in(text: str) -> list[str]:
    """Refused words of a text, each with what to write instead."""
    text = re.sub(r"`[^`]*`", "", text)  # names of the code
    if not ANY_REFUSED.search(text):
        return []
    found = ((re.search(pattern, text, re.MULTILINE | re.IGNORECASE), instead) for pattern, instead in REFUSED.items())
    return [f"{match.group()!r} ({instead})" for match, instead in found if match]


@pytest.mark.parametrize("package", ["actors", "bin", "messages", "runtime"])
def test_no_docstring_or_comment_has_a_refused_word(package: str) -> None:
    found = [
        f"{path}: {' '.join(text.split())[:80]}: {habit}"
        for path, source in sources_of(package)
        if may_have_refused(source)
        for text in texts_of(source)
        for habit in habits_in(text)
    ]
    assert found == []


def documented_and_real_parameters(source: str) -> Iterator[tuple[str, set[str], set[str]]]:
    """Name, documented parameters and real ones of each function or class whose docstring has arguments."""
    for node in definitions_in(tree_of(source)):
        if "Args:\n" not in (ast.get_docstring(node, clean=False) or ""):
            continue
        text = (ast.get_docstring(node) or "").partition("Args:\n")[2]
        documented = set(re.findall(r"^    (\w+):", text.partition("\n\n")[0], re.MULTILINE))
        functions = (
            [node]
            if not isinstance(node, ast.ClassDef)
            else [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        )
        fields = {
            part.target.id
            for part in node.body
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
        }
        real = {part.arg for function in functions for part in ast.walk(function.args) if isinstance(part, ast.arg)}
        yield node.name, documented, real | fields


@pytest.mark.parametrize("package", ["actors", "bin", "messages", "runtime"])
def test_docstrings_name_the_parameters_that_exist(package: str) -> None:
    wrong = [
        f"{path}: {name}: {', '.join(sorted(documented - real))}"
        for path, source in sources_of(package)
        if "Args:\n" in source
        for name, documented, real in documented_and_real_parameters(source)
        if documented - real
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ["actors", "bin", "messages", "runtime"])
def test_docstrings_and_comments_name_modules_that_exist(package: str) -> None:
    existing = {
        path.name
        for folder in ("actors", "bin", "messages", "runtime", "tests")
        for path in (ROOT / folder).rglob("*.py")
    }
    external = {"fp8.py", "server_args.py"}  # SGLang's
    examples = {"file.py", "messages.py"}  # files of a user
    wrong = [
        f"{path}: {name}"
        for path, source in sources_of(package)
        if MODULE.search(source)
        for text in texts_of(source)
        for name in MODULE.findall(text)
        if name not in existing | external | examples
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ["actors", "bin", "messages", "runtime"])
def test_no_error_log_line_or_help_has_a_refused_word(package: str) -> None:
    found = [
        f"{path}: {' '.join(text.split())[:80]}: {habit}"
        for path, source in sources_of(package)
        if may_have_refused(source)
        for text in messages_of(source)
        for habit in habits_in(text)
    ]
    assert found == []


def test_no_shell_command_has_a_refused_word() -> None:
    scripts = [path for path in sorted((ROOT / "bin").iterdir()) if path.is_file() and not path.suffix]
    assert {"setup", "test"} <= {path.name for path in scripts}
    assert [(path.name, habit) for path in scripts for habit in habits_in(path.read_text())] == []


def test_a_refused_word_of_a_comment_is_found() -> None:
    source = 'x = "#1"  # Nobody waits.\n# Of two\n# one #2 is told\ny = 1\n'
    assert [text for text in texts_of(source) if habits_in(text)] == ["Nobody waits.", "Of two", "2 is told"]
    assert may_have_refused(source)


def test_a_refused_word_of_a_message_is_found() -> None:
    source = 'def f(n):\n    """Nobody."""\n    log.info("nobody")\n    raise E(f"{n} steps are " "told", "ok")\n'
    assert [text for text in messages_of(source) if habits_in(text)] == ["X steps are told"]
    assert may_have_refused(source)


@pytest.mark.parametrize(
    ("source", "may"),
    [
        ('log.info("Of two")\n', True),
        ('"""One. So many."""\n', True),
        ("raise E(f'{n} steps are '\n        f'asked')\n", True),
        ('log.info("of two")\n', False),
        ("# the steps are\n# those of two\n", False),
    ],
)
def test_a_module_is_parsed_if_it_may_have_a_refused_word(source: str, may: bool) -> None:
    assert may_have_refused(source) == may


def test_no_page_has_a_refused_word() -> None:
    pages = [ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "llms.txt")]
    pages += [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "results"]
    found = [
        f"{page.relative_to(ROOT)}: {text[:80]}: {habit}"
        for page in pages
        for text in paragraphs_of(page.read_text(encoding="utf-8"))
        for habit in habits_in(text)
    ]
    assert found == []


def test_a_refused_word_of_a_page_is_found() -> None:
    page = "# A page\n\nText [of](is-told.md).\n- Of two one\n- two\n\n| nobody | `whoever` |\n\n```\nreckon\n```\n"
    assert [text for text in paragraphs_of(page) if habits_in(text)] == ["Of two one", "nobody | `whoever` |"]


@pytest.mark.parametrize(
    "text",
    ["Whether the tensors are told.", "Of the optimizer it holds the tensors.", "Reckon the hash.", "Nobody waits."],
)
def test_a_refused_word_is_found(text: str) -> None:
    assert habits_in(text)


def test_a_name_of_the_code_may_have_one() -> None:
    assert habits_in("Call `is_told` of the node daemon. The end of it.") == []
