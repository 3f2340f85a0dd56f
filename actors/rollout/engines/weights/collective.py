"""Weight transfer by broadcast: engine and trainer share torch process groups, one per pipeline stage."""

import structlog

from actors.rollout.sglang.errors import RequestRefused
from actors.rollout.sglang.updates import BucketLayout, GroupAddress, WeightUpdates
from messages import BucketSent

log = structlog.get_logger()


class UpdateGroups:
    """The update groups (torch process groups) that engines have joined."""

    def __init__(self, updates: WeightUpdates, timeout_s: float) -> None:
        """Start without groups; `timeout_s` is the timeout of each call to an engine."""
        self._updates = updates
        self._timeout_s = timeout_s
        self._joined: dict[str, tuple[str, ...]] = {}  # by engine URL; may belong to an earlier process of the engine

    async def take(self, url: str, step: BucketSent, offset: int) -> None:
        """Make an engine receive a broadcast bucket, in its groups: before the first one it joins them.

        Args:
            url: of the engine.
            step: the bucket.
            offset: the engine's first rank in the groups.

        Raises:
            EngineError: it did not join or receive.
        """
        if self._joined.get(url) != tuple(group.name for group in step.groups):
            await self._join(url, step, offset)
        layout = BucketLayout(step.names, step.dtypes, step.shapes)
        group = step.groups[step.stage].name
        await self._updates.update_from_distributed(url, group, layout, timeout_s=self._timeout_s)

    async def _join(self, url: str, step: BucketSent, offset: int) -> None:
        """Make an engine join the groups of all stages, after leaving its earlier ones."""
        for name in self._joined.pop(url, ()):
            try:
                await self._updates.destroy_group(url, name, timeout_s=self._timeout_s)
            except RequestRefused as error:  # the process is new, or the trainer died before it joined
                log.info("update_group_not_left", url=url, group=name, error=str(error))
        self._joined[url] = tuple(group.name for group in step.groups)
        for group in step.groups:
            address = GroupAddress(group.name, group.address, group.port, group.world_size, group.backend)
            await self._updates.init_group(url, address, rank_offset=offset, timeout_s=self._timeout_s)
