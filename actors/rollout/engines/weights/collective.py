"""Weights by broadcast: an engine and the trainer are in process groups, one for each pipeline stage."""

import structlog

from actors.rollout.sglang.errors import RequestRefused
from actors.rollout.sglang.updates import BucketLayout, GroupAddress, WeightUpdates
from messages import BucketSent, GroupsOffered

log = structlog.get_logger()


class UpdateGroups:
    """The groups that engines are in."""

    def __init__(self, updates: WeightUpdates, timeout_s: float) -> None:
        """Know none yet; an engine gets so long for each call."""
        self._updates = updates
        self._timeout_s = timeout_s
        self._joined: dict[str, tuple[str, ...]] = {}  # by engine, also of a process before this one

    async def join(self, url: str, step: GroupsOffered, offset: int) -> None:
        """Have an engine meet the trainer in groups, in place of those that it was in.

        Raises:
            EngineError: it did not.
        """
        for name in self._joined.pop(url, ()):
            try:
                await self._updates.destroy_group(url, name, timeout_s=self._timeout_s)
            except RequestRefused as error:  # it is another process, or never was in it as the trainer died meanwhile
                log.info("update_group_not_left", url=url, group=name, error=str(error))
        self._joined[url] = tuple(group.name for group in step.groups)
        for group in step.groups:
            address = GroupAddress(group.name, group.address, group.port, group.world_size, group.backend)
            await self._updates.init_group(url, address, rank_offset=offset, timeout_s=self._timeout_s)

    async def take(self, url: str, step: BucketSent) -> None:
        """Have an engine take a bucket that is broadcast.

        Raises:
            EngineError: it did not.
        """
        layout = BucketLayout(step.names, step.dtypes, step.shapes)
        await self._updates.update_from_distributed(url, step.group, layout, timeout_s=self._timeout_s)
