"""Show a run, live or after its end: in the terminal, as a page in a browser, or where the time of its steps went."""

import argparse
import sys
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from bin.entry import Screen, WrongInput, add_run, ended, found_run, parser_of, unless_stopped
from runtime.util.exit_codes import EXIT_FAILED, EXIT_OK
from runtime.util.formatting import printable_json
from runtime.util.import_path import command_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from actors.observer.access import Address
    from runtime.node.reopen import FoundRun

PROGRESS_EVERY = 50_000  # events
EPILOG = f"""Without an option, a terminal shows a view with keys: 1 to 5 choose what it shows, arrows and Enter open a
process or a group, g a group by its id, h halts the running round after a question, q ends the view. A terminal that
cannot show it gets what --plain prints, and a pipe gets the lines alone. Both end with the run.

While a node daemon runs the run, the command reads its log as a viewer, with a credential of its own named
observer. Otherwise it reads a copy of the stored events. It writes no event, and the run does not notice it. The one
exception is h, which calls the run with the login of its nodes, as {command_name("halt")} does.

exit codes: 0 shown or printed; 1 the log cannot be read, or no page shows the run; 2 the run does not exist; 130
stopped by Ctrl-C"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.json and not args.time:
        parser.error("--json goes with --time")
    return ended(lambda: _watch(args))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("watch", __doc__, EPILOG)
    add_run(parser)
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
    what.add_argument(
        "--url",
        action="store_true",
        help="Print the URL, with its secret, of each page that shows the run now: that of observe.page, and those of "
        "--page.",
    )
    what.add_argument(
        "--renew-url",
        action="store_true",
        help="Give each of these pages a new secret, and print its new URL. The old ones are refused from then on.",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="With --time: print one JSON object, with the parts of each step and the advice.",
    )
    return parser


def _watch(args: argparse.Namespace) -> int:
    import anyio  # this and the imports below bring in the bus, which --help does not need

    from actors.observer.access import Address
    from runtime.bus.errors import BusError
    from runtime.node.external_clients import ClientsUnreadable
    from runtime.node.reopen import NoLog
    from runtime.process.logs import silenced
    from runtime.process.main import spare_the_collector
    from runtime.util.errors import flatten

    found = found_run(args.run, trust=args.trust)
    if args.url or args.renew_url:
        return _print_urls(found, renews=args.renew_url)
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
    from actors.observer.page import Page, dump_directory, follow, observed_of, served
    from runtime.node.page_url import page_lines, url_of_watch
    from runtime.node.versions import versions_in

    screen, url = Screen(sys.stdout), url_of_watch(found)
    observed, settings = observed_of(found)
    dumps = dump_directory(found, settings)
    page = Page(observed, url.secret, settings, dumps, partial(versions_in, found.directory))

    def progress(text: str) -> None:
        if screen.can_rewrite:
            screen.rewrite(text)

    async with served(page, place) as port:
        shown = url.write(place.url(port))
        try:
            lines = page_lines(shown, found.name, found.directory, shows_secret=sys.stdout.isatty())
            screen.show_all([*lines, "Ctrl-C ends the page; the run goes on"])
            await follow(found, observed, page, progress, Screen(sys.stderr).show)
        finally:
            url.remove()
    return EXIT_OK


def _print_urls(found: "FoundRun", *, renews: bool) -> int:
    from runtime.node.page_url import renew, url_in, urls_of

    files, screen = urls_of(found), Screen(sys.stderr)
    if not files:
        screen.show(
            f"no page shows {found.name} now: {command_name('watch')} {found.name} --page serves one, and a run with "
            "observe.page does while it goes on"
        )
        return EXIT_FAILED
    try:
        Screen(sys.stdout).show_all([renew(path) if renews else url_in(path) for path in files])
    except (OSError, ValueError) as error:
        screen.show(str(error))
        return EXIT_FAILED
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
    from actors.observer.following import followed
    from actors.observer.page import observed_of
    from actors.observer.terminal_lines import legend, reading_line, scale_of, step_line
    from runtime.report.report import Line, Report

    report = Report(found.name, observed_of(found)[0].num_steps)
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
                if bars and (step := report.account.step) is not None:
                    scale_s = scale_of(report.account.recent_s or [step.seconds])
                    screen.show(step_line(step, screen.columns - 1, scale_s))
            if not screen.is_read:
                return EXIT_OK
            share = events.share_read(batch[-1].seq)
            if screen.can_rewrite and share is not None:  # the next line takes its place
                screen.rewrite(reading_line(share))
        Screen(sys.stderr).show_all(events.problems)
    if report.finished is not None:
        screen.show(f"finished: {report.finished}")
    return EXIT_OK


async def _print_times(found: "FoundRun", *, as_json: bool) -> int:
    import msgspec

    from actors.observer.advice import advice_lines
    from actors.observer.observing import observing
    from actors.observer.page import observed_of
    from actors.observer.terminal_lines import reading_line
    from runtime.report.times import time_lines

    observed, notes, num_shown = observed_of(found)[0], Screen(sys.stderr), 0
    async with observing(found, observed, note=notes.show, waits=False) as folding:
        async for _ in folding.batches():
            if observed.num_events // PROGRESS_EVERY > num_shown // PROGRESS_EVERY:
                share = folding.share_read
                read = "the log is read" if share is None else reading_line(share)
                notes.show(f"{read}: {observed.num_events:,} events, up to step {observed.account.num_steps}")
                num_shown = observed.num_events
    notes.show_all(observed.problems)
    if observed.first_seq > 1:
        notes.show(
            f"the log begins at event {observed.first_seq}, and {found.directory} has no archive of earlier events"
        )
    account, advice = observed.account, observed.adviser.advice(observed.account)
    if as_json:
        steps = [msgspec.to_builtins(step) for step in account.steps]
        shown = {"run": found.name, "seconds": account.totals, "stopped_s": account.stopped_s, "steps": steps}
        shown["advice"] = msgspec.to_builtins(advice)
        Screen(sys.stdout).show(printable_json(msgspec.json.encode(shown).decode()))
    else:
        Screen(sys.stdout).show_all([*time_lines(account), *advice_lines(advice)])
    return EXIT_OK
