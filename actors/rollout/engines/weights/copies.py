"""Where an engine reads weights that are in files, and whether these are what was announced.

Published files are compared by the rollout actor (files.py), copies of an engine's own node by the node's agent, which
makes them, and applies changes, while the engine serves.
"""

from functools import partial
from typing import Final, Protocol

import anyio
import msgspec
import structlog

from actors.rollout.engines.weights.files import FileChecks, WeightsDamaged
from actors.rollout.sglang.errors import EngineError
from messages import LocalCopyGiven, LocalCopyRequested, WeightsAnnounced
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError, CallRefused
from runtime.retrying import FOR_EVER, retried

log = structlog.get_logger()


class CopyRefused(EngineError):
    """The node's agent cannot make a copy of a version, or did not in time."""


class CopyDamaged(EngineError):
    """The node's copy of a version was damaged when an engine had read it; the next one is made anew."""


class AtHand(Protocol):
    """Brings weights in files to where an engine reads them."""

    async def bring(self, announced: WeightsAnnounced, *, doubted: bool) -> WeightsAnnounced:
        """The same weights where the engine is to read them, compared with their announcement.

        Args:
            announced: the version, whole or as changes.
            doubted: the engine failed with what was at hand.

        Raises:
            EngineError: they are not to be had.
        """
        ...

    async def check_read(self, announced: WeightsAnnounced) -> None:
        """Compare once more what an engine has read.

        Args:
            announced: as `bring` returned it.

        Raises:
            EngineError: it is not what was announced.
        """
        ...


class AsAnnounced:
    """Engines read the directory that the trainer names.

    Args:
        checks: of the files there; none: they are not compared.
    """

    def __init__(self, checks: FileChecks | None = None) -> None:
        self._checks = checks

    async def bring(self, announced: WeightsAnnounced, *, doubted: bool) -> WeightsAnnounced:
        """As announced, once its files are compared."""
        await self.check_read(announced)
        return announced

    async def check_read(self, announced: WeightsAnnounced) -> None:
        """Raises WeightsDamaged, or EngineUnavailable where the disk does not answer."""
        if self._checks is not None:
            await self._checks.check(announced)


UNCHECKED: Final = AsAnnounced()


class NodeCopies:
    """Engines read their own node's copies, which its agent makes and compares.

    Args:
        bus: to ask the agent on.
        agent: of the engine's node.
        timeout_s: for a copy.
        are_checked: those that are there already, and what an engine has read, are compared.
    """

    def __init__(self, bus: Bus, agent: str, timeout_s: float, *, are_checked: bool = True) -> None:
        self._bus = bus
        self._agent = agent
        self._timeout_s = timeout_s
        self._are_checked = are_checked

    async def bring(self, announced: WeightsAnnounced, *, doubted: bool) -> WeightsAnnounced:
        """The same weights in the node's own copy, once that is there. Asked again it does no harm.

        Raises:
            WeightsDamaged: what is published cannot become one.
            CopyRefused: there is none.
        """
        given = await self._ask(announced, doubted=doubted)
        if given.path:
            return msgspec.structs.replace(announced, path=given.path)
        reason = f"no copy of version {announced.version} on its node: {given.reason}"
        raise WeightsDamaged(reason) if given.unusable else CopyRefused(reason)

    async def check_read(self, announced: WeightsAnnounced) -> None:
        """Raises CopyDamaged, or CopyRefused where the agent does not answer."""
        if self._are_checked and announced.files:
            given = await self._ask(announced, was_read=True)
            if not given.path:
                raise CopyDamaged(f"its node's copy of version {announced.version}: {given.reason}")

    async def _ask(
        self, announced: WeightsAnnounced, *, doubted: bool = False, was_read: bool = False
    ) -> LocalCopyGiven:
        with anyio.move_on_after(self._timeout_s):
            ends = anyio.current_time() + self._timeout_s

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
                )
                return await self._bus.call(self._agent, request, LocalCopyGiven, timeout_s=left_s)

            try:
                return await retried(ask, on=BusError, times=FOR_EVER, failed=partial(_note, announced.version))
            except CallRefused as error:
                raise CopyRefused(f"its agent {self._agent}: {error}") from error
        return LocalCopyGiven(reason=f"its agent {self._agent} did not answer within {self._timeout_s:g} s")


def _note(version: int, error: Exception, failures: int) -> None:
    """The agent may be starting."""
    log.warning("local_copy_not_given", weight_version=version, error=str(error), in_a_row=failures)
    if isinstance(error, CallRefused):
        raise error
