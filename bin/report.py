"""Write one HTML file about a run, live or after its end: curves, states, times, advice, ledger and settings."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from bin.interrupt import handle_ctrl_c

    handle_ctrl_c()

from bin.entry import Screen, ended, parser_of, run
from runtime.util.exit_codes import EXIT_FAILED, EXIT_INPUT_ERROR, EXIT_OK

if TYPE_CHECKING:
    from runtime.node.reopen import FoundRun
    from runtime.report.observed import Observed
    from runtime.report.trace import Trace

EPILOG = """The file needs no network and no other file. It has what bin/watch --page shows, as of the newest event.
With --trace the command also writes spans of groups, steps and weight updates, for https://ui.perfetto.dev.

exit codes: 0 written; 1 the log cannot be read or a file cannot be written; 2 the run does not exist"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    return ended(lambda: _report(args))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("report", __doc__, EPILOG)
    parser.add_argument("run", metavar="RUN", help="Name of a run under ./runs, or a run directory.")
    parser.add_argument("--out", metavar="FILE", type=Path, help="The file to write; by default RUN.html.")
    parser.add_argument("--compare", metavar="RUN2", help="Also show curves, times and differing settings of this run.")
    parser.add_argument("--trace", metavar="FILE", type=Path, help="Also write a trace in the JSON format of Perfetto.")
    return parser


def _report(args: argparse.Namespace) -> int:
    import anyio  # this and the imports below bring in the bus, which --help does not need

    from runtime.bus.errors import BusError
    from runtime.node.external_clients import ClientsUnreadable
    from runtime.node.reopen import NoLog, NoSuchRun, find_run
    from runtime.process.logs import silenced
    from runtime.util.errors import flatten

    try:
        found = find_run(args.run)
        other = find_run(args.compare) if args.compare is not None else None
    except NoSuchRun as error:
        Screen(sys.stderr).show(str(error))
        return EXIT_INPUT_ERROR
    problems: list[BaseException] = []
    try:
        with silenced():
            anyio.run(_write, found, other, args.out or Path(f"{found.name}.html"), args.trace)
    except* (NoLog, BusError, ClientsUnreadable, OSError, ValueError) as errors:
        problems = flatten(errors)
    if problems:
        Screen(sys.stderr).show(str(problems[0]))
    return EXIT_FAILED if problems else EXIT_OK


async def _write(found: "FoundRun", other: "FoundRun | None", out: Path, trace_file: Path | None) -> None:
    from actors.observer.page import report_page
    from runtime.report.trace import Trace
    from runtime.util.files import write_atomically

    trace = Trace()
    observed, settings, live = await _fold(found, trace if trace_file is not None else None)
    compared = None if other is None else (await _fold(other))[:2]
    screen = Screen(sys.stdout)
    write_atomically(out, report_page(observed, settings, live=live, other=compared))
    screen.show(f"report    {out}, {observed.num_events:,} events, {observed.steps} steps")
    if trace_file is not None:
        write_atomically(trace_file, trace.encoded())
        left_out = f"; {trace.num_left_out:,} oldest ones are left out" if trace.num_left_out else ""
        screen.show(f"trace     {trace_file}, {len(trace.events):,} spans{left_out}")


async def _fold(found: "FoundRun", trace: "Trace | None" = None) -> "tuple[Observed, dict[str, str], bool]":
    """Fold a run as of now; return also its settings, and whether it goes on."""
    from actors.observer.page import observed_of
    from runtime.node.observing import observing

    observed, settings = observed_of(found)
    notes = Screen(sys.stderr)
    async with observing(found, observed, note=notes.show, waits=False, restores=trace is None) as folding:
        live = folding.events.live
        async for batch in folding.batches():
            if trace is not None:
                for received in batch:
                    trace.apply(received.message, received.unix_time)
    notes.show_all(observed.problems)
    return observed, settings, live


if __name__ == "__main__":
    run(main)
