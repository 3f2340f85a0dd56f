"""Halt the round that a run generates now: requests end, their groups keep their tokens, and the run goes on."""

import sys
from typing import TYPE_CHECKING

from bin.entry import Screen, add_run, ended, found_run, parser_of, unless_stopped
from runtime.util.exit_codes import EXIT_FAILED, EXIT_OK

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
    add_run(parser)
    args = parser.parse_args(argv)
    return ended(lambda: _call(found_run(args.run, trust=args.trust)))


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
