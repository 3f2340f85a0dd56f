"""The view of a run in a terminal: what it does now, curves, a bar per step, groups, and lines of its log.

It reads as a viewer does. Its one other call is the halt of a round, after a question, with the login of the run's
nodes. All texts of a run are shown as they are: markup and control characters in them mean nothing.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import anyio.to_thread
import msgspec
from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.coordinate import Coordinate
from textual.css.query import NoMatches
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Input, Static, TabbedContent, TabPane

from actors.observer import terminal_lines as text
from actors.observer.advice import advice_lines
from actors.observer.following import followed
from actors.observer.observed import Observed
from actors.observer.page import follow, observed_of
from runtime.bus.errors import BusError
from runtime.ledger.group_life import GroupLife
from runtime.node.external_clients import ClientsUnreadable
from runtime.node.halting import NotHalted, halt_round, halted_line, may_halt
from runtime.node.reopen import FoundRun, NoLog
from runtime.util.errors import flatten
from runtime.util.exit_codes import EXIT_INTERRUPTED, EXIT_OK
from runtime.util.formatting import printable, printable_json
from runtime.util.import_path import command_name

REFRESH_S: Final = 0.5
SHOWN_STEPS: Final = 200
NOTE_S: Final = 10.0
LOG_LINES: Final = 200
LOG_BYTES: Final = 256 * 1024  # at the end of a file
LIFE_EVENTS: Final = 500  # of one group
MARGIN: Final = 4  # columns of borders and the scroll bar
LOGS: Final = "logs"  # in the run directory
HALT_QUESTION: Final = (
    "Halt the round that is generated now?",
    "",
    "Its requests end. Its groups keep what they have, and go on for the same batch.",
    "The run goes on, and nothing is lost.",
    "",
    "y  halt it      n, Escape  do not",
)

Rows = Sequence[tuple[str, Sequence[str]]]


def shown(lines: Sequence[str]) -> Text:
    """Return lines as a text without markup."""
    return Text("\n".join(printable(line) for line in lines), no_wrap=False, overflow="fold")


class Lines(ModalScreen[None]):
    """Lines about one thing, until Escape."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q", "dismiss", "Back")]

    def __init__(self, title: str, lines: Sequence[str], later: Callable[[], Awaitable[Sequence[str]]]) -> None:
        super().__init__()
        self._title, self._lines, self._later = title, lines, later

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="box"):
            yield Static(shown([self._title, "", *self._lines, "", "reading ..."]), id="lines")
        yield Footer()

    async def on_mount(self) -> None:
        self.query_one("#box").focus()
        self.run_worker(self._read(), exit_on_error=False)

    async def _read(self) -> None:
        lines = await self._later()
        self.query_one("#lines", Static).update(shown([self._title, "", *self._lines, "", *lines]))


class Question(ModalScreen[bool]):
    """Asks before a round is halted."""

    BINDINGS: ClassVar[list[BindingType]] = [("y", "answer(True)", "Halt"), ("n,escape", "answer(False)", "Back")]

    def compose(self) -> ComposeResult:
        yield Static(shown(HALT_QUESTION), id="question")

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)


class GroupInput(ModalScreen[str | None]):
    """Asks for the id of a group."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "dismiss(None)", "Back")]

    def compose(self) -> ComposeResult:
        yield Input(placeholder="id of a prompt group, then Enter", type="integer", id="group")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)


TABS: Final = ("now", "curves", "steps", "groups", "log")


class RunView(App[int]):
    """The view. `run_async` returns the exit code of the command."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "Physarum"
    CSS = """
    #head { height: 1; text-style: bold; }
    #head, #about, #groups-bar, .lines { padding: 0 1; }
    #about { height: auto; max-height: 6; }
    #groups-bar { height: auto; margin-bottom: 1; }
    Screen { overflow: hidden; }
    TabbedContent { height: 1fr; }
    DataTable { height: 1fr; }
    Lines, Question, GroupInput { align: center middle; }
    #box { width: 96%; height: 90%; border: solid; padding: 0 1; background: $surface; }
    #question { width: 76; height: auto; border: solid; padding: 1 2; background: $surface; }
    #group { width: 50; }
    DataTable:nocolor > .datatable--cursor { text-style: reverse; }
    Tab.-active:nocolor { text-style: bold underline; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(key), f"show('{tab}')", show=False) for key, tab in enumerate(TABS, 1)),
        Binding("g", "open_group", "Open a group"),
        Binding("h", "halt", "Halt the round"),
        Binding("q", "quit_view", "Quit"),
        Binding("ctrl+c", "interrupt", "Interrupt", show=False, priority=True),
    ]

    def __init__(self, found: FoundRun, observed: Observed | None = None) -> None:
        """Begin with nothing.

        Args:
            found: the run.
            observed: a fold to show; it is not followed. None: the run is.
        """
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)  # else it is shown in greys
        self.live = False
        self.problem = ""
        self.share_read: float | None = None
        self._found = found
        self._follows = observed is None
        self._observed = observed_of(found)[0] if observed is None else observed
        self._is_stale = True
        self._may_halt = may_halt(found)

    def changed(self) -> None:
        """Have the view drawn again."""
        self._is_stale = True

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        with TabbedContent(initial="now"):
            with TabPane("1 Now", id="now"):
                yield Static(id="about")
                yield Static(id="groups-bar")
                yield DataTable[Text](id="processes", cursor_type="row")
            with TabPane("2 Curves", id="curves"), VerticalScroll():
                yield Static(classes="lines", id="curve-lines")
            with TabPane("3 Steps", id="steps"), VerticalScroll():
                yield Static(classes="lines", id="step-lines")
            with TabPane("4 Groups", id="groups"):
                yield DataTable[Text](id="group-table", cursor_type="row")
            with TabPane("5 Log", id="log"), VerticalScroll():
                yield Static(classes="lines", id="log-lines")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        _table(self.screen, "processes").add_columns(*text.PROCESS_COLUMNS)
        _table(self.screen, "group-table").add_columns(*text.GROUP_COLUMNS)
        if self._follows:
            self.run_worker(self._follow(), exit_on_error=True)
        if not self.is_headless:
            asyncio.get_running_loop().add_signal_handler(signal.SIGCONT, self._resume)
        self.set_interval(REFRESH_S, self._draw_if_changed)
        self._draw()
        self.query_one("#processes").focus()

    def _resume(self) -> None:
        """Set up the terminal again after a stop: a shell may have changed it meanwhile.

        textual's own handler expects that Ctrl-Z stopped the process. After a SIGSTOP it would read the terminal with a
        second thread beside the first, for which the process would then wait at its end.
        """
        with self.suspend():
            pass

    async def _follow(self) -> None:
        await follow(self._found, self._observed, self, lambda _: None, self._note)

    def _note(self, line: str) -> None:
        self.notify(printable(line), markup=False, timeout=NOTE_S)

    def on_resize(self) -> None:
        """Draw for the new size, after the widgets have theirs."""
        self.call_after_refresh(self._draw)

    def on_tabbed_content_tab_activated(self) -> None:
        """Draw what the tab shows."""
        self._draw()

    def _draw_if_changed(self) -> None:
        if self._is_stale:
            self._draw()

    def _draw(self) -> None:
        self._is_stale = False
        now, main = self._observed.now(), self.screen_stack[0]
        head = text.head_line(now, live=self.live, problem=self.problem, share_read=self.share_read)
        with suppress(NoMatches):  # the view begins or closes, and some widgets are not there
            main.query_one("#head", Static).update(shown([head]))
            self._draw_tab(main, now, main.query_one(TabbedContent).active)

    def _draw_tab(self, main: Screen[Any], now: dict[str, Any], tab: str) -> None:
        observed, width = self._observed, max(20, self.size.width - MARGIN)
        match tab:
            case "now" | "groups" if self.share_read is not None:  # the states so far are those of the past
                self._draw_reading(main, self.share_read)
            case "now":
                self._draw_now(main, now, width)
            case "curves":
                main.query_one("#curve-lines", Static).update(shown(text.curve_lines(observed.curves(), width)))
            case "steps":
                main.query_one("#step-lines", Static).update(shown(self._step_lines(width)))
            case "groups":
                _fill(_table(main, "group-table"), text.group_rows(observed.ledger()))
            case _:
                lines = [f"{text.clock(at)}  {line}" for at, line in reversed(now["lines"])]
                main.query_one("#log-lines", Static).update(shown(lines or ["no line yet"]))

    def _draw_reading(self, main: Screen[Any], share: float) -> None:
        main.query_one("#about", Static).update(shown([text.reading_line(share)]))
        main.query_one("#groups-bar", Static).update("")
        for table in ("processes", "group-table"):
            _fill(_table(main, table), [])

    def _draw_now(self, main: Screen[Any], now: dict[str, Any], width: int) -> None:
        self._is_stale |= self.live  # states last longer without an event
        about = [text.progress_bar(self._observed, width), *text.wait_lines(now, live=self.live)]
        main.query_one("#about", Static).update(shown([line for line in about if line]))
        bar = text.group_lines(self._observed.ledger()["books"], width)
        main.query_one("#groups-bar", Static).update(shown(bar))
        _fill(_table(main, "processes"), text.process_rows(now, width, self._at, live=self.live))

    def _step_lines(self, width: int) -> list[str]:
        observed = self._observed
        steps = observed.step_times.items[-SHOWN_STEPS:]
        about = [text.worst_line(steps[-1])] if steps else ["no step is trained yet"]
        advice = advice_lines(observed.adviser.advice(observed.account))
        return [*about, *text.legend(width), "", *advice, *text.step_lines(steps, width)]

    @property
    def _at(self) -> float:
        return max(time.time(), self._observed.time) if self.live else self._observed.time

    # keys

    def action_show(self, tab: str) -> None:
        """Show a tab."""
        self.query_one(TabbedContent).active = tab
        focus = {"now": "#processes", "groups": "#group-table"}.get(tab, f"#{tab} VerticalScroll")
        self.query_one(focus).focus()

    def action_quit_view(self) -> None:
        """End the view; the run goes on."""
        self.exit(EXIT_OK)

    def action_interrupt(self) -> None:
        """End the view as Ctrl-C ends every command."""
        self.exit(EXIT_INTERRUPTED)

    @on(DataTable.RowSelected, "#processes")
    def _open_process(self, event: DataTable.RowSelected) -> None:
        key = str(event.row_key.value)
        known = text.detail_lines(self._observed.now(), key, self._at)
        self.push_screen(Lines(key, known, lambda: log_tail(self._found.directory, key)))

    @on(DataTable.RowSelected, "#group-table")
    def _open_row_of_group(self, event: DataTable.RowSelected) -> None:
        self._open_group(int(str(event.row_key.value)))

    def action_open_group(self) -> None:
        """Ask for a group, and open it."""
        self.push_screen(GroupInput(), lambda group: self._open_group(int(group)) if group else None)

    def _open_group(self, group: int) -> None:
        self.push_screen(Lines(f"group {group}", [], lambda: life_lines(self._found, group)))

    def action_halt(self) -> None:
        """Ask whether to halt the running round."""
        if not self._may_halt:
            self._note("only a user with the login of the run's nodes (bus.url in its directory) can halt a round")
            return
        self.push_screen(Question(), self._halt_if)

    def _halt_if(self, answer: bool | None) -> None:
        if answer:
            self._note("halting ...")
            self.run_worker(self._halt())

    async def _halt(self) -> None:
        try:
            self._note(halted_line(await halt_round(self._found)))
        except NotHalted as error:
            self._note(f"not halted: {error}")


def _table(screen: Screen[Any], name: str) -> DataTable[Text]:
    return cast("DataTable[Text]", screen.query_one(f"#{name}"))


def _fill(table: DataTable[Text], rows: Rows) -> None:
    """Show rows in a table. The cursor stays on its row, or near it."""
    known = [str(key.value) for key in table.rows]
    cells = [[Text(printable(cell)) for cell in row] for _, row in rows]
    if known == [key for key, _ in rows]:
        for at, row in enumerate(cells):
            for column, cell in enumerate(row):
                if table.get_cell_at(Coordinate(at, column)) != cell:
                    table.update_cell_at(Coordinate(at, column), cell, update_width=True)
        return
    before = known[table.cursor_row] if 0 <= table.cursor_row < len(known) else ""
    at = next((at for at, (key, _) in enumerate(rows) if key == before), min(table.cursor_row, len(rows) - 1))
    table.clear()
    for (key, _), row in zip(rows, cells, strict=True):
        table.add_row(*row, key=key)
    table.move_cursor(row=max(0, at), animate=False)


async def log_tail(directory: Path, name: str) -> list[str]:
    """Return the newest lines of a process's log."""
    return await anyio.to_thread.run_sync(_log_tail, directory / LOGS, name)


def _log_tail(logs: Path, name: str) -> list[str]:
    path = next((path for path in logs.glob("*.jsonl") if path.stem == name), None)  # the name comes from the log
    if path is None:
        return [f"{logs} has no log of {name}: it runs on another node, or writes none"]
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - LOG_BYTES))
            lines = file.read(LOG_BYTES).decode(errors="replace").splitlines()[-LOG_LINES:]
    except OSError as error:
        return [f"{path}: {error}"]
    return [f"newest lines of {path}:", "", *(_log_line(line) for line in reversed(lines))]


def _log_line(line: str) -> str:
    """Format a line of a log; one that is not a JSON object stays as it is."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
    except (ValueError, RecursionError):
        return line
    begin = [str(fields.pop(key, "")) for key in ("time", "level", "event")]
    return " ".join([*begin, *(f"{key}={value}" for key, value in fields.items())])


async def life_lines(found: FoundRun, group: int) -> list[str]:
    """Return the events of one group so far, one JSON line each."""
    life, lines = GroupLife(group), list[str]()
    try:
        async with followed(found, waits=False) as events:
            async for received in events:
                if (event := life.take(received.message, received.seq)) is not None:
                    told = {"seq": received.seq, "time": received.time, **msgspec.to_builtins(event)}
                    lines.append(printable_json(msgspec.json.encode(told).decode()))
    except* (NoLog, BusError, ClientsUnreadable, OSError) as errors:
        lines.append(f"the log cannot be read: {flatten(errors)[0]}")
    omitted = len(lines) - LIFE_EVENTS
    more = [f"{omitted} earlier events: {command_name('ledger')} {found.name} --group {group}"] if omitted > 0 else []
    return [*more, *lines[-LIFE_EVENTS:]] or [f"the log has no event of group {group}"]


async def view(found: FoundRun) -> int:
    """Show a run until a key ends the view; return the exit code. Cancellation gives the terminal back."""
    code = await RunView(found).run_async()
    return EXIT_OK if code is None else code
