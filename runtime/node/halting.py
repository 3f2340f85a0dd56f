"""Halts the round that a run generates now, for a person: one call to the buffer, with the login of the run's nodes."""

from typing import Final

from messages import HaltAnswered, HaltRequested
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError, CallRefused, CallTimeout, NotServed
from runtime.node.claims.claim import kept_unclaimed
from runtime.node.reopen import LIMITS, FoundRun, certificate_in, url_in
from runtime.settings.reading.foreign import TRUST
from runtime.util.formatting import count_of
from runtime.util.import_path import command_name

ANSWER_S: Final = 15.0
BUFFER: Final = "buffer"


class NotHalted(Exception):
    """Nothing was halted, or that is unknown; the text says why."""


def may_halt(run: FoundRun) -> bool:
    """Whether this user may read the login of the run's nodes. Without it the server refuses the call."""
    try:
        return not run.foreign and (url_in(run.directory) is not None or run.bus_url is not None)
    except OSError:
        return False


async def halt_round(run: FoundRun) -> HaltAnswered:
    """End the round that a run generates now. Its groups keep what they have, and go on in the next round.

    Raises:
        NotHalted: the run is not live, nothing is being generated, or no answer came.
    """
    try:
        url, certificate = _bus_of(run), certificate_in(run.directory)
    except OSError as error:
        raise NotHalted(f"only a user who may read the login of the run's nodes can halt a round: {error}") from error
    try:
        async with Bus.connect(url, run.name, name="halt", limits=LIMITS, certificate=certificate) as bus:
            answer = await bus.call(BUFFER, HaltRequested(), HaltAnswered, timeout_s=ANSWER_S)
    except CallTimeout as error:
        ledger = f"{command_name('ledger')} {run.name}"
        raise NotHalted(f"no answer, so the round may be halted or not ({ledger}): {error}") from error
    except NotServed as error:
        raise NotHalted(
            f"the buffer of {run.name} does not run: the run is over, or it restarts (try again)"
        ) from error
    except CallRefused as error:
        raise NotHalted(f"the buffer of {run.name} could not halt the round: {error}") from error
    except BusError as error:
        raise NotHalted(f"the bus of {run.name} does not answer: {error}") from error
    if answer.reason:
        raise NotHalted(answer.reason)
    return answer


def _bus_of(run: FoundRun) -> str:
    """Return the URL of a live run's bus, with the login of its nodes."""
    if run.foreign:
        raise NotHalted(f"{run.directory} may be a stranger's: {TRUST} calls the bus that it names")
    url = url_in(run.directory) or run.bus_url
    with kept_unclaimed(run.directory) as unclaimed:
        is_over = run.bus_url is None and unclaimed
    if url is None or is_over:
        raise NotHalted(f"no node daemon runs {run.name}: nothing is being generated")
    return url


def halted_line(answer: HaltAnswered) -> str:
    """Format a halt as one line."""
    groups = count_of(answer.num_groups, "group")
    return f"round {answer.round} is halted: {groups} in flight go back to the pool, and the run goes on"
