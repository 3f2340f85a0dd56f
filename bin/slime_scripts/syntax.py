"""Bash as tree-sitter parses it: helpers for nodes and literal text, integer arithmetic, trimming of values."""

import ast
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, Final

import msgspec

MAX_SEQUENCE: Final = 4096  # numbers of `seq`
PAIR: Final = re.compile(r'"([A-Za-z_]\w*)"\s*:\s*"([^"]*)"')  # of a JSON
ARITHMETIC: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda left, right: int(left / right),  # bash rounds towards 0
    ast.Mod: operator.mod,
}


class NotAStartScript(Exception):
    """A script that cannot be read, or that starts no training; the text names file and line."""


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """A word of the script after expansion."""

    text: str
    place: str  # "file:line"
    missing: tuple[str, ...] = ()  # variables whose value only the machine knows; the text lacks them


def parser() -> Any:
    """Return tree-sitter's parser for bash. Raises NotAStartScript if the extra is not installed."""
    try:
        tree_sitter, bash = import_module("tree_sitter"), import_module("tree_sitter_bash")
    except ImportError as error:
        raise NotAStartScript(f'needs {error.name}, not installed here: pip install "physarum[from-slime]"') from None
    return tree_sitter.Parser(tree_sitter.Language(bash.language()))


def text_of(node: Any) -> str:
    """Return the source text of a node."""
    return node.text.decode("utf-8", "replace")


def assignments(node: Any) -> Iterator[Any]:
    """Yield the assignments to plain variables within a node."""
    for child in node.named_children:
        if child.type == "variable_assignment" and child.child_by_field_name("name").type == "variable_name":
            yield child
        else:
            yield from assignments(child)


def names_in(node: Any) -> list[str]:
    """Return the names of the variables that a node uses."""
    if node.type == "variable_name":
        return [text_of(node)]
    return [name for child in node.named_children for name in names_in(child)]


def whole_array(node: Any) -> str | None:
    """Return the name of the array that a node expands to all elements of."""
    found = re.fullmatch(r'"?\$\{(\w+)\[[@*]\](?:[:+-].*)?\}"?', text_of(node), re.DOTALL)
    return found[1] if found is not None and node.type in ("expansion", "string") else None


def ansi(text: str) -> str:
    """Replace the escapes of a text in $'...' that start scripts use."""
    escapes = {"n": "\n", "t": "\t", "r": "\r"}
    return re.sub(r"\\([ntr\\'\"])", lambda found: escapes.get(found[1], found[1]), text)


def unescaped(text: str) -> str:
    """Remove backslashes of unquoted text, and joined lines."""
    return re.sub(r"\\(.)", r"\1", text.replace("\\\n", ""))


def unquoted(source: bytes, kind: str) -> str:
    """Return the literal text between two expansions. Within quotes a backslash escapes only a few characters."""
    text = source.decode("utf-8", "replace")
    return re.sub(r'\\([$`"\\])', r"\1", text.replace("\\\n", "")) if kind == "string" else unescaped(text)


def integer(text: str) -> int | None:
    """Return a whole number from its text; None for other texts."""
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def trimmed(value: Word, rest: str) -> Word:
    """Apply ${NAME%pattern}, ${NAME##pattern} and ${NAME/text/other} with plain patterns."""
    sign = next((sign for sign in ("%%", "%", "##", "#", "//", "/") if rest.startswith(sign)), None)
    if sign is None:
        return msgspec.structs.replace(value, missing=(*value.missing, f"${{...{rest}}}"))
    pattern, text = rest[len(sign) :], value.text
    if sign[0] == "/":
        old, _, new = pattern.partition("/")
        return msgspec.structs.replace(value, text=text.replace(old, new, -1 if sign == "//" else 1))
    cuts = range(len(text) + 1)
    if sign[0] == "%":
        fitting = [text[:cut] for cut in cuts if fnmatchcase(text[cut:], pattern)]
        return msgspec.structs.replace(value, text=(fitting or [text])[0 if sign == "%%" else -1])
    fitting = [text[cut:] for cut in cuts if fnmatchcase(text[:cut], pattern)]
    return msgspec.structs.replace(value, text=(fitting or [text])[-1 if sign == "##" else 0])


def sequence(first: Word, step: Sequence[Word], last: Word) -> Word | None:
    """Return what `seq FIRST [STEP] LAST` prints, as one word; None if it is none or too long."""
    numbers = [integer(word.text) for word in (first, *step, last)]
    if any(number is None for number in numbers) or (step and numbers[1] == 0):
        return None
    start, stop, by = numbers[0] or 0, numbers[-1] or 0, (numbers[1] or 1) if step else 1
    counted = range(start, stop + (1 if by > 0 else -1), by)
    text = " ".join(str(number) for number in counted[:MAX_SEQUENCE])
    return msgspec.structs.replace(first, text=text) if len(counted) <= MAX_SEQUENCE else None


def computed(text: str) -> int | None:
    """Return the value of an integer expression of + - * / % and brackets; None for others."""
    try:
        return _value(ast.parse(text.strip().replace("/", "//"), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in ARITHMETIC:
            return ARITHMETIC[type(sign)](_value(left), _value(right))
        case _:
            raise ValueError(ast.dump(node))


def variables_in(text: str) -> dict[str, str]:
    """Return the environment variables in a JSON, which may be that of a runtime environment of Ray."""
    try:
        decoded: Any = json.loads(text)
    except ValueError:  # a value that only the machine knows may be missing
        return dict(PAIR.findall(text))
    inner: Any = decoded.get("env_vars", decoded) if isinstance(decoded, dict) else {}  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return {str(name): str(value) for name, value in inner.items()} if isinstance(inner, dict) else {}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
