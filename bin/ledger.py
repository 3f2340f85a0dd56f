"""Print a run's ledger: what became of every prompt group, sample and second, during the run or after it."""

import argparse
import logging
import sys
from functools import partial
from typing import TYPE_CHECKING

from bin.entry import Screen, add_run, ended, found_run, parser_of, unless_stopped
from runtime.util.exit_codes import EXIT_FAILED, EXIT_OK
from runtime.util.formatting import printable_json

if TYPE_CHECKING:
    from runtime.node.reopen import FoundRun

EPILOG = """While a node daemon runs the run, the command reads the run's bus, otherwise a copy of the stored events.
It never writes to the run.

exit codes: 0 printed; 1 the group does not exist, the books do not close, or the log cannot be read; 2 the run does
not exist"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    return ended(lambda: _print_ledger(args))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("ledger", __doc__, EPILOG)
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="Print one JSON object; with --group, one line per event.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--group", type=int, metavar="ID", help="Tell the life of one group, from issue to end.")
    what.add_argument("--bias", action="store_true", help="Compare issued samples with trained ones.")
    what.add_argument(
        "--time", action="store_true", help="Say which share of the wall time went into steps that count."
    )
    return parser


def _print_ledger(args: argparse.Namespace) -> int:
    import anyio  # this and the imports below bring in the bus, which --help does not need
    import structlog

    from runtime.bus.errors import BusError
    from runtime.node.reopen import NoLog
    from runtime.util.errors import flatten

    run = found_run(args.run, trust=args.trust)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # hides retries
    if args.group is not None:
        tell = partial(_print_group, run, args.group, args.json)
    elif args.bias:
        tell = partial(_print_bias, run, args.json)
    elif args.time:
        tell = partial(_print_time, run, args.json)
    else:
        tell = partial(_print_books, run, args.json)
    problems: list[BaseException] = []
    try:
        return anyio.run(unless_stopped, tell)
    except* (NoLog, BusError, OSError) as errors:
        problems = flatten(errors)
    Screen(sys.stderr).show(str(problems[0]))
    return EXIT_FAILED


async def _print_books(run: "FoundRun", as_json: bool) -> int:
    import msgspec

    from runtime.ledger.books import LedgerReport, lines_of
    from runtime.node.reopen import opened_log

    report = LedgerReport()
    async with opened_log(run) as log:
        if log.begins is not None:
            report.begin(log.begins)
        async for received in log.events.so_far():
            report.take(received.message, received.seq)
    _warn_of_gap(run, report.first_seq, "groups trained before are missing from the list")
    summary = report.summary(run.name, live=log.live)
    Screen(sys.stdout).show_all(
        [printable_json(msgspec.json.encode(summary).decode())] if as_json else list(lines_of(summary))
    )
    return EXIT_OK if summary.books.closed else EXIT_FAILED


def _warn_of_gap(run: "FoundRun", first_seq: int, what: str) -> None:
    """Say that the beginning of the log is gone."""
    if first_seq > 1:
        gap = f"the log begins at event {first_seq}, and {run.directory} has no archive of earlier events"
        Screen(sys.stderr).show(f"{gap}: {what}")


async def _print_bias(run: "FoundRun", as_json: bool) -> int:
    import msgspec

    from runtime.ledger.bias import BiasReport, bias_lines
    from runtime.node.reopen import opened_log

    report, first_seq = BiasReport(), 0
    async with opened_log(run) as log:
        if log.begins is not None:
            report.begin(log.begins)
        async for received in log.events.so_far():
            first_seq = first_seq or received.seq
            report.take(received.message, received.seq)
    _warn_of_gap(run, first_seq, "samples of groups that ended before are not counted")
    bias = report.result()
    Screen(sys.stdout).show_all(
        [printable_json(msgspec.json.encode(bias).decode())] if as_json else list(bias_lines(bias))
    )
    return EXIT_OK


async def _print_time(run: "FoundRun", as_json: bool) -> int:
    import msgspec

    from runtime.node.reopen import opened_log
    from runtime.report.times import WallTime

    wall, first_seq = WallTime(), 0
    async with opened_log(run) as log:
        async for received in log.events.so_far():
            first_seq = first_seq or received.seq
            wall.take(received.message, received.unix_time)
    _warn_of_gap(run, first_seq, "the time before is not counted")
    told = {"run": run.name, "wall_s": wall.wall_s, "steps": wall.account.num_steps, "seconds": wall.seconds()}
    Screen(sys.stdout).show_all([printable_json(msgspec.json.encode(told).decode())] if as_json else list(wall.lines()))
    return EXIT_OK


async def _print_group(run: "FoundRun", group_id: int, as_json: bool) -> int:
    import msgspec

    from messages import GroupsIssued
    from runtime.ledger.group_life import GroupLife, words_of
    from runtime.node.reopen import opened_log

    life = GroupLife(group_id)
    lines: list[str] = []
    newest = -1
    async with opened_log(run) as log:
        async for received in log.events.so_far():
            if isinstance(received.message, GroupsIssued):
                newest = max([newest, *(group.group_id for group in received.message.groups)])
            event = life.take(received.message, received.seq)
            if event is not None and not as_json:
                lines.append(f"{received.time}  {words_of(event, life)}")
            elif event is not None:
                kept = {"kept_without_verdict": True} if life.kept_without_verdict else {}
                shown = {"seq": received.seq, "time": received.time, **msgspec.to_builtins(event), **kept}
                lines.append(printable_json(msgspec.json.encode(shown).decode()))
    if not lines:
        issued = "no group yet" if newest < 0 else f"groups 0 to {newest}"
        Screen(sys.stderr).show(f"run {run.name} has no group {group_id}: it has issued {issued}")
        return EXIT_FAILED
    Screen(sys.stdout).show_all(lines)
    return EXIT_OK
