"""Runs a user's data source in a process that can be killed. Blocks: for a thread."""

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, NamedTuple, TypeVar

import msgspec
import structlog

from actors.buffer.prompts.source_worker import Draw, Drawn, Hello, Ready, SavedState, kind_of
from runtime.data.data_files import DataError
from runtime.functions.child import command, framed
from runtime.functions.limits import LENGTH_BYTES, UserLimits, environment, forward, how_ended
from runtime.functions.table import SOURCE
from runtime.ledger.state import GroupOutcome
from runtime.settings.derived import limits_of
from runtime.settings.recipe import Recipe
from runtime.settings.tables.reward import RewardConfig
from runtime.settings.topology import Topology
from runtime.util.formatting import count_of

START_TIMEOUT_S: Final = 60.0  # to import the user's module and read the files
TRIED_AT_A_TIME: Final = 10  # rows of a draw of a trial
KILL_TIMEOUT_S: Final = 5.0
MAX_TRIES: Final = 3  # processes that may die in one draw
MAX_ANSWER_BYTES: Final = 1 << 30
LOADING: Final = "loading it"
HEAD_BYTES: Final = 1 + LENGTH_BYTES  # of an answer: whether the function answered, and the length
REST_S: Final = 1.0  # between two pieces of an answer that has begun, past the time limit

log = structlog.get_logger()
StructT = TypeVar("StructT", bound=msgspec.Struct)


class _DiedError(Exception):
    """The process ended."""


class SourceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The class or the function, and its limits."""

    key: str  # setting that names it
    value: str  # "module:Class" or "path/file.py:Class", or of a function
    hello: Hello = Hello()
    limits: UserLimits = UserLimits()
    timeout_s: float  # of one issue: all outcomes and draws together

    @property
    def is_function(self) -> bool:
        """Whether it is a function of a number, and not a class."""
        return kind_of(self.key) is SOURCE


def source_settings(recipe: Recipe) -> SourceSettings | None:
    """The settings of the recipe's data source that is a class or a function; None: it has none."""
    for index, item in enumerate(recipe.data):
        value = item.source_class or item.source
        if value is not None:
            return SourceSettings(
                key=f"data.{index}.{'source' if item.source_class is None else 'source_class'}",
                value=value,
                hello=Hello(files=item.files, max_row_bytes=item.max_row_bytes),
                limits=limits_of(recipe.reward if isinstance(recipe, Topology) else RewardConfig()),
                timeout_s=item.timeout_s,
            )
    return None


class SourceProcess:
    """A class or a function as data source, in a process of its own. The process is started by the first draw.

    After an error the process is killed; a further draw starts another one from the state that it is given.
    """

    def __init__(self, settings: SourceSettings, *, max_tries: int = MAX_TRIES) -> None:
        self._settings, self._max_tries = settings, max_tries
        self._process: subprocess.Popen[bytes] | None = None
        self._at: SavedState | None = None  # the state after the newest draw of the process
        self._has_drawn = False
        self.gets_outcomes = False  # whether the class has a method `told`; known after the start

    def __enter__(self) -> "SourceProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start the process, unless it runs.

        Raises:
            DataError: the class cannot be used, or the process does not start.
        """
        try:
            self._start()
        except _DiedError as error:
            self.kill()
            raise DataError(f"{self._settings.value}: loading it: {error}") from None

    def _start(self) -> None:
        if self._process is not None:
            return
        pipe, given = subprocess.PIPE, self._settings
        words = command(kind_of(given.key), given.key, given.value, given.limits)
        self._process = process = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, stderr=pipe, env=environment(given.limits.env), start_new_session=True
        )
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        self._has_drawn = False
        problem = self._asked(b"", START_TIMEOUT_S, LOADING).decode()
        ready = Ready(error=problem) if problem else self._ask(given.hello, Ready, START_TIMEOUT_S, LOADING)
        if ready.error:
            self.kill()
            raise DataError(ready.error)
        self.gets_outcomes = ready.gets_outcomes

    def draw(
        self, first: int, count: int, outcomes: Sequence[GroupOutcome] = (), *, state: SavedState | None = None
    ) -> Drawn:
        """Give the class outcomes, then draw `count` rows. A process that dies is replaced, up to `max_tries` in all.

        Args:
            first: number of the first row.
            count: number of rows.
            outcomes: outcomes that it did not have at `state`.
            state: where to go on from; None: the beginning. The process restores it, unless it is there already.

        Raises:
            DataError: the class raised, hangs or returned what cannot be used, or its process died again and again.
        """
        name = self._settings.value
        for tries in range(1, self._max_tries + 1):
            try:
                self._start()
                restart = not self._has_drawn or state is not self._at
                request = Draw(
                    first=first,
                    count=count,
                    outcomes=tuple(outcomes),
                    restart=restart,
                    state=state if restart else None,
                )
                drawn = self._ask(
                    request, Drawn, self._settings.timeout_s, f"drawing rows {first} to {first + count - 1}"
                )
                break
            except _DiedError as error:
                self.kill()
                if tries == self._max_tries:
                    raise DataError(
                        f"{name}: drawing row {first}: {error}, {count_of(self._max_tries, 'time')}"
                    ) from None
                log.warning("source_process_died", source=name, reason=str(error))
        else:
            raise AssertionError("the loop breaks or raises")
        if drawn.error or drawn.state is None or len(drawn.rows) != count:
            self.kill()
            where = name if self._settings.is_function and drawn.error else f"{name}: "
            raise DataError(f"{where}{drawn.error or 'its process gave an answer that cannot be used'}", drawn.trace)
        self._at, self._has_drawn = drawn.state, True
        return drawn

    def kill(self) -> None:
        """Kill the process and its process group."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_TIMEOUT_S)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    @property
    def pid(self) -> int | None:
        """Process id; None while no process runs."""
        return None if self._process is None else self._process.pid

    def _ask(self, request: msgspec.Struct, answer: type[StructT], timeout_s: float, what: str) -> StructT:
        """Send a request and return its answer.

        Raises:
            DataError: no answer in time, or one that cannot be decoded; the process is killed.
            _DiedError: the process ended.
        """
        content = self._asked(framed(msgspec.msgpack.encode(request)), timeout_s, what)
        try:
            return msgspec.msgpack.decode(content, type=answer)
        except msgspec.MsgspecError as error:
            raise self._wrote(what, error) from None

    def _asked(self, frame: bytes, timeout_s: float, what: str) -> bytes:
        """Send a frame, if it is not empty, and return the content of the answer. Raises as `_ask` does."""
        assert self._process is not None
        try:
            return _exchange(self._process, frame, time.monotonic() + timeout_s)
        except TimeoutError:
            self.kill()
            key = self._settings.key.rpartition(".")[0]
            limit = "" if what == LOADING else f" ({key}.timeout_s)"
            message = f"{self._settings.value}: {what} took longer than {timeout_s:g} s{limit}"
            raise DataError(message) from None
        except ValueError as error:
            raise self._wrote(what, error) from None

    def _wrote(self, what: str, error: Exception) -> DataError:
        """Kill the process, and return the error of an answer that is none."""
        self.kill()
        return DataError(f"{self._settings.value}: {what}: it wrote to the pipe of its process: {error}")


def _exchange(process: subprocess.Popen[bytes], frame: bytes, deadline: float) -> bytes:
    """Write a frame, read the answering frame, and forward what the class prints."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    to_write, received, printed = memoryview(frame), bytearray(), 0
    with selectors.DefaultSelector() as ready:
        if frame:
            ready.register(process.stdin, selectors.EVENT_WRITE)
        ready.register(process.stdout, selectors.EVENT_READ)
        ready.register(process.stderr, selectors.EVENT_READ)
        while not _is_complete(received):
            left_s = deadline - time.monotonic()
            found = ready.select(left_s if left_s > 0 else REST_S if received else 0)
            if left_s <= 0 and not any(key.fileobj is process.stdout for key, _ in found):
                raise TimeoutError  # an answer that is ready counts: this process may have been stopped meanwhile
            for key, _ in found:
                if key.fileobj is process.stdin:
                    to_write = to_write[_written(key.fd, to_write) :]
                    if not to_write:
                        ready.unregister(process.stdin)
                    continue
                data = _available(key.fd)
                if not data:
                    ready.unregister(key.fileobj)
                if key.fileobj is process.stderr:
                    printed = forward(data, printed)
                elif data:
                    received += data
                else:
                    raise _DiedError(_ending(process))
    if not received[0]:
        raise ValueError(received[HEAD_BYTES:].decode(errors="replace"))
    return bytes(received[HEAD_BYTES:])


def _is_complete(received: bytearray) -> bool:
    if len(received) < HEAD_BYTES:
        return False
    end = HEAD_BYTES + int.from_bytes(received[1:HEAD_BYTES], "big")
    if received[0] > 1 or end > MAX_ANSWER_BYTES or len(received) > end:
        raise ValueError(f"an answer of {end} bytes")
    return len(received) == end


def _written(fd: int, content: memoryview) -> int:
    try:
        return os.write(fd, content[: 1 << 16])
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(content)  # reading finds the end of the process


def _available(fd: int) -> bytes:
    return os.read(fd, 1 << 20)


def _ending(process: subprocess.Popen[bytes]) -> str:
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_TIMEOUT_S)
    return how_ended(process.returncode)


class Tried(NamedTuple):
    """What a trial of a class found."""

    rows: list[bytes]
    gets_outcomes: bool

    @property
    def note(self) -> str:
        """Whether the class gets outcomes, as a sentence."""
        return "it gets outcomes by told()" if self.gets_outcomes else "it has no method told, so it gets no outcomes"


def drawn_twice(settings: SourceSettings, count: int = 100, doing: Callable[[int], object] = lambda _: None) -> Tried:
    """Draw rows twice, the second time with a kill half way, and return them.

    Outcomes with rewards from 0 to 1 are given in between, some of them dropped or failed.

    Raises:
        DataError: the class cannot be used, or its rows differ the second time.
    """
    runs, gets_outcomes = list[list[bytes]](), False
    for kills in (False, True):
        state, rows, outcomes = None, list[bytes](), tuple[GroupOutcome, ...]()
        with SourceProcess(settings) as source:
            for first in range(0, count, TRIED_AT_A_TIME):
                doing(first)
                if kills and first == count // 2 // TRIED_AT_A_TIME * TRIED_AT_A_TIME:
                    source.kill()
                drawn = source.draw(first, TRIED_AT_A_TIME, outcomes, state=state)
                state, rows = drawn.state, [*rows, *drawn.rows]
                outcomes = tuple(_tried_outcome(number) for number in range(first, first + TRIED_AT_A_TIME))
            gets_outcomes = source.gets_outcomes
        runs.append(rows)
    for number, (one, other) in enumerate(zip(*runs, strict=True)):
        if one != other:
            raise DataError(
                f"{settings.value}: row {number} differs between two runs ({_shown(one)} and {_shown(other)}). "
                f"The second one was killed at row {count // 2} and went on from its state: rows must follow from "
                "state and outcomes alone"
            )
    return Tried(runs[0], gets_outcomes)


def _tried_outcome(number: int) -> GroupOutcome:
    if number % 7 == 6:
        return GroupOutcome(number=number, kind="dropped", rewards=(1.0, 1.0), reason="zero_std")
    if number % 11 == 10:
        return GroupOutcome(number=number, kind="failed", reason="timeout")
    return GroupOutcome(number=number, kind="kept", rewards=(float(number % 2), 0.5, 1.0))


def _shown(row: bytes) -> str:
    text = row.decode()
    return text if len(text) <= 80 else f"{text[:80]}…"
