"""Halt the round that a run generates now: requests end, their groups keep their tokens, and the run goes on."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from bin.interrupt import handle_ctrl_c

    handle_ctrl_c()

from bin.entry import Screen, ended, parser_of, run, unless_stopped
from runtime.util.exit_codes import EXIT_FAILED, EXIT_INPUT_ERROR, EXIT_OK

if TYPE_CHECKING:
    from runtime.node.reopen import FoundRun

EPILOG = """The groups go back to the pool as after a train step, by rollout.on_halt, and are issued again for the same
batch. With on_halt = "drop" they are lost, and others are issued.
The call needs the login of the run's nodes (bus.url in the run directory): no external client may make it.

exit codes: 0 the round is halted; 1 nothing is being generated, or the run cannot be reached; 2 the run does not
exist; 130 stopped by Ctrl-C"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = parser_of("halt", __doc__, EPILOG)
    parser.add_argument("run", metavar="RUN", help="Name of a run under ./runs, or a run directory.")
    args = parser.parse_args(argv)
    return ended(lambda: _halt(args))


def _halt(args: argparse.Namespace) -> int:
    from runtime.node.reopen import NoSuchRun, find_run  # it brings in the bus, which --help does not need

    try:
        found = find_run(args.run)
    except NoSuchRun as error:
        Screen(sys.stderr).show(str(error))
        return EXIT_INPUT_ERROR
    return _call(found)


def _call(found: "FoundRun") -> int:
    import anyio

    from runtime.node.halting import NotHalted, halt_round, halted_line
    from runtime.process.logs import silenced

    async def halt() -> int:
        try:
            Screen(sys.stdout).show(halted_line(await halt_round(found)))
        except NotHalted as error:
            Screen(sys.stderr).show(str(error))
            return EXIT_FAILED
        return EXIT_OK

    with silenced():
        return anyio.run(unless_stopped, halt)


if __name__ == "__main__":
    run(main)
