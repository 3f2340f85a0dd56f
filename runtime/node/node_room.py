"""This node's part in what nodes fetch from each other. Opens the room of the node once something needs it."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from runtime.bus.bus import Bus
from runtime.models.delta import Version
from runtime.models.manifest import FetchFailed
from runtime.node.checkpoint_copies import CheckpointCopies, offers_of_checkpoints
from runtime.node.node_plan import NodePlan
from runtime.node.run_files import OFFERED, FilesAtHome

if TYPE_CHECKING:
    from runtime.node.sharing import Sharing


class NodeRoom:
    """Serves files to other nodes and fetches theirs, as far as the run needs that.

    Args:
        plan: of this node.
        show: prints a line for the user.
    """

    def __init__(self, plan: NodePlan, show: Callable[[str], None]) -> None:
        self._plan = plan
        self._show = show
        self._sharing: Sharing | None = None
        self.copies = CheckpointCopies(plan.run_dir, plan.node, lambda: self.sharing)

    @property
    def sharing(self) -> "Sharing":
        """What this node shares. Raises FetchFailed: its room is not open yet."""
        if self._sharing is None:
            raise FetchFailed(f"node {self._plan.node} has not opened its room yet")
        return self._sharing

    def fetches(self, manifest: str) -> bool:
        """Whether this node fetches a version; otherwise it reads the published files."""
        return self._plan.shares_weights and not self._plan.owns_streams and bool(manifest)

    def fetch(self, series: str, manifest: str, held: Collection[Version], *, verifies: bool = False) -> Path:
        """Return the directory of a version, as `Sharing.fetch` does."""
        return self.sharing.fetch(series, manifest, held, verifies=verifies)

    async def run(self, bus: Bus, *, refuses: bool = False) -> None:
        """Share until cancelled.

        Args:
            bus: of the run.
            refuses: the run does not start: nodes that lack files get none.
        """
        plan = self._plan
        async with anyio.create_task_group() as tasks:
            if (plan.shares_weights or plan.copies_checkpoints) and not refuses:
                sharing = self._opened(bus, tasks)
                if plan.copies_checkpoints:
                    sharing.offer(await anyio.to_thread.run_sync(offers_of_checkpoints, plan.run_dir))
            if plan.given:
                directory = plan.run_dir / OFFERED
                files = FilesAtHome(plan.given, directory, lambda: self._opened(bus, tasks), refuses=refuses)
                tasks.start_soon(files.run, bus)

    def _opened(self, bus: Bus, tasks: TaskGroup) -> "Sharing":
        from runtime.node.sharing import Sharing  # with aiohttp, which runs that share nothing need not load

        if self._sharing is None:
            plan = self._plan
            self._sharing = Sharing(plan.run_dir, plan.node, plan.address, is_home=plan.owns_streams, show=self._show)
            tasks.start_soon(self._sharing.run, bus)
        return self._sharing
