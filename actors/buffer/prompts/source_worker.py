"""Process of a user's data source, a class with a state or a function: gives outcomes, draws rows, saves the state."""

import inspect
import json
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar, cast

import msgspec

from runtime.data.data_files import DataError, read_records
from runtime.functions.answers import Answers
from runtime.functions.load import load
from runtime.functions.table import SOURCE, SOURCE_CLASS, UserFunction
from runtime.ledger.state import GroupOutcome
from runtime.util.tracebacks import user_traceback

MAX_STATE_BYTES: Final = 1 << 20
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
    """What the process gets first: the files of its class."""

    files: dict[str, str] = {}  # data files by the name of their table
    max_row_bytes: int = 16 << 20


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """What the process says once it is ready."""

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


class _Function:
    """A function as a source without a state."""

    def __init__(self, draw: Callable[[int], Any]) -> None:
        self.draw = draw

    def state(self) -> None:
        """Return no state."""


class Source:
    """An object of the user's class, or a user's function."""

    def __init__(self, loaded: Callable[..., Any], name: str, hello: Hello) -> None:
        """Read the files of a class.

        Raises:
            DataError: a file cannot be read.
            UserError: its constructor does not take the rows.
        """
        self._name, self._hello = name, hello
        self._is_function = not inspect.isclass(loaded)
        self._object: Any = None
        self._class = partial(_Function, loaded) if self._is_function else loaded
        self.gets_outcomes = hasattr(loaded, "told")
        self._arguments: list[Any] = [] if self._is_function else self._rows_by_file()

    def _rows_by_file(self) -> list[Any]:
        """Return the argument of the constructor, if it takes one."""
        files = self._hello.files
        if not files and _takes(self._class, 0):
            return []
        if not _takes(self._class, 1):
            wanted = "one argument, the rows by file" if files else "no argument, or one: the rows by file"
            raise UserError(f"{self._name}: its constructor must take {wanted}")
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
        name = f"({number})" if self._is_function else f"draw({number})"
        row: Any = _call(name, lambda: self._object.draw(number))
        if self._is_function:
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


def kind_of(key: str) -> UserFunction:
    """Return the kind of function that a setting of a data source names."""
    return SOURCE_CLASS if key.endswith(".source_class") else SOURCE


def answering(key: str, name: str, hello: bytes = b"") -> Answers:
    """Load a class or a function, which answers Drawn to a Draw. The process then says Ready.

    Args:
        key: setting that names it.
        name: of the class or the function.
        hello: a Hello; empty: it is loaded, and not called.

    Raises:
        ValueError: it cannot be used.
    """
    loaded = load(kind_of(key), key, name).function
    if not hello:
        return Answers(_answer_nothing)
    try:
        source = Source(loaded, name, msgspec.msgpack.decode(hello, type=Hello))
    except (DataError, UserError, MemoryError) as error:
        raise ValueError(str(error) or type(error).__name__) from error

    def answer(payload: bytes) -> bytes:
        return msgspec.msgpack.encode(source.answer(msgspec.msgpack.decode(payload, type=Draw)))

    return Answers(answer, msgspec.msgpack.encode(Ready(gets_outcomes=source.gets_outcomes)))


def _answer_nothing(_payload: bytes) -> bytes:
    return b""
