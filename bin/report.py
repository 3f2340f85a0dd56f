"""Write one HTML file about a run, live or ended: curves, times, advice, samples, ledger, settings, versions."""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from bin.entry import Screen, WrongInput, add_run, ended, found_run, parser_of
from runtime.util.exit_codes import EXIT_FAILED, EXIT_OK
from runtime.util.formatting import count_of
from runtime.util.import_path import command_name

if TYPE_CHECKING:
    from actors.observer.observed import Observed
    from actors.observer.observing import Take
    from messages import Message
    from runtime.bus.events import Received
    from runtime.ledger.changes import Change
    from runtime.node.reopen import FoundRun
    from runtime.report.rows import MetricRow

EPILOG = f"""The file needs no network and no other file. It has what {command_name("watch")} --page
shows, as of the newest event.
With --trace the command also writes spans of groups, steps and weight updates, for https://ui.perfetto.dev.
With --parquet it also writes steps, groups, samples, requests, scores and processes, a file each; it needs pyarrow.

exit codes: 0 written; 1 the log cannot be read or a file cannot be written; 2 the run or pyarrow does not exist"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    return ended(lambda: _report(args))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("report", __doc__, EPILOG)
    add_run(parser)
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="The file to write, - for standard output; by default RUN.html."
    )
    parser.add_argument(
        "--compare", metavar="RUN2", help="Also show this run: curves, times, settings and versions that differ."
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="Also write a trace in the JSON format of Perfetto; - for standard output.",
    )
    parser.add_argument(
        "--parquet", metavar="DIR", type=Path, help="Also write the run's tables as Parquet files into this directory."
    )
    return parser


def _report(args: argparse.Namespace) -> int:
    import anyio  # this and the imports below bring in the bus, which --help does not need

    from actors.observer.parquet import ParquetMissing, load_pyarrow
    from runtime.bus.errors import BusError
    from runtime.node.external_clients import ClientsUnreadable
    from runtime.node.reopen import NoLog
    from runtime.process.logs import silenced
    from runtime.process.main import spare_the_collector
    from runtime.util.errors import flatten

    if args.out == args.trace == Path("-"):
        raise WrongInput("--out and --trace cannot both be standard output (-)")
    found = found_run(args.run, trust=args.trust)
    other = None if args.compare is None else found_run(args.compare, trust=args.trust)
    if args.parquet is not None:
        try:
            load_pyarrow()
        except ParquetMissing as error:
            raise WrongInput(f"--parquet: {error}") from None
    problems: list[BaseException] = []
    spare_the_collector()
    try:
        with silenced():
            anyio.run(_write, found, other, args.out or Path(f"{found.name}.html"), args)
    except* (NoLog, BusError, ClientsUnreadable, OSError, ValueError) as errors:
        problems = flatten(errors)
    if problems:
        Screen(sys.stderr).show(str(problems[0]))
    return EXIT_FAILED if problems else EXIT_OK


async def _write(found: "FoundRun", other: "FoundRun | None", out: Path, args: argparse.Namespace) -> None:
    from actors.observer.page import dump_directory, observed_of, report_page
    from actors.observer.parquet import parquet_tables
    from actors.observer.perfetto import Trace
    from actors.observer.tables import HELD_STEPS, Tables
    from runtime.node.versions import versions_in
    from runtime.util.files import STDOUT, write_output

    observed, settings = observed_of(found)
    screen = Screen(sys.stderr if STDOUT in (out, args.trace) else sys.stdout)
    trace, tables = Trace(), Tables(observed)
    with nullcontext() if args.parquet is None else parquet_tables(args.parquet) as files:

        def take(received: "Received[Message]", rows: "list[MetricRow]", changes: "list[Change]") -> None:
            if args.trace is not None:
                trace.add(observed.spans, observed.account.began)
            if files is not None:
                files.add(tables.apply(received.message, received.seq, received.unix_time, rows, changes))

        live = await _fold(found, observed, take if files is not None or args.trace is not None else None)
        if files is not None:
            files.add(tables.finish(observed.open_row))
    compared = None if other is None else (*observed_of(other), versions_in(other.directory))
    if other is not None and compared is not None:
        await _fold(other, compared[0])
    dumps, versions = dump_directory(found, settings), versions_in(found.directory)
    write_output(out, report_page(observed, settings, versions, dumps, live=live, other=compared))
    screen.show(f"report    {out}, {observed.num_events:,} events, {observed.steps} steps")
    if args.trace is not None:
        write_output(args.trace, trace.encoded())
        left_out = f"; {trace.num_left_out:,} oldest ones are left out" if trace.num_left_out else ""
        screen.show(f"trace     {args.trace}, {len(trace.events):,} spans{left_out}")
    if files is not None:
        screen.show(f"tables    {args.parquet}: {', '.join(f'{name} {num:,}' for name, num in files.num_rows.items())}")
        if tables.num_late:
            late = count_of(tables.num_late, "evaluation")
            screen.show(f"{late} ended over {HELD_STEPS} steps late, and are not in the table steps")


async def _fold(found: "FoundRun", observed: "Observed", take: "Take | None" = None) -> bool:
    """Fold a run as of now; return whether it goes on."""
    from actors.observer.observing import observing

    notes = Screen(sys.stderr)
    async with observing(found, observed, note=notes.show, waits=False, take=take) as folding:
        live = folding.events.live
        async for _ in folding.batches():
            pass
    notes.show_all(observed.problems)
    return live
