"""Verifies the files of a version against their announcement, before and after an engine reads them.

An engine reads files without reporting their bytes. A flipped bit that moves the probe by less than its tolerance would
be served under a correct label. The check reads the disk as the rollout actor's node sees it. An engine on another node
may see other bytes, from a cache of its own.
"""

from functools import partial
from pathlib import Path

import anyio
import structlog

from actors.rollout.engines.weights.verification import WeightsMismatch
from actors.rollout.sglang.errors import EngineUnavailable
from messages import WeightsAnnounced
from runtime.models.file_sums import SharedLooks, damage_in
from runtime.settings.placement import UpdateLimits

log = structlog.get_logger()


class WeightsDamaged(WeightsMismatch):
    """The files of a version differ from the announcement, for every engine."""


class FileChecks:
    """Verifies published files against their announcement, for all engines of a rollout actor.

    Args:
        limits: of one verification, which shows no progress.
    """

    def __init__(self, limits: UpdateLimits) -> None:
        self._limits = limits
        self._looks = SharedLooks()

    async def check(self, announced: WeightsAnnounced) -> None:
        """Verify all files of a full version. Skips deltas, and announcements without file checksums (older trainers).

        Raises:
            WeightsDamaged: a file differs, or is unreadable.
            EngineUnavailable: the files were not read in time.
        """
        if not announced.files or announced.base_version:
            return
        begin, limit_s = anyio.current_time(), self._limits.load_s(announced.size_bytes)
        with anyio.move_on_after(limit_s):
            read = partial(damage_in, Path(announced.path), announced.files)
            damage = await self._looks.look(announced.version, read)
            took_s = anyio.current_time() - begin
            log.info("weight_files_checked", weight_version=announced.version, damage=damage, took_s=took_s)
            if damage:
                raise WeightsDamaged(f"its files differ from the announced ones: {damage}")
            return
        raise EngineUnavailable(f"{announced.path} was not read within {limit_s:g} s (min_load_mb_per_s)")
