"""Process of a user's data source, a class with a state or a function: gives outcomes, draws rows, saves the state.

Run as `python -m actors.buffer.prompts.source_worker`, with frames on stdin and stdout. It ends with its parent.
"""

import inspect
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar, cast

import msgspec

from runtime.data.data_files import DataError, read_records
from runtime.ledger.state import GroupOutcome
from runtime.process.user_limits import LENGTH_BYTES, end_group, end_with_parent, limit, read_call, take_pipes
from runtime.settings.plugins import load_class, load_plugin
from runtime.util.exit_codes import EXIT_NO_HELLO, EXIT_OK
from runtime.util.import_path import user_folder_last
from runtime.util.tracebacks import user_traceback

MAX_STATE_BYTES: Final = 1 << 20
METHODS: Final = ("draw", "state", "restore")  # of the user's class
OPTIONAL: Final = ("told",)
JSON: Final = (
    "a value that JSON brings back as it is: objects with text keys, lists (no tuples), texts, finite numbers, true, "
    "false, null"
)

T = TypeVar("T")


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """A state, as the class returned it."""

    content: bytes  # JSON, or the bytes of the class
    is_json: bool = True


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """First frame to the process: the class, its files and its limits."""

    key: str  # setting that names the class, for messages
    value: str  # "module:Class" or "path/file.py:Class"
    is_function: bool = False  # it names a function, which returns the row of a number
    base_dirs: tuple[str, ...] = ()
    files: dict[str, str] = {}  # data files by the name of their table
    max_row_bytes: int = 16 << 20
    memory_bytes: int = 8 << 30
    max_files: int = 1024


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """First frame from the process: ready, or the error that prevents it."""

    error: str = ""
    gets_outcomes: bool = False  # whether the class has a method `told`


class Draw(msgspec.Struct, frozen=True, kw_only=True):
    """Request: give the class outcomes, then draw rows."""

    first: int  # number of the first row
    count: int
    outcomes: tuple[GroupOutcome, ...] = ()
    restart: bool = False  # begin with a new object, which gets `state` if there is one
    state: SavedState | None = None


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """Answer: the rows and the state after them, or an error."""

    rows: tuple[bytes, ...] = ()  # JSON objects
    state: SavedState | None = None
    error: str = ""
    trace: str = ""  # of the user's exception


class UserError(Exception):
    """The class raised, or returned what cannot be used."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


def framed(struct: msgspec.Struct) -> bytes:
    """Encode a struct as a length-prefixed frame."""
    content = msgspec.msgpack.encode(struct)
    return len(content).to_bytes(LENGTH_BYTES, "big") + content


class _Function:
    """A function as a source without a state."""

    def __init__(self, draw: Callable[[int], Any]) -> None:
        self.draw = draw

    def state(self) -> None:
        """Return no state."""


class Source:
    """An object of the user's class, or a user's function."""

    def __init__(self, hello: Hello) -> None:
        """Load the class and its files. Raises PluginError, or DataError for a file."""
        self._hello = hello
        self._arguments: list[Any] = []
        self._object: Any = None
        self.gets_outcomes = False
        bases = [Path(base) for base in hello.base_dirs]
        if hello.is_function:
            function = load_plugin(hello.key, hello.value, parameters=["number"], base_dirs=bases).function
            self._class: Callable[..., Any] = partial(_Function, function)
            return
        self._class = load_class(hello.key, hello.value, methods=METHODS, optional=OPTIONAL, base_dirs=bases)
        self.gets_outcomes = hasattr(self._class, "told")
        self._arguments = self._rows_by_file()

    def _rows_by_file(self) -> list[Any]:
        """Return the argument of the constructor, if it takes one."""
        files = self._hello.files
        if not files and _takes(self._class, 0):
            return []
        if not _takes(self._class, 1):
            wanted = "one argument, the rows by file" if files else "no argument, or one: the rows by file"
            raise UserError(f"{self._hello.value}: its constructor must take {wanted}")
        return [{name: [record.columns for record in read_records(path)] for name, path in files.items()}]

    def answer(self, request: Draw) -> Drawn:
        """Give the class the outcomes, and draw."""
        try:
            if request.restart or self._object is None:
                self._begin(request.state)
            told: Callable[[GroupOutcome], object] = getattr(self._object, "told", lambda _: None)
            for outcome in request.outcomes:
                _call(f"told({outcome.kind} {outcome.number})", partial(told, outcome))
            rows = tuple(self._row(request.first + index) for index in range(request.count))
            return Drawn(rows=rows, state=self._state())
        except UserError as error:
            self._object = None  # what it is after an error is unknown
            return Drawn(error=str(error), trace=error.trace)

    def _begin(self, state: SavedState | None) -> None:
        self._object = _call("the constructor", lambda: self._class(*self._arguments))
        if state is not None:
            value = msgspec.json.decode(state.content) if state.is_json else state.content
            _call("restore()", lambda: self._object.restore(value))

    def _row(self, number: int) -> bytes:
        name = f"({number})" if self._hello.is_function else f"draw({number})"
        row: Any = _call(name, lambda: self._object.draw(number))
        if self._hello.is_function:
            return _columns(name, row)
        if not isinstance(row, dict):
            raise UserError(f"draw({number}): expected a dict, the columns of a row, and got {type(row).__name__}")
        columns = cast("dict[Any, Any]", row)
        try:
            content = _json(f"draw({number})", columns)
        except UserError:
            for name, value in columns.items():
                _json(f"draw({number}): column {name!r:.200}", value)  # names the one to blame
            raise
        if len(content) > 2 * self._hello.max_row_bytes:
            raise UserError(f"draw({number}): the row has {len(content)} bytes of JSON (data.max_row_bytes)")
        return content

    def _state(self) -> SavedState:
        value: Any = _call("state()", lambda: self._object.state())
        is_json = not isinstance(value, bytes)
        content = _json("state()", value, "bytes, or ") if is_json else value
        if len(content) > MAX_STATE_BYTES:
            raise UserError(f"state(): has {len(content)} bytes, and at most {MAX_STATE_BYTES} are allowed")
        return SavedState(content=content, is_json=is_json)


def _columns(name: str, row: Any) -> bytes:
    """Encode the row of a function, whose tuples become lists."""
    try:
        content = msgspec.json.encode(row)
        msgspec.json.decode(content, type=dict[str, Any])
        json.dumps(msgspec.to_builtins(row), allow_nan=False)  # msgspec writes NaN as null
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{name}: expected a dict of JSON values: {error}") from error
    return content


def _takes(user_class: Callable[..., Any], number: int) -> bool:
    try:
        inspect.signature(user_class).bind(*range(number))
    except TypeError:
        return False
    except ValueError:  # some classes have no signature
        return number == 0
    return True


def _call(name: str, call: Callable[[], T]) -> T:
    try:
        answer = call()
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        raise UserError(f"{name}: raised {type(error).__name__}: {error}", user_traceback(error)) from error
    if inspect.isawaitable(answer) or inspect.isgenerator(answer) or inspect.isasyncgen(answer):
        if inspect.iscoroutine(answer):
            answer.close()  # else Python warns that it was never awaited
        raise UserError(f"{name}: returned a {type(answer).__name__}, which would have to run first; return a value")
    return answer


def _json(name: str, value: Any, otherwise: str = "") -> bytes:
    """Encode a user's value, which decoding must bring back.

    Args:
        name: the call that returned it, for messages.
        value: the value.
        otherwise: what else is allowed, for messages.
    """
    try:
        content = msgspec.json.encode(value)
        same = bool(msgspec.json.decode(content) == value)
    except Exception as error:  # comparing a user's objects may raise anything
        raise UserError(f"{name}: expected {otherwise}{JSON}: {error}") from error
    if not same:
        raise UserError(f"{name}: expected {otherwise}{JSON}")
    return content


def main() -> int:
    """Answer requests until the input ends, then kill this process group. Return an exit code before that."""
    fd_in, fd_out = take_pipes()
    calls, answers = os.fdopen(fd_in, "rb"), os.fdopen(fd_out, "wb")
    end_with_parent(fd_in)
    user_folder_last()
    frame = read_call(calls)
    if frame is None:
        return EXIT_NO_HELLO
    hello = msgspec.msgpack.decode(frame, type=Hello)
    limit(hello.memory_bytes, hello.max_files)
    try:
        source = Source(hello)
    except (ValueError, DataError, UserError, MemoryError) as error:
        _write(answers, Ready(error=str(error) or type(error).__name__))
        return EXIT_OK
    _write(answers, Ready(gets_outcomes=source.gets_outcomes))
    while (frame := read_call(calls)) is not None:
        _write(answers, source.answer(msgspec.msgpack.decode(frame, type=Draw)))
    end_group()


def _write(answers: BinaryIO, struct: msgspec.Struct) -> None:
    answers.write(framed(struct))
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
