"""Show a run, live or after its end: in the terminal, as a page in a browser, or where the time of its steps went."""

import argparse
import sys
from collections import deque
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from bin.interrupt import handle_ctrl_c

    handle_ctrl_c()

from bin.entry import Screen, WrongInput, ended, parser_of, run, unless_stopped
from runtime.util.exit_codes import EXIT_FAILED, EXIT_INPUT_ERROR, EXIT_OK
from runtime.util.formatting import printable_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from actors.observer.page import Address
    from runtime.node.reopen import FoundRun

PROGRESS_EVERY = 50_000  # events
SCALE_STEPS = 20  # newest steps whose times scale the bars of lines
EPILOG = """Without an option, a terminal shows a view with keys: 1 to 5 choose what it shows, arrows and Enter open a
process or a group, g a group by its id, h halts the running round after a question, q ends the view. A terminal that
cannot show it gets what --plain prints, and a pipe gets the lines alone. Both end with the run.

While a node daemon runs the run, the command reads its log as a viewer, with a credential of its own named
observer. Otherwise it reads a copy of the stored events. It writes no event, and the run does not notice it. The one
exception is h, which calls the run with the login of its nodes, as bin/halt does.

exit codes: 0 shown or printed; 1 the log cannot be read; 2 the run does not exist; 130 stopped by Ctrl-C"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.json and not args.time:
        parser.error("--json goes with --time")
    return ended(lambda: _watch(args))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("watch", __doc__, EPILOG)
    parser.add_argument("run", metavar="RUN", help="Name of a run under ./runs, or a run directory.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--plain", action="store_true", help="Print lines and a bar per step instead of the view with keys."
    )
    what.add_argument(
        "--time",
        action="store_true",
        help="Print the time of all steps so far by part, each with its worst step, and advice.",
    )
    what.add_argument(
        "--page",
        metavar="ADDRESS",
        nargs="?",
        const="127.0.0.1:0",
        help="Serve a page with curves, states, times, advice, samples and the ledger, until Ctrl-C. ADDRESS is a "
        "loopback address and a port; by default 127.0.0.1:0, any free port.",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="With --time: print one JSON object, with the parts of each step and the advice.",
    )
    return parser


def _watch(args: argparse.Namespace) -> int:
    import anyio  # this and the imports below bring in the bus, which --help does not need

    from actors.observer.page import Address
    from runtime.bus.errors import BusError
    from runtime.node.external_clients import ClientsUnreadable
    from runtime.node.reopen import NoLog, NoSuchRun, find_run
    from runtime.process.logs import silenced
    from runtime.process.main import spare_the_collector
    from runtime.util.errors import flatten

    try:
        found = find_run(args.run)
    except NoSuchRun as error:
        Screen(sys.stderr).show(str(error))
        return EXIT_INPUT_ERROR
    try:
        address = None if args.page is None else Address.of(args.page)
    except ValueError as error:
        raise WrongInput(f"--page {error}") from None
    problems: list[BaseException] = []
    spare_the_collector()
    try:
        with silenced():
            if address is not None:
                return anyio.run(unless_stopped, lambda: _serve(found, address))
            if not args.time:
                return anyio.run(unless_stopped, _shown_in_terminal(found, plain=args.plain))
            return anyio.run(unless_stopped, lambda: _print_times(found, as_json=args.json))
    except* (NoLog, BusError, ClientsUnreadable, OSError, ValueError) as errors:
        problems = flatten(errors)
    Screen(sys.stderr).show(str(problems[0]))
    return EXIT_FAILED


async def _serve(found: "FoundRun", place: "Address") -> int:
    import anyio

    from actors.observer.page import Page, follow, new_token, observed_of, served, stored_samples
    from runtime.node.display import page_lines
    from runtime.node.versions import versions_in

    screen, token = Screen(sys.stdout), new_token()
    observed, settings = observed_of(found)
    stored = stored_samples(found, settings)
    page = Page(observed, token, settings, stored, partial(versions_in, found.directory))

    def progress(text: str) -> None:
        if screen.can_rewrite:
            screen.rewrite(text)

    async with served(page, place) as port, anyio.create_task_group() as tasks:
        for line in page_lines(f"{place.url(port)}/?token={token}"):
            screen.show(line)
        screen.show("Ctrl-C ends the page; the run goes on")
        sys.stdout.flush()
        tasks.start_soon(follow, found, observed, page, progress, Screen(sys.stderr).show, stored)
    return EXIT_OK


def _shown_in_terminal(found: "FoundRun", *, plain: bool) -> "Callable[[], Awaitable[int]]":
    """Return what shows a run here: the view, lines with a bar per step, or lines alone."""
    screen = Screen(sys.stdout)
    has_keys = screen.can_rewrite and sys.stdin.isatty()
    if plain or not has_keys:
        return lambda: _print_lines(found, screen, bars=plain or sys.stdout.isatty())
    if find_spec("textual") is None:
        Screen(sys.stderr).show('the view needs textual: pip install "physarum[watch]". Lines follow')
        return lambda: _print_lines(found, screen, bars=True)
    from actors.observer.terminal import view

    return lambda: view(found)


async def _print_lines(found: "FoundRun", screen: Screen, *, bars: bool) -> int:
    """Print the lines of a run from its first event on, until it ends or no daemon runs it."""
    from actors.observer.page import observed_of
    from runtime.node.following import followed
    from runtime.report.breakdown import Breakdown
    from runtime.report.report import Line, Report
    from runtime.report.terminal import legend, scale_of, step_line

    report, breakdown = Report(found.name, observed_of(found)[0].num_steps), Breakdown()
    recent_s = deque[float](maxlen=SCALE_STEPS)
    if bars:
        screen.show_all(legend(screen.columns))
    async with followed(found, ends=True) as events:
        async for batch in events.batches():
            for received in batch:
                time = received.unix_time
                report.started = report.started or time
                for notice in report.apply(received.message, received.seq, time):
                    if isinstance(notice, Line):
                        screen.show(notice.text)
                step = breakdown.apply(received.message, time)
                if bars and step is not None:
                    recent_s.append(step.end - step.begin)
                    screen.show(step_line(step, screen.columns - 1, scale_of(recent_s)))
            if not screen.is_read:
                return EXIT_OK
        Screen(sys.stderr).show_all(events.problems)
    if report.finished is not None:
        screen.show(f"finished: {report.finished}")
    return EXIT_OK


async def _print_times(found: "FoundRun", *, as_json: bool) -> int:
    import msgspec

    from actors.observer.page import observed_of
    from runtime.node.observing import observing
    from runtime.report.advice import advice_lines

    observed, notes, num_shown = observed_of(found)[0], Screen(sys.stderr), 0
    async with observing(found, observed, note=notes.show, waits=False) as folding:
        async for _ in folding.batches():
            if observed.num_events // PROGRESS_EVERY > num_shown // PROGRESS_EVERY:
                notes.show(f"{observed.num_events:,} events read, up to step {observed.breakdown.num_steps}")
                num_shown = observed.num_events
    notes.show_all(observed.problems)
    if observed.first_seq > 1:
        notes.show(
            f"the log begins at event {observed.first_seq}, and {found.directory} has no archive of earlier events"
        )
    breakdown, advice = observed.breakdown, observed.adviser.advice(observed.breakdown)
    if as_json:
        steps = [msgspec.to_builtins(step) for step in breakdown.steps]
        shown = {"run": found.name, "seconds": breakdown.totals, "stopped_s": breakdown.stopped_s, "steps": steps}
        shown["advice"] = msgspec.to_builtins(advice)
        Screen(sys.stdout).show(printable_json(msgspec.json.encode(shown).decode()))
    else:
        Screen(sys.stdout).show_all([*breakdown.lines(), *advice_lines(advice)])
    return EXIT_OK


if __name__ == "__main__":
    run(main)
