"""Runs a user's data source in a process that can be killed. Blocks: for a thread."""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Final, NamedTuple, TypeVar

import msgspec
import structlog
from anyio.from_thread import BlockingPortal, start_blocking_portal

from actors.buffer.prompts.source_worker import Draw, Drawn, Hello, Ready, SavedState, kind_of
from runtime.data.data_files import DataError
from runtime.functions.child import BrokenAnswer, Child, UserFunctionError, UserProcessError
from runtime.functions.limits import UserLimits
from runtime.functions.table import SOURCE
from runtime.ledger.state import GroupOutcome
from runtime.settings.derived import limits_of
from runtime.settings.recipe import Recipe
from runtime.settings.tables.reward import RewardConfig
from runtime.settings.topology import Topology
from runtime.util.formatting import count_of

START_TIMEOUT_S: Final = 60.0  # to import the user's module and read the files
TRIED_AT_A_TIME: Final = 10  # rows of a draw of a trial
MAX_TRIES: Final = 3  # processes that may die in one draw
MAX_ANSWER_BYTES: Final = 1 << 30
LOADING: Final = "loading it"

log = structlog.get_logger()
StructT = TypeVar("StructT", bound=msgspec.Struct)


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
        self._opened = ExitStack()  # the process, and the event loop of its handle
        self._process: tuple[BlockingPortal, Child] | None = None
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
        except UserProcessError as error:
            self.kill()
            raise DataError(f"{self._settings.value}: {LOADING}: {error}") from None

    def _start(self) -> None:
        if self._process is not None:
            return
        given = self._settings
        start = partial(
            Child.open,
            (kind_of(given.key).answering, given.key, given.value),
            given.limits,
            hello=msgspec.msgpack.encode(given.hello),
            timeout_s=START_TIMEOUT_S,
            max_bytes=MAX_ANSWER_BYTES,
        )
        with self._in_time(LOADING, START_TIMEOUT_S):
            portal = self._opened.enter_context(start_blocking_portal())
            child = portal.call(start)
            self._opened.callback(portal.call, child.kill)
            self.gets_outcomes = msgspec.msgpack.decode(child.greeting, type=Ready).gets_outcomes
        self._process, self._has_drawn = (portal, child), False

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
            except UserProcessError as error:
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
        self._process = None
        self._opened.close()

    @property
    def pid(self) -> int | None:
        """Process id; None while no process runs."""
        return None if self._process is None else self._process[1].pid

    def _ask(self, request: msgspec.Struct, answer: type[StructT], timeout_s: float, what: str) -> StructT:
        """Send a request and return its answer.

        Raises:
            DataError: no answer in time, or one that cannot be decoded; the process is killed.
            UserProcessError: the process ended.
        """
        assert self._process is not None
        portal, child = self._process
        with self._in_time(what, timeout_s):
            content = portal.call(child.exchange, msgspec.msgpack.encode(request), timeout_s)
            try:
                return msgspec.msgpack.decode(content, type=answer)
            except ValueError as error:
                raise child.broken(error) from None

    @contextmanager
    def _in_time(self, what: str, timeout_s: float) -> Generator[None]:
        """Kill the process and raise DataError if it does not answer in time, or answers with what is no answer."""
        try:
            yield
            return
        except TimeoutError:
            limit = "" if what == LOADING else f" ({self._settings.key.rpartition('.')[0]}.timeout_s)"
            problem = f"{self._settings.value}: {what} took longer than {timeout_s:g} s{limit}"
        except (BrokenAnswer, UserFunctionError) as error:
            problem = f"{self._settings.value}: {what}: {error}"
        except ValueError as error:  # the class or the function cannot be used
            problem = str(error)
        self.kill()
        raise DataError(problem)


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
