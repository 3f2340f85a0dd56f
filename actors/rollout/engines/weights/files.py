"""Weight files that an engine reads, verified against their announcement before and after it reads them.

An engine reads files without reporting their bytes. A flipped bit that moves the probe by less than its tolerance would
be served under a correct label. The rollout actor verifies published files, as its own node sees them. An engine on
another node may see other bytes, from a cache of its own. The node daemon makes and verifies its node's own copy,
applying deltas, while the engine serves.
"""

from functools import partial
from pathlib import Path
from typing import Final, Literal, Protocol

import anyio
import msgspec
import structlog

from actors.rollout.engines.weights.verification import WeightsMismatch
from actors.rollout.sglang.errors import EngineError, EngineUnavailable
from messages import LocalCopyGiven, LocalCopyRequested, WeightsAnnounced
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError, CallRefused
from runtime.models.file_sums import SharedLooks, damage_in
from runtime.models.versions import ADAPTER_BASES, ADAPTERS
from runtime.settings.placement import UpdateLimits
from runtime.util.retrying import FOR_EVER, retried

log = structlog.get_logger()


class WeightsDamaged(WeightsMismatch):
    """The files of a version differ from the announcement, for every engine."""


class CopyRefused(EngineError):
    """The node daemon cannot provide a copy of a version, or did not in time."""


class CopyDamaged(EngineError):
    """The node's copy was damaged when an engine had read it; the next copy is made from scratch."""


class FileSource(Protocol):
    """Makes weight files available where an engine reads them."""

    async def provide(self, announced: WeightsAnnounced, *, doubted: bool) -> WeightsAnnounced:
        """Return the announced weights at the path that the engine reads, verified.

        Args:
            announced: the version, full or as a delta.
            doubted: the engine failed with the files that were available before.

        Raises:
            EngineError: they are not available.
        """
        ...

    async def check_read(self, announced: WeightsAnnounced) -> None:
        """Verify the files again after an engine has read them.

        Args:
            announced: as `provide` returned it.

        Raises:
            EngineError: they differ from the announcement.
        """
        ...


class PublishedFiles:
    """File source for engines that read the published directory itself; one for all engines of a rollout actor.

    Args:
        limits: of one verification, which shows no progress; None: the files are not verified.
    """

    def __init__(self, limits: UpdateLimits | None = None) -> None:
        self._limits = limits
        self._looks = SharedLooks()

    async def provide(self, announced: WeightsAnnounced, *, doubted: bool) -> WeightsAnnounced:
        """Return the announcement unchanged, after verifying its files."""
        await self.check_read(announced)
        return announced

    async def check_read(self, announced: WeightsAnnounced) -> None:
        """Verify all files of a full version. The no-op trainer announces no checksums of its files.

        Raises:
            WeightsDamaged: a file differs, or is unreadable.
            EngineUnavailable: the files were not read in time.
        """
        if self._limits is None or not announced.files or announced.base_version:
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


UNCHECKED: Final = PublishedFiles()


class NodeCopies:
    """File source for engines that read their node's copy, which the node daemon makes and verifies.

    Args:
        bus: for calls to the node daemon.
        agent: address of the node daemon of the engine's node.
        limits: for a copy, which shows no progress.
        are_checked: verify existing copies, and copies that an engine has read.
    """

    def __init__(self, bus: Bus, agent: str, limits: UpdateLimits, *, are_checked: bool = True) -> None:
        self._bus = bus
        self._agent = agent
        self._limits = limits
        self._are_checked = are_checked

    async def provide(self, announced: WeightsAnnounced, *, doubted: bool) -> WeightsAnnounced:
        """Return the announced weights at the node's own copy, once that exists. Idempotent.

        Raises:
            WeightsDamaged: the published files cannot be made into a copy.
            CopyRefused: there is no copy.
        """
        given = await self._ask(announced, doubted=doubted)
        if given.path:
            return msgspec.structs.replace(announced, path=given.path)
        reason = f"no copy of version {announced.version} on its node: {given.reason}"
        raise WeightsDamaged(reason) if given.unusable else CopyRefused(reason)

    async def check_read(self, announced: WeightsAnnounced) -> None:
        """Verify the copy after a read. Raises CopyDamaged, or CopyRefused if the node daemon does not respond."""
        if self._are_checked and announced.files:
            given = await self._ask(announced, was_read=True)
            if not given.path:
                raise CopyDamaged(f"its node's copy of version {announced.version}: {given.reason}")

    async def _ask(
        self, announced: WeightsAnnounced, *, doubted: bool = False, was_read: bool = False
    ) -> LocalCopyGiven:
        limit_s = self._limits.load_s(announced.size_bytes)
        with anyio.move_on_after(limit_s):
            ends = anyio.current_time() + limit_s

            async def ask() -> LocalCopyGiven:
                left_s = max(0.1, ends - anyio.current_time())
                request = LocalCopyRequested(
                    version=announced.version,
                    checksum=announced.checksum,
                    path=announced.path,
                    timeout_s=left_s,
                    doubted=doubted,
                    files=announced.files if self._are_checked else {},
                    was_read=was_read,
                    manifest=announced.manifest,
                    series=series_of(announced),
                )
                return await self._bus.call(self._agent, request, LocalCopyGiven, timeout_s=left_s)

            try:
                return await retried(ask, on=BusError, times=FOR_EVER, failed=partial(_note, announced.version))
            except CallRefused as error:
                raise CopyRefused(f"its node daemon {self._agent}: {error}") from error
        return LocalCopyGiven(reason=f"its node daemon {self._agent} did not answer within {limit_s:g} s")


def series_of(announced: WeightsAnnounced) -> Literal["", "adapters", "adapters/base"]:
    """Return which of the numbered series an announced version belongs to."""
    if announced.kind == "lora":
        return ADAPTERS
    return "" if announced.version else ADAPTER_BASES  # the base model of adapters is announced as version 0


def _note(version: int, error: Exception, failures: int) -> None:
    """Log a failed call and retry it, as the node daemon may be starting; re-raise a refusal."""
    log.warning("local_copy_not_given", weight_version=version, error=str(error), in_a_row=failures)
    if isinstance(error, CallRefused):
        raise error
