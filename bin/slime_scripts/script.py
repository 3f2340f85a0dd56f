"""Reads a start script of slime without running it: variables, arrays, sourced files, and the arguments of its program.

Bash is parsed by tree-sitter (extra `from-slime`). What only the machine knows, such as the output of nvidia-smi, is
missing: the words that need it name the variable to give.
"""

import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import msgspec

from bin.slime_scripts.syntax import (
    NotAStartScript,
    Word,
    assignments,
    integer,
    names_in,
    parser,
    text_of,
    variables_in,
)
from bin.slime_scripts.words import Words

PROGRAMS: Final = ("train.py", "train_async.py")
RUNTIME_ENV: Final = "--runtime-env-json"  # of `ray job submit`: variables of the environment, among others
VARIABLE: Final = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
FLAG: Final = re.compile(r"--[A-Za-z][A-Za-z0-9_-]*")
MAX_DEPTH: Final = 16  # of sourced files and function calls
MAX_BYTES: Final = 1 << 20  # of a script
COMPARISONS: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """A flag on the command line, with its values."""

    flag: str  # without dashes
    values: tuple[Word, ...]
    place: str  # "file:line"


class StartScript(msgspec.Struct, frozen=True, kw_only=True):
    """What a start script would give to slime."""

    program: str  # one of PROGRAMS
    given: tuple[Given, ...]  # in the order of the command line
    environment: tuple[Given, ...] = ()  # variables that the script gives to the program, as if they were flags
    unread: tuple[Given, ...] = ()  # arrays of flags that a file would set which is not here
    notes: tuple[str, ...]  # what was not read, each with its place


class _Exit(Exception):
    """The script calls `exit`."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.place = place


def read_script(path: Path, given: Mapping[str, str]) -> StartScript:
    """Read a start script and the files that it sources.

    Args:
        path: the script.
        given: values of variables, by name. They come first, as if the environment had them, and replace what the
            script takes from the machine.

    Raises:
        NotAStartScript: the script cannot be read, ends early, or does not start training.
    """
    reader = _Reader(given)
    try:
        reader.read(Path(os.path.abspath(path)))  # the script finds its own folder as bash would
    except _Exit as end:
        asked = (
            f"; variables that it tests can be given with --var: {', '.join(reader.tested)}" if reader.tested else ""
        )
        raise NotAStartScript(f"{end.place}: the script would end here, before it starts training{asked}") from None
    except RecursionError:
        raise NotAStartScript(f"{path}: its expansions are nested too deeply") from None
    if reader.command is None:
        what = f"{path}: does not call {' or '.join(PROGRAMS)}; scripts in Python are not read"
        raise NotAStartScript("\n".join([*reader.notes, what]))
    program, words = reader.command
    return StartScript(
        program=program,
        given=tuple(_flags(words)),
        environment=tuple(reader.environment.values()),
        unread=tuple(reader.unread) if reader.is_incomplete else (),
        notes=tuple(dict.fromkeys(reader.notes)),
    )


def _flags(words: Iterable[Word]) -> Iterator[Given]:
    """Group arguments into flags with their values."""
    flag: Word | None = None
    values: list[Word] = []
    for word in words:
        if FLAG.match(word.text) is None:
            values.append(word)
            continue
        if flag is not None:
            yield _one_flag(flag, values)
        name, equals, value = word.text.partition("=")
        flag = msgspec.structs.replace(word, text=name)
        values = [msgspec.structs.replace(word, text=value)] if equals else []
    if flag is not None:
        yield _one_flag(flag, values)


def _one_flag(flag: Word, values: Iterable[Word]) -> Given:
    return Given(flag=flag.text.lstrip("-").replace("_", "-"), values=tuple(values), place=flag.place)


class _Reader:
    """Follows a script statement by statement, with the variables that it has set so far."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.command: tuple[str, list[Word]] | None = None  # the first call of one of PROGRAMS, and its arguments
        self.environment: dict[str, Given] = {}
        self.unread: list[Given] = []
        self.is_incomplete = False  # a file that it sources is not here
        self.notes: list[str] = []
        self.tested: list[str] = []  # variables in conditions that ended the script
        self._words = Words(given)
        self._functions: dict[str, Any] = {}
        self._depth = 0

    def read(self, path: Path) -> None:
        """Follow a file. Raises NotAStartScript if it cannot be read."""
        source = _bytes_of(path)
        outer, self._words.file = self._words.file, path
        root = parser().parse(source).root_node
        if (wrong := _first_error(root)) is not None:
            self.notes.append(
                f"{self._words.place_of(wrong)}: bash would not understand this; what follows may be misread"
            )
        self._deeper(lambda: self._all(root))
        self._words.file = outer

    def _deeper(self, work: Callable[[], None]) -> None:
        if self._depth >= MAX_DEPTH:
            raise NotAStartScript(f"{self._words.file}: more than {MAX_DEPTH} files or functions within each other")
        self._depth += 1
        work()
        self._depth -= 1

    def _all(self, node: Any) -> None:
        for child in node.named_children:
            if self.command is None:
                self._statement(child)
            elif (
                child.type == "command"
                and (words := self._words.split(child.named_children[0]))
                and FLAG.match(words[0].text)
            ):
                self.notes.append(
                    f"{self._words.place_of(child)}: a backslash is missing before this line: train.py does not get it"
                )

    def _statement(self, node: Any) -> None:
        match node.type:
            case "variable_assignment":
                self._words.assign(node)
            case "declaration_command" | "variable_assignments":
                exports = text_of(node.children[0]) == "export"
                for child in node.named_children:
                    if child.type == "variable_assignment":
                        self._words.assign(child)
                    if exports:
                        self._export(child)
            case "command":
                self._command(node)
            case "if_statement":
                self._if(node)
            case "function_definition":
                self._functions[text_of(node.child_by_field_name("name"))] = node.child_by_field_name("body")
            case "for_statement" | "c_style_for_statement" | "while_statement" | "case_statement":
                self._uncertain(node, f"{self._words.place_of(node)}: a loop or case is not followed")
            case "list":
                self._list(node)
            case "redirected_statement" | "pipeline" | "compound_statement" | "subshell" | "negated_command":
                self._all(node)
            case _:
                pass

    def _list(self, node: Any) -> None:
        """Follow `a && b` and `a || b`, where the first part decides about the second."""
        left, joined, right = node.children[0], text_of(node.children[1]), node.children[-1]
        decided = self._condition(left)
        if decided is None:
            self._statement(left)
            if joined == "&&":
                self._statement(right)
        elif decided == (joined == "&&"):
            self._statement(right)

    def _if(self, node: Any) -> None:
        """Follow the branch that the condition decides; if only the machine can decide, see `_uncertain`."""
        conditions = [child for child in node.children_by_field_name("condition") if child.is_named]
        decided = self._condition(conditions[0]) if len(conditions) == 1 else None
        other = [child for child in node.named_children if child.type in ("elif_clause", "else_clause")]
        body = [child for child in node.named_children if child not in conditions and child not in other]
        if decided is None:
            self._uncertain(node, None)
        elif decided:
            try:
                for child in body:
                    self._statement(child)
            except _Exit:
                self.tested += names_in(conditions[0])
                raise
        elif other and other[0].type == "elif_clause":
            self._uncertain(other[0], None)
        else:
            for child in other:
                self._all(child)

    def _uncertain(self, node: Any, note: str | None) -> None:
        """Leave out statements that may not run. A constant that they set is taken where there is no value yet."""
        for child in assignments(node):
            name = text_of(child.child_by_field_name("name"))
            value = self._words.assigned(child)
            if not self._words.knows(name):
                self._words.set(name, value if node.type == "if_statement" else [self._words.unknown(name, child)])
        if note is not None and any("train" in text_of(child) for child in node.named_children):
            self.notes.append(note)

    def _export(self, node: Any) -> None:
        """Note a variable that the script puts into the environment of what it starts."""
        name = text_of(node.child_by_field_name("name") if node.type == "variable_assignment" else node)
        if name.isidentifier():
            self._note_variable(name, self._words.value_of(name, node))

    def _note_variable(self, name: str, value: Word) -> None:
        self.environment[name] = Given(flag=name, values=(value,), place=value.place)

    def _before_program(self, words: Sequence[Word]) -> None:
        """Note the variables that a command line gives to its program: alone, after `env`, or in a JSON for Ray."""
        for number, word in enumerate(words):
            flag, equals, text = word.text.partition("=")
            if flag == RUNTIME_ENV and (equals or number + 1 < len(words)):
                for name, value in variables_in(text if equals else words[number + 1].text).items():
                    self._note_variable(name, msgspec.structs.replace(word, text=value))
            elif found := VARIABLE.fullmatch(word.text):
                self._note_variable(found[1], msgspec.structs.replace(word, text=found[2]))

    def _command(self, node: Any) -> None:
        own: list[Any] = []  # A=1 command
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._words.assign(child)
                own.append(child)
        words = [
            word
            for child in node.named_children
            if child.type not in ("variable_assignment", "file_redirect", "herestring_redirect")
            for word in self._words.split(child)
        ]
        name = words[0].text if words else ""
        if name == "exit":
            raise _Exit(self._words.place_of(node))
        if name in ("source", ".") and len(words) > 1:
            self._source(words[1])
        elif name in self._functions:
            self._deeper(lambda: self._statement(self._functions[name]))
        elif name == "printf" and len(words) > 2 and words[1].text == "-v":
            self._words.set(words[2].text, [self._words.unknown(words[2].text, node)])
        for number, word in enumerate(words):
            if self.command is None and (program := word.text.rpartition("/")[2]) in PROGRAMS:
                self.command = program, words[number + 1 :]
                self._before_program(words[:number])
                self.unread = [
                    Given(flag=name, values=(), place=place)
                    for name, place in self._words.unset.items()
                    if not self._words.knows(name)
                ]
                for child in own:
                    self._export(child)

    def _source(self, word: Word) -> None:
        path = None if word.missing else self._found(Path(word.text))
        if path is None:
            self.notes.append(f"{word.place}: the sourced file is not here: {word.text}")
            self.is_incomplete = True
        else:
            self.read(path)

    def _found(self, path: Path) -> Path | None:
        """Find a file as the script would, or at the same place of the repository that the script is in."""
        places = (Path.cwd(), *self._words.file.parents)  # scripts are started from the top of their repository
        candidates = [place / path for place in places]
        if path.is_absolute():  # as in the container of the script
            parts = path.parts[1:]
            candidates += [place.joinpath(*parts[cut:]) for cut in range(1, len(parts) - 1) for place in places]
        return next((candidate for candidate in candidates if candidate.is_file()), None)

    # conditions

    def _condition(self, node: Any) -> bool | None:
        """Return whether a condition holds; None if only the machine knows."""
        match node.type:
            case "test_command":
                return self._condition(node.named_children[0]) if node.named_child_count == 1 else None
            case "list" | "binary_expression" if text_of(node.children[1]) in ("&&", "||"):
                sides = [self._condition(node.children[0]), self._condition(node.children[-1])]
                decisive = text_of(node.children[1]) == "||"
                if decisive in sides:
                    return decisive
                return None if None in sides else not decisive
            case "negated_command" | "unary_expression" if text_of(node.children[0]) == "!":
                inner = self._condition(node.named_children[-1])
                return None if inner is None else not inner
            case "unary_expression":
                return self._unary(node)
            case "binary_expression":
                return self._binary(node)
            case _:
                return None

    def _unary(self, node: Any) -> bool | None:
        word = self._words.joined(node.named_children[-1], unset_is_empty=True)
        if word.missing or text_of(node.children[0]) not in ("-z", "-n"):
            return None
        return (word.text == "") == (text_of(node.children[0]) == "-z")

    def _binary(self, node: Any) -> bool | None:
        left, right = (self._words.joined(node.children[side], unset_is_empty=True) for side in (0, -1))
        sign = text_of(node.children[1])
        if left.missing or right.missing:
            return None
        if sign in ("=", "==", "!="):
            return fnmatchcase(left.text, right.text) != (sign == "!=")
        numbers = [integer(side.text) for side in (left, right)]
        if sign not in COMPARISONS or numbers[0] is None or numbers[1] is None:
            return None
        return COMPARISONS[sign](numbers[0], numbers[1])


def _bytes_of(path: Path) -> bytes:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise NotAStartScript(f"{path}: {error.strerror}") from None
    if len(source) > MAX_BYTES:
        raise NotAStartScript(f"{path}: {len(source):,} bytes; a start script has at most {MAX_BYTES:,}")
    source = source.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")  # as some editors save it
    return re.sub(rb":\$([A-Za-z_]\w*)", rb":${\1}", source)  # tree-sitter ends a word at the second $ of $HOST:$PORT


def _first_error(node: Any) -> Any | None:
    """Return the first node that the parser could not make sense of."""
    while node.has_error and not (node.is_error or node.is_missing):
        node = next(child for child in node.children if child.has_error or child.is_error or child.is_missing)
    return node if node.is_error or node.is_missing else None
