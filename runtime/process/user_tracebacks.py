"""Publishes the traceback of a user's function, once for each place that raises."""

from typing import Final

from messages import UserFunctionRaised
from messages.plain import clipped
from runtime.bus.bus import Bus
from runtime.util.tracebacks import MAX_CHARS, places_in

MAX_PUBLISHED: Final = 20  # by one process


class UserTracebacks:
    """The tracebacks that this process has published."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._published: set[tuple[str, ...]] = set()

    async def publish(self, function: str, trace: str | None, *, took_too_long: bool = False) -> None:
        """Publish a traceback, unless one of the same places was published, or many others were.

        Args:
            function: its name, or the setting that names it.
            trace: of `user_traceback`; None or empty: nothing is known.
            took_too_long: whether it was ended there.
        """
        if not trace:
            return
        places = places_in(trace) or (trace,)
        if places in self._published or len(self._published) >= MAX_PUBLISHED:
            return
        self._published.add(places)
        text = clipped(trace, MAX_CHARS)
        event = UserFunctionRaised(
            instance=self._bus.name, function=function, traceback=text, took_too_long=took_too_long
        )
        await self._bus.publish(event)
