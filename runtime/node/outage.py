"""Bus outages on a node without the NATS server: how long it continues, and the lines that it shows.

Such a node keeps its processes during an outage. Once the bus is back, only its claim decides whether it still runs
this node.
"""

from collections.abc import Callable
from typing import Final

import anyio
import msgspec
import structlog

from runtime.bus.bus import Bus

log = structlog.get_logger()

LOOK_EVERY_S: Final = 0.5
REMIND_EVERY_S: Final = 60.0
SPARED_AFTER_S: Final = 60.0  # requests to an engine that were open in an outage fail late


class Looked(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one look at the connection."""

    line: str | None = None  # to show
    failure: str | None = None  # why the node ends


class Outage:
    """Decides what an outage means. Pure.

    Args:
        place: URL of the bus, without its login.
        allowed_s: seconds for which the node goes on without the bus.
    """

    def __init__(self, place: str, allowed_s: float) -> None:
        self._place = place
        self._allowed_s = allowed_s
        self._away_s = 0.0  # at the last look
        self._shown_s = 0.0  # when a line was last shown

    def look(self, away_s: float) -> Looked:
        """Decide whether this node goes on, and which line it shows.

        Args:
            away_s: seconds since the connection was lost; 0 while there is one.
        """
        before_s, self._away_s = self._away_s, away_s
        if away_s >= self._allowed_s:
            return Looked(failure=f"{self._place} did not answer for {self._allowed_s:g} s (bus.outage_s)")
        if before_s and away_s < before_s:  # perhaps lost again meanwhile
            self._shown_s = 0.0
            back = f"the bus answers again, after {before_s:.0f} s"
            return Looked(line=f"{back}, and was lost again" if away_s else back)
        if away_s and not before_s:
            self._shown_s = away_s
            return Looked(
                line=f"the bus at {self._place} does not answer; this node goes on without it "
                f"for up to {self._allowed_s:g} s (bus.outage_s)"
            )
        if away_s - self._shown_s >= REMIND_EVERY_S:
            self._shown_s = away_s
            return Looked(line=f"the bus has not answered for {away_s:.0f} s of {self._allowed_s:g} s (bus.outage_s)")
        return Looked()


def explains_silence(back_s: float) -> bool:
    """Return whether an outage that ended so many seconds ago may be why a server did not answer."""
    return back_s < SPARED_AFTER_S


async def watch_bus(bus: Bus, outage: Outage, show: Callable[[str], None], end: Callable[[str], None]) -> None:
    """Show when the bus is lost and is back, until cancelled. End the node when it was away too long."""
    while True:
        looked = outage.look(bus.away_s)
        if looked.line is not None:
            log.warning("bus_outage", line=looked.line)
            show(looked.line)
        if looked.failure is not None:
            end(looked.failure)
            return
        await anyio.sleep(LOOK_EVERY_S)
