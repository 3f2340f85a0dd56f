"""Show a run, live or after its end: as a page in a browser, or where the time of its steps went."""

import argparse
import sys
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
    from actors.observer.page import Address
    from runtime.node.reopen import FoundRun

PROGRESS_EVERY = 50_000  # events
EPILOG = """While a node daemon runs the run, the command reads its log as a viewer, with a credential of its own named
observer. Otherwise it reads a copy of the stored events. It writes no event, and the run does not notice it.

exit codes: 0 printed; 1 the log cannot be read; 2 the run does not exist; 130 stopped by Ctrl-C"""


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
    what = parser.add_mutually_exclusive_group(required=True)
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
    try:
        with silenced():
            if address is not None:
                return anyio.run(unless_stopped, lambda: _serve(found, address))
            return anyio.run(unless_stopped, lambda: _print_times(found, as_json=args.json))
    except* (NoLog, BusError, ClientsUnreadable, OSError, ValueError) as errors:
        problems = flatten(errors)
    Screen(sys.stderr).show(str(problems[0]))
    return EXIT_FAILED


async def _serve(found: "FoundRun", place: "Address") -> int:
    import anyio

    from actors.observer.page import Page, follow, new_token, observed_of, served
    from runtime.node.display import page_lines

    screen, token = Screen(sys.stdout), new_token()
    observed, settings = observed_of(found)
    page = Page(observed, token, settings)

    def progress(text: str) -> None:
        if screen.can_rewrite:
            screen.rewrite(text)

    async with served(page, place) as port, anyio.create_task_group() as tasks:
        for line in page_lines(f"{place.url(port)}/?token={token}"):
            screen.show(line)
        screen.show("Ctrl-C ends the page; the run goes on")
        sys.stdout.flush()
        tasks.start_soon(follow, found, observed, page, progress, Screen(sys.stderr).show)
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
