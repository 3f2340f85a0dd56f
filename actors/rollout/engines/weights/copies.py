"""Weights in files from an engine's own node: its agent copies them, and applies changes, while the engine serves."""

from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import msgspec
import structlog

from actors.rollout.sglang.errors import EngineError
from messages import LocalCopyGiven, LocalCopyRequested, WeightsAnnounced
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError, CallRefused
from runtime.retrying import FOR_EVER, retried

log = structlog.get_logger()

AtHand = Callable[[WeightsAnnounced, bool], Awaitable[WeightsAnnounced]]  # True: it failed with what was at hand


class CopyRefused(EngineError):
    """The node's agent cannot make a copy of a version, or did not in time."""


async def as_announced(announced: WeightsAnnounced, doubted: bool = False) -> WeightsAnnounced:
    """Engines read the directory that the trainer names."""
    return announced


async def from_copy(
    bus: Bus, agent: str, timeout_s: float, announced: WeightsAnnounced, doubted: bool = False
) -> WeightsAnnounced:
    """The same weights in the node's own copy, once that is there. Asked again it does no harm.

    Args:
        bus: to ask the agent on.
        agent: of the engine's node.
        timeout_s: that is waited.
        announced: the version, whole or as changes.
        doubted: the engine did not hold it after it had read the copy.

    Raises:
        CopyRefused: there is none.
    """
    reason = f"its agent {agent} did not answer within {timeout_s:g} s"
    with anyio.move_on_after(timeout_s):
        ends = anyio.current_time() + timeout_s

        async def ask() -> LocalCopyGiven:
            left_s = max(0.1, ends - anyio.current_time())
            request = LocalCopyRequested(
                version=announced.version,
                checksum=announced.checksum,
                path=announced.path,
                timeout_s=left_s,
                doubted=doubted,
            )
            return await bus.call(agent, request, LocalCopyGiven, timeout_s=left_s)

        try:
            given = await retried(ask, on=BusError, times=FOR_EVER, failed=partial(_note, announced.version))
        except CallRefused as error:
            raise CopyRefused(f"its agent {agent}: {error}") from error
        if given.path:
            return msgspec.structs.replace(announced, path=given.path)
        reason = given.reason
    raise CopyRefused(f"no copy of version {announced.version} on its node: {reason}")


def _note(version: int, error: Exception, failures: int) -> None:
    """The agent may be starting."""
    log.warning("local_copy_not_given", weight_version=version, error=str(error), in_a_row=failures)
    if isinstance(error, CallRefused):
        raise error
