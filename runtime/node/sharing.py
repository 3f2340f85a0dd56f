"""Files between nodes that share no directory: this node's room, the rooms of the others, and what it fetches."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

import anyio
import structlog

from runtime.bus.addresses import LIFETIME_S, RENEW_EVERY_S
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.http.fetching import Fetcher, Published
from runtime.http.room import Offered, Room, RoomAddress, open_room
from runtime.models.delta import Version
from runtime.models.versions import SERIES, WEIGHTS
from runtime.node.network import NodeAddress
from runtime.settings.placement import LOOPBACK

log = structlog.get_logger()

FETCHED: Final = "fetched"  # in the run directory: what each node has fetched
LOOK_EVERY_S: Final = 1.0  # for rooms of other nodes, while this one fetches
RELEASE_S: Final = 1.0


class Sharing:
    """Serves this node's weights and files to the others, and fetches theirs.

    Home serves what its trainer publishes and what it was asked for. Another node serves what it has fetched and
    verified.

    Args:
        run_dir: of the run, on this machine.
        node: this node.
        address: its address; None: loopback.
        is_home: whether it is home.
        show: prints a line for the user.
    """

    def __init__(
        self, run_dir: Path, node: str, address: NodeAddress | None, *, is_home: bool, show: Callable[[str], None]
    ) -> None:
        self._node = node
        self._address = address
        self._is_home = is_home
        self._others: tuple[RoomAddress, ...] = ()
        published = Published([run_dir / WEIGHTS / each for each in SERIES])
        self._room = Room(published.look) if is_home else Room()
        self._root = run_dir / FETCHED / node
        self._fetchers = {
            each: Fetcher(self._root / each, node, self._room, lambda: self._others, show) for each in SERIES
        }

    def fetches(self, manifest: str) -> bool:
        """Whether this node fetches a version; otherwise it reads the published files."""
        return not self._is_home and bool(manifest)

    def fetch(self, series: str, manifest: str, held: Collection[Version], *, verifies: bool = False) -> Path:
        """Return the directory of a version. Blocks; one call at a time.

        Args:
            series: of `SERIES`.
            manifest: digest of its manifest, as announced.
            held: versions from which deltas may begin.
            verifies: compare what is here already, too.

        Raises:
            FetchFailed: no node sent a part of it.
            OSError: it cannot be stored.
        """
        return self._fetchers[series].fetch(manifest, held=held, verifies=verifies)

    def fetch_files(self, manifest: str, name: str) -> Path:
        """Return the directory of other files, by its name in that of all that is fetched. Raises as `fetch` does."""
        return self._fetchers[""].fetch_files(manifest, self._root / name)

    def offer(self, offered: Mapping[str, Offered]) -> None:
        """Serve files under their digests. Safe to call from any thread."""
        self._room.offer(offered)

    def withdraw(self, digests: Collection[str]) -> None:
        """Serve these digests no longer. Safe to call from any thread."""
        self._room.withdraw(digests)

    def stop(self) -> None:
        """End fetches in progress: they raise FetchFailed."""
        for each in self._fetchers.values():
            each.stop()

    async def run(self, bus: Bus) -> None:
        """Keep the room open and known, and know those of others. Never returns.

        Raises:
            OSError: this node cannot listen at its address.
        """
        address = self._address
        host, announced = (LOOPBACK, LOOPBACK) if address is None else (address.ip, address.announced)
        async with open_room(self._room, self._node, host, announced, is_home=self._is_home) as own:
            log.info("room_opened", host=host, port=own.port)
            key = f"room.{self._node}"
            try:
                while True:
                    await self._renew(bus, key, own)
                    renew_at = anyio.current_time() + RENEW_EVERY_S
                    while anyio.current_time() < renew_at:
                        await anyio.sleep(LOOK_EVERY_S)
                        if any(each.num_active for each in self._fetchers.values()):
                            await self._look(bus)
            finally:
                with anyio.move_on_after(RELEASE_S, shield=True):
                    try:
                        await bus.kv.delete(key)
                    except BusError:  # it expires
                        pass

    async def _renew(self, bus: Bus, key: str, own: RoomAddress) -> None:
        try:
            await bus.kv.put(key, own, ttl_s=LIFETIME_S)
        except BusError as error:
            log.warning("room_not_announced", error=str(error))
        await self._look(bus)

    async def _look(self, bus: Bus) -> None:
        try:
            found = await bus.kv.latest("room.*", RoomAddress)
        except BusError as error:
            log.warning("rooms_unknown", error=str(error))
            return
        rooms = (entry.value for entry in found)
        self._others = tuple(room for room in rooms if room is not None and room.node != self._node)
