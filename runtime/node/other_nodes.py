"""The other nodes of a run, as the node with the bus sees them: by their claims."""

from collections.abc import Callable, Mapping
from typing import Final

import anyio
import structlog

from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.node.claims.node_claim import NodeHolder, claims, place_of
from runtime.node.missing import Missing

log = structlog.get_logger()

LOOK_EVERY_S: Final = 1.0
SILENT_AFTER_S: Final = 8.0  # without a renewal of a claim, which comes every 5 s
LEAVE_WITHIN_S: Final = 5.0  # at the end of the run


class _Seen:
    """A node whose claim was seen."""

    def __init__(self, holder: NodeHolder, revision: int, now: float) -> None:
        self.holder = holder
        self.revision = revision
        self.renewed_at = now  # on this machine's clock
        self.silent = False
        self.away = False  # its claim expired


class NodesSeen:
    """Tracks which nodes joined, left, are silent or came back. Pure."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._nodes: dict[str, _Seen] = {}

    def look(self, now: float, found: Mapping[str, tuple[NodeHolder, int]]) -> list[str]:
        """Compare the claims with those seen before, and return the lines to show.

        Args:
            now: on this machine's monotonic clock, in seconds.
            found: claims by node, with their revisions.
        """
        lines: list[str] = []
        for node, (holder, revision) in found.items():
            seen = self._nodes.get(node)
            if node == self._own:
                continue
            if seen is None or seen.holder != holder:
                lines.append(f"node {node} joined: {place_of(holder)}")
                self._nodes[node] = _Seen(holder, revision, now)
            elif seen.revision != revision:
                if seen.silent:
                    lines.append(f"node {node} is back")
                seen.revision, seen.renewed_at, seen.silent, seen.away = revision, now, False, False
            elif now - seen.renewed_at > SILENT_AFTER_S and not seen.silent:
                seen.silent = True
                lines.append(f"node {node} has been silent for {now - seen.renewed_at:.0f} s")
        for node, seen in [each for each in self._nodes.items() if each[0] not in found]:
            if not seen.silent:
                del self._nodes[node]
                lines.append(f"node {node} left")
            elif not seen.away:
                seen.away = True  # the same daemon may come back
                lines.append(f"node {node} is away")
        return lines


async def watch_nodes(
    bus: Bus, own: str, missing: Missing, show: Callable[[str], None], end: Callable[[str], None]
) -> None:
    """Show when other nodes join, leave, fall silent and come back, until cancelled. End a run that lacks one."""
    seen = NodesSeen(own)
    while True:
        try:
            found = await claims(bus)
        except BusError as error:
            log.warning("nodes_not_seen", error=str(error))
        else:
            looked = missing.look(anyio.current_time(), {*found, own})
            for line in (*seen.look(anyio.current_time(), found), *looked.lines):
                show(line)
            if looked.failure is not None:
                end(looked.failure)
                return
        await anyio.sleep(LOOK_EVERY_S)


async def wait_until_left(bus: Bus, own: str) -> None:
    """Wait, at the end of the run, until the other nodes released their claims: they need the bus to see the end."""
    with anyio.move_on_after(LEAVE_WITHIN_S):
        try:
            while set(await claims(bus)) - {own}:  # noqa: ASYNC110 - other machines release them
                await anyio.sleep(0.1)
        except BusError as error:
            log.warning("nodes_not_seen", error=str(error))
